"""Reading of moves of conversations: what plans are made from, and how far they are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from uuid import UUID

from django.db.models import Count, F, Max, Q, QuerySet, Sum

from exaserve_ops.inventory.domain.drain import DRAINING, NOT_DRAINED
from exaserve_ops.inventory.domain.liveness import ALIVE
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.departure import read_departure
from exaserve_ops.serving.domain.reach import is_open
from exaserve_ops.serving.models import Deployment, Release, Replica
from exaserve_ops.serving.selectors.handover import HANDS_OVER, ROUTED, stands_down
from exaserve_ops.sessions.domain.handover import LeavingReplica
from exaserve_ops.sessions.domain.moves import DONE, PLANNED, RELOCATION
from exaserve_ops.sessions.domain.relocation import (
    ACTIVE_SECONDS,
    BALANCE,
    FleetSessions,
    HeldSession,
    Holder,
    Levelled,
    Rates,
    ReplicaRoom,
    Thresholds,
    Underway,
    is_full,
)
from exaserve_ops.sessions.domain.sending import Sending, fit_sending
from exaserve_ops.sessions.domain.timeline import prefill_rate, read_turns
from exaserve_ops.sessions.models import InferenceSession, Relocation
from workers.protocol.engines.session_moves import (
    BLOCK_TRANSFER,
    EXPORT_IMPORT,
    NO_MOVES,
    WARM_PREFILL,
    Moves,
    kv_shape,
    session_moves,
)

REST = timedelta(seconds=10)
"""After a move has ended, before the same session is planned for again, though its replica leaves."""
LATEST_MOVES = 10
MOST_PLANNED = 5_000
"""Sessions in one plan, those with the newest turns; of each of the two reasons to look at them."""
FULLEST = 32
"""Replicas of a deployment whose sessions are looked at to level it."""
MEASURED_FOR = timedelta(hours=1)
MEASURED_MOVES = 100
MEASURED_SESSIONS = 20
"""What moving and computing cost is judged by so much of the deployment."""
ACTIVE_FOR = timedelta(seconds=ACTIVE_SECONDS)
_CAME_BACK = Q(turns__gte=2) | Q(replica_changes__gt=0)
"""A conversation of one turn, as most may be, says nothing about the next."""


def takes_sessions(replica: Replica) -> bool:
    """Whether conversations may be moved to it: routed to, reached, and there to stay."""
    node = replica.node
    return (
        node is not None
        and (replica.status, replica.wanted, replica.role)
        == (states.READY, Replica.Wanted.RUN, Replica.Role.SERVING)
        and is_open(replica.reach, replica.sleep_state)
        and bool(replica.address)
        and not replica.departure
        and node.liveness == ALIVE
        and node.drain_status == NOT_DRAINED
    )


def best_target(source: Replica, *, now: datetime) -> Replica | None:
    """The replica of the same deployment that has the fewest live tokens, the same node's first."""
    others = [
        replica
        for replica in Replica.objects.select_related("node")
        .filter(deployment=source.deployment_id, status=states.READY)
        .exclude(pk=source.pk)
        if takes_sessions(replica)
    ]
    tokens = dict(
        InferenceSession.objects.filter(replica__in=others, last_turn_at__gt=now - ACTIVE_FOR)
        .order_by()
        .values_list("replica")
        .annotate(tokens=Sum("context_tokens"))
    )
    ranked = [(tokens.get(r.pk) or 0, r.node_id != source.node_id, r.name, r) for r in others]
    return min(ranked, key=lambda entry: entry[:3])[3] if ranked else None


def move_targets(session: InferenceSession) -> list[Replica]:
    """Replicas that it could be moved to."""
    source = session.replica
    if source is None:
        return []
    others = Replica.objects.select_related("node").filter(
        deployment=source.deployment_id, status=states.READY
    )
    return [replica for replica in others.exclude(pk=source.pk) if takes_sessions(replica)]


def latest_relocations(session: InferenceSession) -> list[Relocation]:
    """The session's newest moves."""
    rows = Relocation.objects.filter(session=session).select_related("source", "target")
    return list(rows.order_by("-created_at")[:LATEST_MOVES])


def live_relocations() -> list[Relocation]:
    """Moves that have not ended, oldest first, with all that moving needs."""
    rows = Relocation.objects.filter(status__in=RELOCATION.live).order_by("created_at")
    return list(rows.select_related("session", "source__node", "target__node"))


@dataclass(frozen=True, slots=True)
class DepartureProgress:
    """How far the conversations of a replica have left it."""

    sessions_left: int
    """That had a turn in the last ten minutes, and whose next turn would still go there."""
    moves_underway: int
    replica_status: str

    @property
    def is_over(self) -> bool:
        """Whether nobody who was active lately is left."""
        return not self.sessions_left and not self.moves_underway


def departures(replica_ids: Collection[UUID], *, now: datetime) -> dict[UUID, DepartureProgress]:
    """How far the conversations of these replicas have left, whether that was asked for or not."""
    active = Q(inference_sessions__last_turn_at__gt=now - ACTIVE_FOR)
    live = Count("inference_sessions", active, distinct=True)
    moving = Count("relocations_from", Q(relocations_from__status__in=RELOCATION.live), distinct=True)
    rows = Replica.objects.filter(pk__in=replica_ids).order_by()
    told = rows.annotate(live=live, moving=moving).values_list("pk", "live", "moving", "status")
    return {pk: DepartureProgress(left, underway, status) for pk, left, underway, status in told}


def leaving_replicas(*, now: datetime, only: UUID | None = None) -> list[LeavingReplica]:
    """Replicas that are let go, or stand down, and hand their conversations over, as the record has them."""
    rows = Replica.objects.filter(HANDS_OVER).select_related("node", "deployment")
    if only is not None:
        rows = rows.filter(pk=only)
    waiting = list(rows.defer("exit_log_tail"))
    if not waiting:
        return []
    progress = departures([row.pk for row in waiting], now=now)
    others = Replica.objects.filter(
        deployment__in={row.deployment_id for row in waiting}, status=states.READY
    ).select_related("node")
    taking = {other.deployment_id for other in others if takes_sessions(other)}
    return [
        LeavingReplica(
            replica_id=str(row.pk),
            began_at=_began_at(row),
            drained_by=_drained_by(row),
            sessions_left=progress[row.pk].sessions_left,
            moves_underway=progress[row.pk].moves_underway,
            has_targets=row.deployment_id in taking,
        )
        for row in waiting
    ]


def _began_at(replica: Replica) -> datetime:
    if replica.status == states.READY and replica.drain_deadline_at is not None:
        return replica.drain_deadline_at - timedelta(seconds=replica.deployment.drain_seconds)
    return replica.status_changed_at


def _drained_by(replica: Replica) -> datetime | None:
    node = replica.node
    of_node = node.drain_deadline_at if node is not None and node.drain_status == DRAINING else None
    deadlines = [at for at in (replica.drain_deadline_at, of_node) if at is not None]
    return min(deadlines, default=None)


# -- what a plan is made from ------------------------------------------------------------------------
Rooms = Callable[[Collection[str]], Mapping[str, ReplicaRoom]]
"""What the replicas of nodes report, by replica id."""


def movable_fleet(
    *,
    now: datetime,
    rooms: Rooms,
    levels: bool = True,
    in_turn: Collection[int] = (),
    looks_at_all: bool = False,
) -> FleetSessions:
    """What a plan of moves is made from: deployments where replicas leave, moves are asked for, or both.

    With `levels` also those of which a replica is overfilled, or, for a page that `looks_at_all`, of which
    one could be. `in_turn` names sessions of which a turn is known to run.
    """
    live = live_relocations()
    asked = {row.session_id: row for row in live if row.status == PLANNED}
    thresholds = levelling_thresholds() if levels else {}
    if thresholds and not looks_at_all:
        thresholds = _overfilled(thresholds, rooms, now)
    deployments = _leaving_deployments() | {row.source.deployment_id for row in live if row.source}
    deployments |= thresholds.keys()
    if not deployments:
        return FleetSessions((), (), ())
    replicas = _serving(deployments)
    tokens = _active_tokens(deployments, now)
    told = rooms({str(replica.node_id) for replica in replicas})
    holders = tuple(_holder(replica, told, tokens.get(replica.pk) or 0) for replica in replicas)
    one_of_each = {str(replica.deployment_id): replica for replica in replicas}
    levelled = frozenset(map(str, thresholds))
    return FleetSessions(
        holders=holders,
        sessions=tuple(
            replace(held, in_turn=int(held.session_id) in in_turn)
            for held in _held_sessions(holders, levelled, asked, now)
        ),
        rates=tuple((key, rates_of(replica, now)) for key, replica in one_of_each.items()),
        underway=tuple(_underway(row, now) for row in live if row.status != PLANNED),
        thresholds=tuple((str(pk), limits) for pk, limits in thresholds.items()),
        balancing=frozenset(map(str, _balancing() & thresholds.keys())),
        levelled=tuple(_levelled(thresholds, now)),
    )


def levelling_thresholds() -> dict[UUID, Thresholds]:
    """When sessions are balanced, for deployments that want it and have more than one replica."""
    rows = Deployment.objects.filter(status=states.ACTIVE, balance_sessions=True, replicas__gt=1)
    asked = rows.values_list("pk", "balance_from_percent", "balance_gap_percent")
    return {pk: thresholds_of(full, gap) for pk, full, gap in asked}


def _overfilled(thresholds: Mapping[UUID, Thresholds], rooms: Rooms, now: datetime) -> dict[UUID, Thresholds]:
    """Of these deployments, those with a full replica or being levelled: mostly none, found in two queries.

    To read the thousands of replicas of a fleet that has nothing to level would be most of what this costs.
    """
    wanted = _balancing() & thresholds.keys()
    rows = InferenceSession.objects.filter(
        _CAME_BACK, replica__deployment__in=thresholds.keys() - wanted, last_turn_at__gt=now - ACTIVE_FOR
    )
    columns = ("replica", "replica__node", "replica__deployment")
    held = list(rows.order_by().values_list(*columns).annotate(tokens=Sum("context_tokens")))
    told = rooms({str(node) for _, node, _, _ in held})
    for replica, _, deployment, tokens in held:
        room = told.get(str(replica), ReplicaRoom())
        if is_full(tokens or 0, room, thresholds[deployment]):
            wanted.add(deployment)
    return {pk: thresholds[pk] for pk in wanted}


def thresholds_of(from_percent: int, gap_percent: int) -> Thresholds:
    """Thresholds of a deployment's setting; it stops at a third of the gap that it starts at."""
    gap = gap_percent / 100
    return Thresholds(start_pressure=from_percent / 100, start_gap_ratio=gap, stop_gap_ratio=gap / 3)


def rates_of(replica: Replica, now: datetime) -> Rates:
    """What moving and computing cost in the replica's deployment of late.

    A move that found all its blocks at the target, or none at the source, sent a few bytes of talk in the
    time that talking takes: that is no speed, and would have all others look too slow to pay.
    """
    kv_bytes_per_token = replica.release.model.kv_bytes_per_token or 0
    moved = Relocation.objects.filter(
        source__deployment=replica.deployment_id,
        ended_at__gt=now - MEASURED_FOR,
        send_seconds__gt=0,
        sent_bytes__gte=max(1, kv_bytes_per_token),
    )
    turns = InferenceSession.objects.filter(replica__deployment=replica.deployment_id)
    latest = turns.order_by("-last_turn_at").values_list("latest_turns", flat=True)[:MEASURED_SESSIONS]
    near = Q(source__node=F("target__node"))
    return Rates(
        kv_bytes_per_token,
        prefill_tokens_per_second=prefill_rate([turn for kept in latest for turn in read_turns(kept)]),
        same_node=_sending(moved.filter(near)),
        across=_sending(moved.exclude(near)),
    )


def _sending(moved: QuerySet[Relocation]) -> Sending:
    """What the latest of them say of talk and bytes."""
    told = moved.order_by("-ended_at").values_list("sent_bytes", "send_seconds")[:MEASURED_MOVES]
    return fit_sending([(sent or 0, took or 0.0) for sent, took in told])


def _leaving_deployments() -> set[UUID]:
    is_asked = ~Q(departure={}) & Q(status=states.READY)
    leaving = Q(status=states.DRAINING) | Q(status=states.READY, node__drain_status=DRAINING) | is_asked
    rows = Replica.objects.filter(leaving & Q(role=Replica.Role.SERVING) | HANDS_OVER)
    return set(rows.order_by().values_list("deployment", flat=True))


def _balancing() -> set[UUID]:
    rows = Deployment.objects.filter(balancing_since__isnull=False)
    return set(rows.order_by().values_list("pk", flat=True))


def _serving(deployments: Collection[UUID]) -> list[Replica]:
    rows = Replica.objects.filter(ROUTED, deployment__in=deployments)
    heavy = ("release__model__config", "release__model__architecture", "exit_log_tail")
    return list(rows.select_related("node", "deployment", "release__model").defer(*heavy))


def _active_tokens(deployments: Collection[UUID], now: datetime) -> dict[UUID, int | None]:
    rows = InferenceSession.objects.filter(
        _CAME_BACK, replica__deployment__in=deployments, last_turn_at__gt=now - ACTIVE_FOR
    )
    return dict(rows.order_by().values_list("replica").annotate(tokens=Sum("context_tokens")))


def _holder(replica: Replica, rooms: Mapping[str, ReplicaRoom], active_tokens: int) -> Holder:
    node = replica.node
    departure = read_departure(replica.departure)
    leaves = departure.why if departure is not None and departure.moves else ""
    if replica.status == states.DRAINING or replica.wanted != Replica.Wanted.RUN:
        leaves = f"replica {replica.name} is let go"
    elif stands_down(replica):
        leaves = f"replica {replica.name} is to stand by"
    elif node is not None and node.drain_status != NOT_DRAINED:
        leaves = f"node {node.name} is drained"
    room = rooms.get(str(replica.pk), ReplicaRoom())
    release = replica.release
    is_real = node is not None and not node.simulated
    nodes = replica.deployment.nodes_per_replica
    moves = session_moves(release.engine, release.engine_options, nodes=nodes) if is_real else NO_MOVES
    return Holder(
        replica_id=str(replica.pk),
        node_id=str(replica.node_id),
        rack="",
        deployment=str(replica.deployment_id),
        kv_layout=_kv_layout(release, moves),
        knows_text=moves in {EXPORT_IMPORT, WARM_PREFILL},
        kv_capacity_tokens=room.kv_capacity_tokens,
        active_tokens=active_tokens,
        kv_used_ratio=room.kv_used_ratio,
        requests_waiting=room.requests_waiting,
        accepts=takes_sessions(replica),
        leaves=leaves,
        leave_to=frozenset(departure.targets) if departure else frozenset(),
        release=str(replica.release_id),
    )


def _kv_layout(release: Release, moves: Moves) -> str:
    """What two replicas must have alike for KV to go between them; empty: it sends none.

    Of other weights nothing that was computed is worth anything. The rest of the shape our own engines
    compare; those of others are asked for it by their options.
    """
    if moves == BLOCK_TRANSFER:
        return release.model.digest
    if moves != EXPORT_IMPORT:
        return ""
    return f"{release.model.digest} {kv_shape(release.engine, release.engine_options)}"


def _underway(row: Relocation, now: datetime) -> Underway:
    session = row.session
    counts = session.last_turn_at > now - ACTIVE_FOR and (session.turns > 1 or session.replica_changes)
    tokens = (session.context_tokens or 0) if counts else 0
    return Underway(str(row.session_id), str(row.source_id), str(row.target_id), tokens)


def _levelled(thresholds: Mapping[UUID, Thresholds], now: datetime) -> Iterator[Levelled]:
    longest = max((limits.return_seconds for limits in thresholds.values()), default=0.0)
    of_late = Q(status=DONE, ended_at__gt=now - timedelta(seconds=longest)) | Q(status__in=RELOCATION.live)
    rows = Relocation.objects.filter(of_late, trigger=BALANCE, source__deployment__in=list(thresholds))
    for source, target, ended_at in rows.order_by("created_at").values_list("source", "target", "ended_at"):
        yield Levelled(str(source), str(target), (now - ended_at).total_seconds() if ended_at else 0.0)


def _held_sessions(
    holders: Collection[Holder],
    levelled: Collection[str],
    asked: Mapping[int, Relocation],
    now: datetime,
) -> Iterator[HeldSession]:
    """Sessions that may have to move, without those that moved a moment ago; those asked for in any case."""
    recently = {"last_turn_at__gt": now - ACTIVE_FOR}
    resting = Relocation.objects.filter(ended_at__gt=now - REST).values_list("session", flat=True)
    leaving = Q(replica__in=[h.replica_id for h in holders if h.leaves], **recently) & ~Q(pk__in=resting)
    crowded = Q(_CAME_BACK, replica__in=_fullest(holders, levelled), **recently)
    found: dict[int, tuple[int, UUID | None, int | None, datetime, int]] = {}
    for wanted in (leaving | Q(pk__in=list(asked)), crowded):
        rows = InferenceSession.objects.filter(wanted).order_by("-last_turn_at")
        fields = ("pk", "replica", "context_tokens", "last_turn_at", "turns")
        found |= {row[0]: row for row in rows.values_list(*fields)[:MOST_PLANNED]}
    moved = _moved_seconds_ago(found, now) if levelled else {}
    for pk, replica_id, context_tokens, last_turn_at, turns in found.values():
        row = asked.get(pk)
        yield HeldSession(
            session_id=str(pk),
            replica_id=str(replica_id if row is None else row.source_id),
            owner_epoch=0,
            context_tokens=context_tokens or 0,
            idle_seconds=(now - last_turn_at).total_seconds(),
            turns=turns,
            moved_seconds_ago=moved.get(pk),
            asked_target=str(row.target_id) if row is not None and row.target_id else "",
        )


def _fullest(holders: Collection[Holder], levelled: Collection[str]) -> list[str]:
    """Of each deployment that is levelled, the replicas whose sessions are worth looking at."""
    found: list[str] = []
    for deployment in levelled:
        known = [h for h in holders if h.deployment == deployment and h.kv_capacity_tokens and not h.leaves]
        known.sort(key=lambda h: (-h.active_tokens / (h.kv_capacity_tokens or 1), h.replica_id))
        found += [h.replica_id for h in known[:FULLEST] if h.active_tokens]
    return found


def _moved_seconds_ago(sessions: Collection[int], now: datetime) -> dict[int, float]:
    """Since the last move of each of them ended, however it did."""
    rows = Relocation.objects.filter(session__in=list(sessions), ended_at__gt=now - ACTIVE_FOR)
    latest = rows.order_by().values_list("session").annotate(latest=Max("ended_at"))
    return {pk: (now - ended_at).total_seconds() for pk, ended_at in latest}
