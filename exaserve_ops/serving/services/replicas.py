"""Writing of replicas: what was decided for them, and what agents saw of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
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
from exaserve_ops.serving.domain.placement import Placement
from exaserve_ops.serving.domain.reach import UNCHECKED, WAITING
from exaserve_ops.serving.domain.sleep import AWAKE
from exaserve_ops.serving.domain.trials import refusal_of_change
from exaserve_ops.serving.models import Deployment, Release, Replica, ReplicaMember
from exaserve_ops.serving.selectors.handover import stands_down
from exaserve_ops.serving.selectors.members import ONE_NODE, on_node
from exaserve_ops.serving.services.slices import lock_slices


@dataclass(frozen=True, slots=True)
class Move:
    """An event of the lifecycle, and why."""

    event: str
    reason: str


HANDOVER = ("drain_deadline_at", "handed_over_at", "left_behind")
"""How conversations leave one that is let go, or stands down."""
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
    moves = {pk: Move("place", f"on {p.where}: {p.why}") for pk, p in placements.items()}
    rows = _lock(placements)
    for row in rows:
        row.node_id = UUID(placements[row.pk].node_id)
        row.node_count = len(placements[row.pk].node_ids)
        row.start_waits_since, row.start_allowed_at = now, None
    _make_members(placements)
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


def _make_members(placements: Mapping[UUID, Placement]) -> None:
    """Write down the parts of those that run on several nodes."""
    ReplicaMember.objects.filter(replica__in=placements).delete()
    ReplicaMember.objects.bulk_create(
        ReplicaMember(
            replica_id=pk,
            number=member.number,
            node_id=UUID(member.node_id),
            accelerator_uuids=list(member.accelerator_uuids),
            adapters=list(member.adapters),
            reserved_bytes=member.reserved_bytes,
        )
        for pk, placement in placements.items()
        for member in placement.members
    )


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
        # Its conversations leave first; a standby has none, but one that has just stood down.
        has_none = replica.role == Replica.Role.STANDBY and not stands_down(replica)
        replica.drain_deadline_at = now + timedelta(seconds=replica.deployment.drain_seconds)
        replica.handed_over_at = now if has_none else None
        replica.left_behind = None
    replica.save(update_fields=["wanted", "generation", "healing_note", *HANDOVER])
    return advance_replica(replica_id, event, reason=why, actor=actor, now=now)


@transaction.atomic
def replace_replica(
    replica_id: UUID, *, why: str, actor: str, now: datetime, by_validation: bool = False
) -> Replica:
    """Let a replica go by a person's wish; its deployment makes a new one.

    Raises `ConflictError` where it is being let go already, or is a validation's, unless `by_validation`
    itself.
    """
    replica = _lock_for_people(replica_id, by_validation=by_validation)
    if replica.wanted != Replica.Wanted.RUN:
        raise ConflictError(f"replica {replica.name} is {replica.status} already")
    _forgive(replica)
    event = {states.PENDING: "cancel", states.READY: "drain"}.get(replica.status, "stop")
    return let_go_replica(replica_id, event, why=why, actor=actor, now=now)


@transaction.atomic
def restart_replica(replica_id: UUID, *, why: str, actor: str, now: datetime) -> Replica:
    """Start a failed replica afresh, its crash count forgotten.

    Raises `ConflictError` where it has not failed, or is a validation's.
    """
    replica = _lock_for_people(replica_id)
    if replica.status != states.FAILED:
        raise ConflictError(f"replica {replica.name} is {replica.status}; only a failed one restarts")
    replica.generation += 1
    replica.gang_crashes, replica.gang_retry_at = 0, now if replica.node_count > 1 else None
    replica.save(update_fields=["generation", "gang_crashes", "gang_retry_at"])
    _forgive(replica)
    record_event(
        subject_of(replica),
        "restarted",
        actor=actor,
        now=now,
        reason=why,
        generation=replica.generation,
    )
    ring_all(hints_of(replica, tells_node=True))
    return replica


def _lock_for_people(replica_id: UUID, *, by_validation: bool = False) -> Replica:
    replica = Replica.objects.select_for_update(of=("self",)).select_related("deployment").get(pk=replica_id)
    why = refusal_of_change(replica.deployment.name, replica.deployment.served_name)
    if why and not by_validation:
        raise ConflictError(why)
    return replica


@transaction.atomic
def record_node_lost(node_id: UUID, *, reason: str, actor: str, now: datetime) -> int:
    """Mark what runs on a node that is gone; returns how many replicas became unreachable."""
    live = Replica.objects.filter(on_node(node_id)).exclude(status=states.STOPPED)
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
    left = Replica.objects.filter(ONE_NODE, node=node_id).exclude(status=states.STOPPED)
    move = Move("write_off", f"its node was retired: {reason}")
    advance_replicas(dict.fromkeys(left.values_list("pk", flat=True), move), actor=actor, now=now)
    _write_off_members(node, reason=reason, actor=actor, now=now)
    return node


def _write_off_members(node: Node, *, reason: str, actor: str, now: datetime) -> None:
    """Close the record of parts that ran on a node; the rest of the whole is stopped, and ends by itself."""
    parts = ReplicaMember.objects.filter(node=node, ended_at=None)
    why = f"node {node} of it was retired: {reason}"
    replicas = Replica.objects.filter(pk__in=parts.values("replica")).exclude(status=states.STOPPED)
    # In the order in which reports lock them, or the two would wait for each other.
    for replica in replicas.order_by("pk"):
        if replica.wanted == Replica.Wanted.RUN:
            let_go_replica(replica.pk, "stop", why=why, actor=actor, now=now)
        parts.filter(replica=replica).update(ended_at=now, state=states.STOPPED, reason=why, pid=None)
        ring("gang_wish", replica.pk)


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
        await_reach(replica)
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
    ring_all(hint for row in rows for hint in hints_of(row, tells_node=True))
    return rows


def hints_of(replica: Replica, *, tells_node: bool) -> list[tuple[str, object]]:
    """Who has to look at a replica that moved."""
    hints: list[tuple[str, object]] = [("deployment", replica.deployment_id)]
    if tells_node and replica.node_count > 1:
        hints.append(("gang_wish", replica.pk))
    elif tells_node and replica.node_id is not None:
        hints.append(("node", replica.node_id))
    return hints


def subject_of(replica: Replica) -> Subject:
    """Return the audit subject of a replica."""
    return Subject("replica", str(replica.pk), replica.name)


def _forgive(replica: Replica) -> None:
    """A person took it in hand: its failure says nothing about its node any more."""
    Replica.objects.filter(pk=replica.pk).update(failed_at=None, healing_note="")


def await_reach(replica: Replica) -> None:
    """What was reached before, or not, was another place or another process."""
    serves = replica.role == Replica.Role.SERVING
    replica.reach, replica.unroutable_reason = WAITING if serves else UNCHECKED, ""
