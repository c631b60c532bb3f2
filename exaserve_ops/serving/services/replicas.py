"""Writing of replicas: what was decided for them, and what agents saw of them."""

from __future__ import annotations

from datetime import datetime, timedelta
from uuid import UUID

from django.db import transaction

from exaserve_ops.audit.services import Subject, record_event
from exaserve_ops.inventory.domain.liveness import ALIVE, SUSPECT
from exaserve_ops.inventory.models import Accelerator, Node
from exaserve_ops.inventory.services.installations import retire_node
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.lib.hints import ring
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.lifecycle import REPLICA
from exaserve_ops.serving.domain.observed import ObservedExit, ObservedReplica
from exaserve_ops.serving.domain.placement import Placement
from exaserve_ops.serving.models import Deployment, Replica

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
) -> list[Replica]:
    """Make new replicas, each with a name that was never used before."""
    deployment = Deployment.objects.select_for_update().get(pk=deployment_id)
    first = deployment.next_ordinal
    deployment.next_ordinal += count
    deployment.save(update_fields=["next_ordinal"])
    marker = str(deployment.pk)[:4]
    replicas = Replica.objects.bulk_create(
        Replica(
            name=f"{deployment.name}-{marker}-{ordinal}",
            deployment=deployment,
            memory_bytes=deployment.replica_memory_bytes,
            role=role,
            created_at=now,
            status_changed_at=now,
            reason=why,
        )
        for ordinal in range(first, first + count)
    )
    for replica in replicas:
        record_event(
            subject_of(replica),
            "created",
            actor=actor,
            now=now,
            moved=("", replica.status),
            reason=why,
            generation=replica.generation,
        )
    ring("deployment", deployment_id)
    return replicas


@transaction.atomic
def place_replica(replica_id: UUID, placement: Placement, *, actor: str, now: datetime) -> Replica:
    """Bind a pending replica to a node and its accelerators."""
    replica = Replica.objects.select_for_update().get(pk=replica_id)
    replica.node_id = UUID(placement.node_id)
    replica.save(update_fields=["node"])
    replica.accelerators.set(Accelerator.objects.filter(pk__in=placement.accelerator_uuids))
    reason = f"on {placement.node_name}: {placement.why}"
    return advance_replica(replica_id, "place", reason=reason, actor=actor, now=now)


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
    replica.save(update_fields=["wanted", "generation", "healing_note", "drain_deadline_at"])
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
def record_observation(
    observed: ObservedReplica, *, node_id: UUID, actor: str, now: datetime
) -> Replica | None:
    """Take over what an agent saw of a replica, and move its status if that calls for it.

    Returns `None` where no such replica is recorded for that node: the agent runs something that
    nobody knows, and is told so by its wish.
    """
    replica = Replica.objects.select_for_update().filter(pk=observed.replica_id, node=node_id).first()
    if replica is None:
        return None
    _record_exit(replica, observed, actor=actor, now=now)
    _take_over(replica, observed, now)
    replica.save()
    event = _event_of(observed, replica)
    if observed.stalled and REPLICA.allows(replica.status, event):
        subject = subject_of(replica)
        record_event(subject, "stalled", actor=actor, now=now, reason=observed.reason)
    if REPLICA.allows(replica.status, event):
        # Why it was let go stands until the end; any other old reason was about the status before.
        ending = replica.wanted != Replica.Wanted.RUN
        reason = observed.reason or (replica.reason if ending else "")
        return advance_replica(replica.pk, event, reason=reason, actor=actor, now=now)
    if observed.reason and replica.reason != observed.reason:
        replica.reason = observed.reason
        replica.save(update_fields=["reason"])
    return replica


@transaction.atomic
def record_node_lost(node_id: UUID, *, reason: str, actor: str, now: datetime) -> int:
    """Mark what runs on a node that is gone; returns how many replicas became unreachable."""
    live = Replica.objects.filter(node=node_id).exclude(status=states.STOPPED)
    running = [r.pk for r in live if REPLICA.allows(r.status, "node_lost")]
    for replica_id in running:
        advance_replica(replica_id, "node_lost", reason=reason, actor=actor, now=now)
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
    for replica in Replica.objects.filter(node=node_id).exclude(status=states.STOPPED):
        why = f"its node was retired: {reason}"
        advance_replica(replica.pk, "write_off", reason=why, actor=actor, now=now)
    return node


@transaction.atomic
def record_reachability(replica_id: UUID, reason: str, *, actor: str, now: datetime) -> None:
    """Record why gateways cannot connect to a replica; empty says that they can again."""
    replica = Replica.objects.select_for_update().get(pk=replica_id)
    if replica.unroutable_reason == reason[:500]:
        return
    replica.unroutable_reason = reason[:500]
    replica.save(update_fields=["unroutable_reason"])
    event = "unroutable" if reason else "routable_again"
    record_event(subject_of(replica), event, actor=actor, now=now, reason=reason)


@transaction.atomic
def advance_replica(replica_id: UUID, event: str, *, reason: str, actor: str, now: datetime) -> Replica:
    """Move a replica's status by an event: the only function that writes it.

    Raises `IllegalTransitionError` where the event does not apply.
    """
    replica = Replica.objects.select_for_update().get(pk=replica_id)
    before = replica.status
    replica.status = REPLICA.next(before, event)
    replica.reason = reason
    replica.status_changed_at = now
    if replica.status == states.READY:
        replica.ready_at = now
    else:
        replica.slow_since, replica.slow_reason = None, ""
    if replica.status == states.FAILED:
        replica.failed_at = now
    if replica.status == states.STOPPED:
        replica.stopped_at, replica.pid, replica.address = now, None, ""
        replica.held_since, replica.held_by_pids = None, []
    replica.save()
    record_event(
        subject_of(replica),
        event,
        actor=actor,
        now=now,
        moved=(before, replica.status),
        reason=reason,
        generation=replica.generation,
    )
    ring("deployment", replica.deployment_id)
    if replica.node_id is not None:
        ring("node", replica.node_id)
    return replica


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


def _record_exit(replica: Replica, observed: ObservedReplica, *, actor: str, now: datetime) -> None:
    ended = observed.last_exit
    if ended is None or (replica.exit_attempt or 0) >= ended.attempt:
        return
    replica.exit_attempt = ended.attempt
    replica.exit_code = ended.code
    replica.exit_signal = ended.signal
    replica.exit_after_seconds = ended.after_seconds
    replica.exit_log_tail = list(ended.log_tail)
    record_event(
        subject_of(replica),
        "exited",
        actor=actor,
        now=now,
        reason=f"attempt {ended.attempt} {ended.sentence()}{_cause_of(ended)}",
        generation=replica.generation,
    )


def _cause_of(ended: ObservedExit) -> str:
    """Why its agent ended it; what ended by itself has said how already."""
    return f": {ended.why}" if ended.why.startswith(("stalled", "dead", "not ready")) else ""


def _take_over(replica: Replica, observed: ObservedReplica, now: datetime) -> None:
    moved = replica.address != observed.address
    replica.observed_generation = max(replica.observed_generation, observed.generation)
    replica.attempt = observed.attempt
    replica.restarts = observed.restarts
    replica.pid = observed.pid
    replica.address = observed.address
    replica.ports = list(observed.ports)
    replica.start_took_seconds = observed.start_took_seconds
    replica.held_by_pids = list(observed.held_by_pids)
    if not observed.held_by_pids:
        replica.held_since = None
    elif replica.held_since is None:
        replica.held_since = now
    if moved:
        replica.unroutable_reason = ""
        if replica.status == states.READY and observed.address:
            replica.ready_at = now
            ring("routes", replica.pk)
