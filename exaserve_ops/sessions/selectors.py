"""Reading of sessions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from django.db.models import Count, F, Q, QuerySet, Sum

from exaserve_ops.inventory.domain.drain import DRAINING, NOT_DRAINED
from exaserve_ops.inventory.domain.liveness import ALIVE
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.departure import read_departure
from exaserve_ops.serving.domain.reach import CLOSED
from exaserve_ops.serving.models import Replica
from exaserve_ops.sessions.domain.moves import PLANNED, RELOCATION
from exaserve_ops.sessions.domain.relocation import FleetSessions, HeldSession, Holder, Rates, Underway
from exaserve_ops.sessions.domain.timeline import prefill_rate, read_stays, read_turns
from exaserve_ops.sessions.models import InferenceSession, Relocation

ACTIVE_FOR = timedelta(minutes=10)
"""A session counts as live for so long after its last turn."""
REST = timedelta(seconds=10)
"""After a move has ended, before the same session is planned for again."""
LATEST_MOVES = 10
MOST_PLANNED = 5_000
"""Sessions in one plan, those with the newest turns."""
MEASURED_FOR = timedelta(hours=1)
MEASURED_MOVES = 3
MEASURED_SESSIONS = 20
"""What moving and computing cost is judged by so much of the deployment."""
UNKNOWN_CAPACITY_TOKENS = 1 << 20
"""Taken for replicas that do not tell: all alike, they are filled evenly."""
_MOVED = ("repinned", "retry")
"""What gateways give as the reason of such a turn."""


def sessions_with_replica() -> QuerySet[InferenceSession]:
    """Sessions with the replica that holds them, newest turn first."""
    return InferenceSession.objects.select_related("replica")


def count_live_sessions(now: datetime) -> int:
    """Sessions that had a turn lately."""
    return InferenceSession.objects.filter(last_turn_at__gt=now - ACTIVE_FOR).count()


def active_sessions_by_replica(deployment_id: UUID, *, now: datetime) -> dict[str, int]:
    """Live sessions of each replica of a deployment, by replica id."""
    rows = (
        InferenceSession.objects.filter(replica__deployment=deployment_id, last_turn_at__gt=now - ACTIVE_FOR)
        .values_list("replica")
        .annotate(count=Count("pk"))
    )
    return {str(replica): count for replica, count in rows}


def replicas_of_timeline(session: InferenceSession) -> dict[str, Replica]:
    """Replicas that a conversation's timeline names and that are still on record, by id."""
    ids = {turn.replica_id for turn in read_turns(session.latest_turns)}
    ids |= {stay.replica_id for stay in read_stays(session.stays)}
    return {str(replica.pk): replica for replica in Replica.objects.filter(pk__in=ids - {""})}


def count_moved_sessions(replica_ids: Collection[UUID], *, since: datetime) -> int:
    """Sessions whose last turn went to one of these replicas although another one held their prefix."""
    rows = InferenceSession.objects.filter(replica__in=replica_ids, last_turn_at__gte=since)
    return rows.filter(last_why__in=_MOVED).count()


# -- moves -------------------------------------------------------------------------------------------
def takes_sessions(replica: Replica) -> bool:
    """Whether conversations may be moved to it: routed to, reached, and there to stay."""
    node = replica.node
    return (
        node is not None
        and (replica.status, replica.wanted, replica.role)
        == (states.READY, Replica.Wanted.RUN, Replica.Role.SERVING)
        and replica.reach not in CLOSED
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


def movable_fleet(*, now: datetime, capacities: Mapping[str, int]) -> FleetSessions:
    """What a plan of moves is made from: deployments where a replica leaves, or a move is asked for.

    `capacities` has the KV tokens of replicas, by id.
    """
    live = live_relocations()
    asked = {row.session_id: row for row in live if row.status == PLANNED}
    deployments = _leaving_deployments() | {row.source.deployment_id for row in live if row.source}
    if not deployments:
        return FleetSessions((), (), ())
    replicas = Replica.objects.select_related("node", "release__model").filter(
        deployment__in=deployments, status__in=(states.READY, states.DRAINING), role=Replica.Role.SERVING
    )
    holders = tuple(_holder(replica, capacities) for replica in replicas)
    one_of_each = {str(replica.deployment_id): replica for replica in replicas}
    return FleetSessions(
        holders=holders,
        sessions=tuple(_held_sessions(deployments, asked, now)),
        rates=tuple((key, _rates(replica, now)) for key, replica in one_of_each.items()),
        underway=tuple(
            Underway(str(row.session_id), str(row.source_id), str(row.target_id))
            for row in live
            if row.status != PLANNED
        ),
    )


def _rates(replica: Replica, now: datetime) -> Rates:
    """What moving and computing cost in the replica's deployment of late."""
    moved = Relocation.objects.filter(
        source__deployment=replica.deployment_id, ended_at__gt=now - MEASURED_FOR, send_seconds__gt=0
    )
    turns = InferenceSession.objects.filter(replica__deployment=replica.deployment_id)
    latest = turns.order_by("-last_turn_at").values_list("latest_turns", flat=True)[:MEASURED_SESSIONS]
    near = Q(source__node=F("target__node"))
    return Rates(
        replica.release.model.kv_bytes_per_token or 0,
        prefill_tokens_per_second=prefill_rate([turn for kept in latest for turn in read_turns(kept)]),
        same_node_bytes_per_second=_speed(moved.filter(near)),
        across_bytes_per_second=_speed(moved.exclude(near)),
    )


def _speed(moved: QuerySet[Relocation]) -> float | None:
    """Bytes a second of all of them together; `None` where they are too few to tell."""
    told = moved.aggregate(count=Count("pk"), sent=Sum("sent_bytes"), took=Sum("send_seconds"))
    return told["sent"] / told["took"] if told["count"] >= MEASURED_MOVES and told["sent"] else None


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
    live = Count(
        "inference_sessions", Q(inference_sessions__last_turn_at__gt=now - ACTIVE_FOR), distinct=True
    )
    moving = Count("relocations_from", Q(relocations_from__status__in=RELOCATION.live), distinct=True)
    rows = Replica.objects.filter(pk__in=replica_ids).order_by()
    told = rows.annotate(live=live, moving=moving).values_list("pk", "live", "moving", "status")
    return {pk: DepartureProgress(left, underway, status) for pk, left, underway, status in told}


def _leaving_deployments() -> set[UUID]:
    is_asked = ~Q(departure={}) & Q(status=states.READY)
    leaving = Q(status=states.DRAINING) | Q(status=states.READY, node__drain_status=DRAINING) | is_asked
    rows = Replica.objects.filter(leaving, role=Replica.Role.SERVING)
    return set(rows.order_by().values_list("deployment", flat=True))


def _holder(replica: Replica, capacities: Mapping[str, int]) -> Holder:
    node = replica.node
    departure = read_departure(replica.departure)
    leaves = departure.why if departure is not None and departure.moves else ""
    if replica.status == states.DRAINING or replica.wanted != Replica.Wanted.RUN:
        leaves = f"replica {replica.name} is let go"
    elif node is not None and node.drain_status != NOT_DRAINED:
        leaves = f"node {node.name} is drained"
    return Holder(
        replica_id=str(replica.pk),
        node_id=str(replica.node_id),
        rack="",
        deployment=str(replica.deployment_id),
        # Replicas of one release have the same weights and options; simulated ones have no KV.
        kv_layout="" if node is None or node.simulated else str(replica.release_id),
        kv_capacity_tokens=capacities.get(str(replica.pk), UNKNOWN_CAPACITY_TOKENS),
        accepts=takes_sessions(replica),
        leaves=leaves,
        leave_to=frozenset(departure.targets) if departure else frozenset(),
        leaves_kv=departure is not None and not departure.takes_kv,
    )


def _held_sessions(
    deployments: Collection[UUID], asked: Mapping[int, Relocation], now: datetime
) -> Iterator[HeldSession]:
    """Sessions with a turn of late, and those that are asked for, without those that moved a moment ago."""
    of_late = Q(replica__deployment__in=deployments, last_turn_at__gt=now - ACTIVE_FOR)
    resting = Relocation.objects.filter(ended_at__gt=now - REST).values_list("session", flat=True)
    rows = (
        InferenceSession.objects.filter(of_late & ~Q(pk__in=resting) | Q(pk__in=list(asked)))
        .order_by("-last_turn_at")
        .values_list("pk", "replica", "context_tokens", "last_turn_at")[:MOST_PLANNED]
    )
    for pk, replica_id, context_tokens, last_turn_at in rows:
        row = asked.get(pk)
        source_id = row.source_id if row is not None else replica_id
        yield HeldSession(
            session_id=str(pk),
            replica_id=str(source_id),
            owner_epoch=0,
            context_tokens=context_tokens or 0,
            idle_seconds=(now - last_turn_at).total_seconds(),
            asked_target=str(row.target_id) if row is not None and row.target_id else "",
        )
