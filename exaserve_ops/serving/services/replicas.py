"""Writing of replicas: what was decided for them, and what agents saw of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from uuid import UUID

from django.db import transaction

from exaserve_ops.audit.services import Happening, Subject, record_event, record_events
from exaserve_ops.inventory.domain.liveness import ALIVE, SUSPECT
from exaserve_ops.inventory.models import Accelerator, Node
from exaserve_ops.inventory.services.installations import retire_node
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.lib.hints import ring, ring_all
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.lifecycle import REPLICA
from exaserve_ops.serving.domain.observed import ObservedExit, ObservedReplica
from exaserve_ops.serving.domain.placement import Placement
from exaserve_ops.serving.domain.reach import UNCHECKED, WAITING
from exaserve_ops.serving.domain.sleep import AWAKE
from exaserve_ops.serving.models import Deployment, Release, Replica
from exaserve_ops.serving.services.sleep import note_sleep
from exaserve_ops.serving.services.slices import lock_slices


@dataclass(frozen=True, slots=True)
class Move:
    """An event of the lifecycle, and why."""

    event: str
    reason: str


_DRAIN = ("drain_deadline_at", "handed_over_at", "left_behind")
_WANTED_AFTER = {
    "drain": Replica.Wanted.DRAIN,
    "stop": Replica.Wanted.STOP,
    "cancel": Replica.Wanted.STOP,
}


@transaction.atomic
def create_replicas(
    deployment_id: UUID,
    count: int,
    *,
    why: str,
    actor: str,
    now: datetime,
    role: str = Replica.Role.SERVING,
    release_id: UUID | None = None,
) -> list[Replica]:
    """Make new replicas, each with a name never used before; of the deployment's release unless told."""
    deployment = Deployment.objects.select_for_update().get(pk=deployment_id)
    wanted = {"pk": release_id} if release_id else {"number": deployment.release_number}
    release = Release.objects.get(deployment=deployment, **wanted)
    first = deployment.next_ordinal
    deployment.next_ordinal += count
    deployment.save(update_fields=["next_ordinal"])
    marker = str(deployment.pk)[:4]
    replicas = Replica.objects.bulk_create(
        Replica(
            name=f"{deployment.name}-{marker}-{ordinal}",
            deployment=deployment,
            memory_bytes=release.replica_memory_bytes,
            release=release,
            role=role,
            created_at=now,
            status_changed_at=now,
            reason=why,
        )
        for ordinal in range(first, first + count)
    )
    happenings = [
        Happening(subject_of(replica), "created", ("", replica.status), why, replica.generation)
        for replica in replicas
    ]
    record_events(happenings, actor=actor, now=now)
    ring("deployment", deployment_id)
    return replicas


def place_replica(replica_id: UUID, placement: Placement, *, actor: str, now: datetime) -> Replica:
    """Bind a pending replica to a node and its accelerators."""
    [replica] = place_replicas({replica_id: placement}, actor=actor, now=now)
    return replica


@transaction.atomic
def place_replicas(placements: Mapping[UUID, Placement], *, actor: str, now: datetime) -> list[Replica]:
    """Bind pending replicas to nodes and accelerators, all of them or none; each starts when it is its turn.

    Raises `IllegalTransitionError` where one of them is no longer pending, and `ConflictError` where a slice
    is taken already.
    """
    moves = {pk: Move("place", f"on {p.node_name}: {p.why}") for pk, p in placements.items()}
    rows = _lock(placements)
    for row in rows:
        row.node_id = UUID(placements[row.pk].node_id)
        row.start_waits_since, row.start_allowed_at = now, None
    lock_slices({pk: placement.accelerator_uuids for pk, placement in placements.items()})
    link = Replica.accelerators.through
    link.objects.filter(replica__in=placements).delete()
    known = set(
        Accelerator.objects.filter(
            pk__in=[uuid for placement in placements.values() for uuid in placement.accelerator_uuids]
        ).values_list("pk", flat=True)
    )
    link.objects.bulk_create(
        link(replica_id=pk, accelerator_id=uuid)
        for pk, placement in placements.items()
        for uuid in placement.accelerator_uuids
        if uuid in known
    )
    return _advance_all(rows, moves, actor=actor, now=now)


@transaction.atomic
def record_wait(replica_id: UUID, why: str, *, actor: str, now: datetime) -> None:
    """Say why a pending replica waits; one event for each change of the reason."""
    replica = Replica.objects.select_for_update().get(pk=replica_id)
    if replica.status != states.PENDING or replica.reason == why:
        return
    replica.reason = why
    replica.save(update_fields=["reason"])
    record_event(subject_of(replica), "waits", actor=actor, now=now, reason=why)


@transaction.atomic
def let_go_replica(replica_id: UUID, event: str, *, why: str, actor: str, now: datetime) -> Replica:
    """Drain, stop or cancel a replica (`event`). Raises `IllegalTransitionError`."""
    replica = Replica.objects.select_for_update(of=("self",)).select_related("deployment").get(pk=replica_id)
    replica.wanted = _WANTED_AFTER[event]
    replica.generation += 1
    replica.healing_note = ""
    if event == "drain":
        replica.drain_deadline_at = now + timedelta(seconds=replica.deployment.drain_seconds)
        # Its conversations leave first; a standby has none.
        replica.handed_over_at = now if replica.role == Replica.Role.STANDBY else None
        replica.left_behind = None
    replica.save(update_fields=["wanted", "generation", "healing_note", *_DRAIN])
    return advance_replica(replica_id, event, reason=why, actor=actor, now=now)


@transaction.atomic
def replace_replica(replica_id: UUID, *, why: str, actor: str, now: datetime) -> Replica:
    """Let a replica go by a person's wish; its deployment makes a new one.

    Raises `ConflictError` where it is being let go already.
    """
    replica = Replica.objects.select_for_update().get(pk=replica_id)
    if replica.wanted != Replica.Wanted.RUN:
        raise ConflictError(f"replica {replica.name} is {replica.status} already")
    _forgive(replica)
    event = {states.PENDING: "cancel", states.READY: "drain"}.get(replica.status, "stop")
    return let_go_replica(replica_id, event, why=why, actor=actor, now=now)


@transaction.atomic
def restart_replica(replica_id: UUID, *, why: str, actor: str, now: datetime) -> Replica:
    """Start a failed replica afresh, its crash count forgotten.

    Raises `ConflictError` where it has not failed.
    """
    replica = Replica.objects.select_for_update().get(pk=replica_id)
    if replica.status != states.FAILED:
        raise ConflictError(f"replica {replica.name} is {replica.status}; only a failed one restarts")
    replica.generation += 1
    replica.save(update_fields=["generation"])
    _forgive(replica)
    record_event(
        subject_of(replica),
        "restarted",
        actor=actor,
        now=now,
        reason=why,
        generation=replica.generation,
    )
    ring("node", replica.node_id)
    ring("deployment", replica.deployment_id)
    return replica


@transaction.atomic
def record_observations(
    observed: Sequence[ObservedReplica], *, node_id: UUID, actor: str, now: datetime
) -> dict[str, Replica | None]:
    """Take over what an agent saw of replicas, and move the status of those whose sighting calls for it.

    Returns the rows by id as the agent said it; `None` where no such replica is recorded for that node:
    the agent runs something that nobody knows, and is told so by its wish.
    """
    asked = Replica.objects.filter(pk__in=[seen.replica_id for seen in observed], node=node_id)
    rows = {str(row.pk): row for row in asked.select_for_update().order_by("pk")}
    happenings: list[Happening] = []
    hints: list[tuple[str, object]] = []
    for seen in observed:
        row = rows.get(seen.replica_id)
        if row is not None:
            happenings += _observe(row, seen, now, hints)
            row.save()
    record_events(happenings, actor=actor, now=now)
    ring_all(hints)
    return {seen.replica_id: rows.get(seen.replica_id) for seen in observed}


@transaction.atomic
def record_node_lost(node_id: UUID, *, reason: str, actor: str, now: datetime) -> int:
    """Mark what runs on a node that is gone; returns how many replicas became unreachable."""
    live = Replica.objects.filter(node=node_id).exclude(status=states.STOPPED)
    running = [r.pk for r in live if REPLICA.allows(r.status, "node_lost")]
    advance_replicas(dict.fromkeys(running, Move("node_lost", reason)), actor=actor, now=now)
    # The wish stands: they end when the node is back and has seen their process groups gone. Why one
    # failed is worth more than that its node went away since.
    waiting = live.exclude(pk__in=running).exclude(status=states.FAILED)
    waiting.update(reason=f"node offline: {reason}")
    return len(running)


@transaction.atomic
def retire_lost_node(node_id: UUID, *, reason: str, actor: str, now: datetime) -> Node:
    """Retire a node that will not come back, and close the record of what ran there.

    Raises `ConflictError` for one that still reports: drain it, and remove its agent instead.
    """
    node = Node.objects.select_for_update().get(pk=node_id)
    if node.liveness in {ALIVE, SUSPECT}:
        raise ConflictError(f"node {node} is {node.liveness}; drain it and stop its agent first")
    node = retire_node(node_id, reason=reason, actor=actor, now=now)
    left = Replica.objects.filter(node=node_id).exclude(status=states.STOPPED).values_list("pk", flat=True)
    move = Move("write_off", f"its node was retired: {reason}")
    advance_replicas(dict.fromkeys(left, move), actor=actor, now=now)
    return node


def advance_replica(replica_id: UUID, event: str, *, reason: str, actor: str, now: datetime) -> Replica:
    """Move one replica's status by an event: see `advance_replicas`."""
    [replica] = advance_replicas({replica_id: Move(event, reason)}, actor=actor, now=now)
    return replica


@transaction.atomic
def advance_replicas(moves: Mapping[UUID, Move], *, actor: str, now: datetime) -> list[Replica]:
    """Move replicas' statuses, each under its row lock and with an event of its own, or none of them.

    Raises `IllegalTransitionError` where an event does not apply, and `Replica.DoesNotExist`.
    """
    return _advance_all(_lock(moves), moves, actor=actor, now=now)


def advance_row(replica: Replica, move: Move, now: datetime) -> Happening:
    """Move the status of a locked row: the only function that writes it. The caller saves and records.

    Raises `IllegalTransitionError` where the event does not apply.
    """
    before = replica.status
    replica.status = REPLICA.next(before, move.event)
    replica.reason = move.reason
    replica.status_changed_at = now
    if replica.status == states.READY:
        replica.ready_at = now
        _await_reach(replica)
    else:
        replica.slow_since, replica.slow_reason, replica.unroutable_reason = None, "", ""
    if replica.status == states.FAILED:
        replica.failed_at = now
    if replica.status == states.STOPPED:
        replica.stopped_at, replica.pid, replica.address = now, None, ""
        replica.held_since, replica.held_by_pids = None, []
        replica.memory_since, replica.memory_wait = None, None
        replica.sleep_state, replica.sleep_since, replica.sleep_note = AWAKE, None, ""
    moved = (before, replica.status)
    return Happening(subject_of(replica), move.event, moved, move.reason, replica.generation)


def _lock(replica_ids: Collection[UUID]) -> list[Replica]:
    rows = list(Replica.objects.select_for_update().filter(pk__in=replica_ids).order_by("pk"))
    if len(rows) != len(replica_ids):
        missing = set(replica_ids) - {row.pk for row in rows}
        raise Replica.DoesNotExist(f"no such replicas: {', '.join(map(str, missing))}")
    return rows


def _advance_all(
    rows: list[Replica], moves: Mapping[UUID, Move], *, actor: str, now: datetime
) -> list[Replica]:
    happenings = [advance_row(row, moves[row.pk], now) for row in rows]
    for row in rows:
        row.save()
    record_events(happenings, actor=actor, now=now)
    ring_all(hint for row in rows for hint in _hints_of(row, tells_node=True))
    return rows


def _hints_of(replica: Replica, *, tells_node: bool) -> list[tuple[str, object]]:
    """Who has to look at a replica that moved."""
    hints: list[tuple[str, object]] = [("deployment", replica.deployment_id)]
    if tells_node and replica.node_id is not None:
        hints.append(("node", replica.node_id))
    return hints


def subject_of(replica: Replica) -> Subject:
    """Return the audit subject of a replica."""
    return Subject("replica", str(replica.pk), replica.name)


def _forgive(replica: Replica) -> None:
    """A person took it in hand: its failure says nothing about its node any more."""
    Replica.objects.filter(pk=replica.pk).update(failed_at=None, healing_note="")


def _event_of(observed: ObservedReplica, replica: Replica) -> str:
    """The lifecycle event of a sighting. One that is wanted and being ended is about to start again."""
    if replica.wanted == Replica.Wanted.RUN and observed.state in {states.STOPPING, states.DRAINING}:
        return "seen_backing_off"
    return observed.event


def _observe(
    replica: Replica, seen: ObservedReplica, now: datetime, hints: list[tuple[str, object]]
) -> list[Happening]:
    """Take one sighting over into its locked row; returns what happened by it and adds who must look."""
    happenings = [*_note_exit(replica, seen)]
    if _note_address(replica, seen, now):
        hints.append(("routes", replica.pk))
    _take_over(replica, seen, now)
    happenings += _note_memory(replica, seen, now)
    slept, turned = note_sleep(replica, seen, now)
    happenings += slept
    if turned:
        hints += [("routes", replica.pk), ("deployment", replica.deployment_id)]
    event = _event_of(seen, replica)
    if REPLICA.allows(replica.status, event):
        if seen.stalled:
            happenings.append(Happening(subject_of(replica), "stalled", reason=seen.reason))
        # Why it was let go stands until the end; any other old reason was about the status before.
        ending = replica.wanted != Replica.Wanted.RUN
        reason = seen.reason or (replica.reason if ending else "")
        happenings.append(advance_row(replica, Move(event, reason), now))
        # What its agent says changes nothing of what the agent is told, until it is over.
        hints += _hints_of(replica, tells_node=replica.status == states.STOPPED)
    elif seen.reason:
        replica.reason = seen.reason
    return happenings


def _note_exit(replica: Replica, observed: ObservedReplica) -> list[Happening]:
    ended = observed.last_exit
    if ended is None or (replica.exit_attempt or 0) >= ended.attempt:
        return []
    replica.exit_attempt = ended.attempt
    replica.exit_code = ended.code
    replica.exit_signal = ended.signal
    replica.exit_after_seconds = ended.after_seconds if ended.is_known else None
    replica.exit_log_tail = list(ended.log_tail)
    reason = f"attempt {ended.attempt} {ended.sentence()}{_cause_of(ended)}"
    return [Happening(subject_of(replica), "exited", ("", ""), reason, replica.generation)]


_CAUSES = ("stalled", "dead", "not ready", "did not wake")


def _cause_of(ended: ObservedExit) -> str:
    """Why its agent ended it; what ended by itself has said how already."""
    return f": {ended.why}" if ended.why.startswith(_CAUSES) else ""


def _take_over(replica: Replica, observed: ObservedReplica, now: datetime) -> None:
    replica.observed_generation = max(replica.observed_generation, observed.generation)
    replica.attempt = observed.attempt
    replica.restarts = observed.restarts
    replica.pid = observed.pid
    replica.ports = list(observed.ports)
    replica.start_took_seconds = observed.start_took_seconds
    replica.held_by_pids = list(observed.held_by_pids)
    if not observed.held_by_pids:
        replica.held_since = None
    elif replica.held_since is None:
        replica.held_since = now


def _note_memory(replica: Replica, observed: ObservedReplica, now: datetime) -> list[Happening]:
    """Write down what memory a launch waits for; the beginning and the end of a wait are events."""
    wait, since = observed.memory_wait, replica.memory_since
    replica.memory_wait = None if wait is None else asdict(wait)
    if (wait is None) == (since is None):
        return []
    replica.memory_since = None if wait is None else now
    if since is None:
        return [Happening(subject_of(replica), "memory_awaited", reason=observed.reason)]
    seconds = (now - since).total_seconds()
    how = f"; {observed.reason}" if observed.reason else ""
    return [Happening(subject_of(replica), "memory_wait_over", reason=f"after {seconds:.0f} s{how}")]


def _await_reach(replica: Replica) -> None:
    """What was reached before, or not, was another place or another process."""
    serves = replica.role == Replica.Role.SERVING
    replica.reach, replica.unroutable_reason = WAITING if serves else UNCHECKED, ""


def _note_address(replica: Replica, observed: ObservedReplica, now: datetime) -> bool:
    """Take over where it answers; returns whether the routes to one that is ready change by that."""
    if replica.address == observed.address:
        return False
    replica.address = observed.address
    _await_reach(replica)
    if replica.status != states.READY or not observed.address:
        return False
    replica.ready_at = now
    return True
