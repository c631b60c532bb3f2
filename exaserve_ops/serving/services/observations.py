"""Recording what agents saw of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from uuid import UUID

from django.db import transaction
from django.db.models import Exists, OuterRef, Q

from exaserve_ops.audit.services import Happening, record_events
from exaserve_ops.lib.hints import ring_all
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.gang_rules import HEAD
from exaserve_ops.serving.domain.lifecycle import REPLICA
from exaserve_ops.serving.domain.observed import ObservedReplica
from exaserve_ops.serving.domain.reach import CLOSED
from exaserve_ops.serving.models import Replica, ReplicaMember
from exaserve_ops.serving.selectors.members import ONE_NODE
from exaserve_ops.serving.services.gangs import hold_of, observe_member
from exaserve_ops.serving.services.replicas import Move, advance_row, await_reach, hints_of, subject_of
from exaserve_ops.serving.services.sleep import nodes_of_awake_standbys, note_sleep


@transaction.atomic
def record_observations(
    observed: Sequence[ObservedReplica], *, node_id: UUID, actor: str, now: datetime
) -> dict[str, Replica | None]:
    """Take over what an agent saw of replicas, and move the status of those whose sighting calls for it.

    Returns the rows by id as the agent said it; `None` where no such replica is recorded for that node, or
    none any more: the agent runs something that nobody knows, and is told so by its wish.
    """
    ids = [seen.replica_id for seen in observed]
    alone = Q(ONE_NODE, node=node_id)
    parts = Q(Exists(ReplicaMember.objects.filter(replica=OuterRef("pk"), node=node_id)))
    asked = Replica.objects.filter(alone | parts, pk__in=ids)
    rows: dict[str, Replica | None] = {str(row.pk): row for row in asked.select_for_update().order_by("pk")}
    happenings: list[Happening] = []
    hints: list[tuple[str, object]] = []
    for seen in observed:
        row = rows.get(seen.replica_id)
        if row is None:
            continue
        if row.node_count > 1:
            happenings += _observe_part(row, node_id, seen, now, hints)
            if row.members.filter(node=node_id, ended_at__isnull=False).exists():
                rows[seen.replica_id] = None
        else:
            happenings += _observe(row, seen, now, hints)
        row.save()
    record_events(happenings, actor=actor, now=now)
    ring_all(hints)
    return {seen.replica_id: rows.get(seen.replica_id) for seen in observed}


def _observe_part(
    replica: Replica, node_id: UUID, seen: ObservedReplica, now: datetime, hints: list[tuple[str, object]]
) -> list[Happening]:
    """Take the sighting of a member over; the status of the whole is for the leader to move."""
    members = list(replica.members.select_related("node").order_by("number"))
    member = next(one for one in members if one.node_id == node_id)
    told = _told_by(member)
    happenings = observe_member(replica, members, member.number, seen, now)
    member.save()
    if member.number == HEAD:
        happenings += _note_exit(replica, seen)
        if _note_address(replica, seen, now):
            hints.append(("routes", replica.pk))
        _take_over(replica, seen)
        happenings += _note_memory(replica, seen, now)
    _note_holders(replica, hold_of(members), now)
    hints.append(("gang" if _told_by(member) == told else "gang_wish", replica.pk))
    return happenings


def _told_by(member: ReplicaMember) -> tuple[object, ...]:
    """What the members' nodes are told of one: where the head is, and whether a part is over."""
    head = (member.epoch, member.address, member.rendezvous) if member.number == HEAD else ()
    return (*head, member.ended_at)


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
        hints.append(_route_hint(replica))
    _take_over(replica, seen)
    _note_holders(replica, list(seen.held_by_pids), now)
    happenings += _note_memory(replica, seen, now)
    slept, turned = note_sleep(replica, seen, now)
    happenings += slept
    if turned:
        hints += [_route_hint(replica), ("deployment", replica.deployment_id)]
        hints += nodes_of_awake_standbys([replica.deployment_id])
    event = _event_of(seen, replica)
    if REPLICA.allows(replica.status, event):
        if seen.stalled:
            happenings.append(Happening(subject_of(replica), "stalled", reason=seen.reason))
        # Why it was let go stands until the end; any other old reason was about the status before.
        ending = replica.wanted != Replica.Wanted.RUN
        reason = seen.reason or (replica.reason if ending else "")
        happenings.append(advance_row(replica, Move(event, reason), now))
        # What its agent says changes nothing of what the agent is told, until it is over.
        hints += hints_of(replica, tells_node=replica.status == states.STOPPED)
        if replica.status == states.READY:
            hints.append(_route_hint(replica))
    elif seen.reason:
        replica.reason = seen.reason
    return happenings


def _route_hint(replica: Replica) -> tuple[str, object]:
    """Have its route written; at once where nobody else serves the name, since requests wait for it then."""
    if replica.status != states.READY or replica.role != Replica.Role.SERVING:
        return ("routes", replica.pk)
    name = Replica.objects.filter(pk=replica.pk).values("deployment__served_name")
    others = Replica.objects.filter(
        deployment__served_name__in=name, status=states.READY, role=Replica.Role.SERVING, sleep_state=""
    ).exclude(Q(pk=replica.pk) | Q(reach__in=CLOSED))
    return ("routes" if others.exists() else "first_route", replica.pk)


def _note_exit(replica: Replica, observed: ObservedReplica) -> list[Happening]:
    ended = observed.last_exit
    if ended is None or (replica.exit_attempt or 0) >= ended.attempt:
        return []
    replica.exit_attempt = ended.attempt
    replica.exit_code = ended.code
    replica.exit_signal = ended.signal
    replica.exit_after_seconds = ended.after_seconds if ended.is_known else None
    replica.exit_log_tail = list(ended.log_tail)
    reason = f"attempt {ended.attempt} {ended.told()}"
    return [Happening(subject_of(replica), "exited", ("", ""), reason, replica.generation)]


def _take_over(replica: Replica, observed: ObservedReplica) -> None:
    replica.observed_generation = max(replica.observed_generation, observed.generation)
    replica.attempt = observed.attempt
    replica.restarts = observed.restarts
    replica.pid = observed.pid
    replica.ports = list(observed.ports)
    replica.start_took_seconds = observed.start_took_seconds


def _note_holders(replica: Replica, pids: list[int], now: datetime) -> None:
    replica.held_by_pids = pids
    if not pids:
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


def _note_address(replica: Replica, observed: ObservedReplica, now: datetime) -> bool:
    """Take over where it answers; returns whether the routes to one that is ready change by that."""
    if replica.address == observed.address:
        return False
    replica.address = observed.address
    await_reach(replica)
    if replica.status != states.READY or not observed.address:
        return False
    replica.ready_at = now
    return True
