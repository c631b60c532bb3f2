"""Writing of replicas over several nodes: what is decided of the whole, and what agents saw of its parts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from django.db import transaction

from exaserve_ops.audit.services import Happening, record_events
from exaserve_ops.lib.hints import ring_all
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.gang_rules import (
    HEAD,
    BackOff,
    Begin,
    Follow,
    GangStep,
    GiveUp,
    StopRest,
    order_of,
    plan_gang_step,
)
from exaserve_ops.serving.domain.lifecycle import REPLICA
from exaserve_ops.serving.domain.observed import ObservedReplica
from exaserve_ops.serving.models import Replica, ReplicaMember
from exaserve_ops.serving.selectors.handover import hands_over
from exaserve_ops.serving.selectors.members import gang_facts
from exaserve_ops.serving.services.replicas import Move, advance_row, hints_of, subject_of

ENDED_AS_TOLD = "ended with the whole, as it was told"


@dataclass(frozen=True, slots=True)
class SettledGang:
    """What one look at a replica over several nodes led to."""

    has_changed: bool
    """It took a step by which its nodes are told something else, or by which it is routed to or not."""
    node_ids: tuple[UUID, ...]
    """Of its members."""
    is_at_rest: bool
    """Nothing is to come that no report and no person brings about."""


@transaction.atomic
def settle_gang(replica_id: UUID, *, actor: str, now: datetime) -> SettledGang | None:
    """Take the next step of a replica over several nodes; `None` where there is no such replica.

    Decided under its row lock and from the record alone, so that a report meanwhile waits, and another leader
    goes on in the middle.
    """
    found = Replica.objects.select_for_update(of=("self",)).select_related("deployment", "release__model")
    replica = found.defer("release__model__config").filter(pk=replica_id, node_count__gt=1).first()
    members = ReplicaMember.objects.filter(replica=replica_id).defer("exit_log_tail")
    members = members.select_related("node").order_by("number")
    if replica is None or not members:
        return None
    step = plan_gang_step(gang_facts(replica, members), now=now)
    told, reason = _told_of(replica), replica.reason
    happenings = [] if step is None else take_step(replica, step, now)
    has_changed = _told_of(replica) != told
    if happenings or has_changed or replica.reason != reason:
        replica.save()
        record_events(happenings, actor=actor, now=now)
        ring_all(hints_of(replica, tells_node=False))
    rests = replica.status in (states.READY, states.STOPPED, states.UNREACHABLE)
    given_up = replica.status == states.FAILED and replica.gang_retry_at is None
    node_ids = tuple(member.node_id for member in members)
    return SettledGang(has_changed, node_ids, is_at_rest=rests or given_up)


def _told_of(replica: Replica) -> tuple[str, str, int, int]:
    """What a step can change of its members' wishes and of its route; a reason is in neither."""
    return (replica.status, replica.wanted, replica.generation, replica.gang_epoch)


def take_step(replica: Replica, step: GangStep, now: datetime) -> list[Happening]:
    """Take one step into the locked row; returns what happened by it."""
    match step:
        case Begin():
            return _begin(replica, step, now)
        case BackOff() | GiveUp():
            replica.gang_began_at = replica.gang_ready_by = None
            replica.gang_retry_at = step.retry_at if isinstance(step, BackOff) else None
            replica.gang_crashes = step.crashes
            replica.generation += 1
            event = "seen_backing_off" if isinstance(step, BackOff) else "seen_failed"
            return _move(replica, event, step.why, now)
        case Follow():
            replica.gang_ready_by = step.ready_by or replica.gang_ready_by
            return _move(replica, step.event, step.why, now)
        case StopRest():
            replica.wanted = Replica.Wanted.STOP
            replica.generation += 1
            # Why it was let go stays told: a part that ended on the way is no reason of its own.
            return _move(replica, "stop", "; ".join(filter(None, (replica.reason, step.why))), now)


def _begin(replica: Replica, step: Begin, now: datetime) -> list[Happening]:
    replica.gang_epoch += 1
    replica.generation += 1
    replica.gang_began_at, replica.gang_ready_by, replica.gang_retry_at = now, step.ready_by, None
    moved = _move(replica, "seen_waiting", step.why, now)
    replica.reason = step.why
    return [
        *moved,
        Happening(subject_of(replica), "start_begun", reason=step.why, generation=replica.generation),
    ]


def _move(replica: Replica, event: str, why: str, now: datetime) -> list[Happening]:
    """Move its status where the event does, else write down the reason alone."""
    ending = replica.wanted != Replica.Wanted.RUN and event != "stop"
    if ending:
        why = replica.reason  # why it was let go stands until the end
    if event and REPLICA.allows(replica.status, event):
        return [advance_row(replica, Move(event, why), now)]
    replica.reason = why or replica.reason
    return []


def observe_member(
    replica: Replica, members: list[ReplicaMember], number: int, seen: ObservedReplica, now: datetime
) -> list[Happening]:
    """Take a sighting of one part over into its row; returns what happened. `members`: all, in order."""
    member = members[number]
    order = order_of(
        member.number,
        wanted=replica.wanted,
        hands_over=hands_over(replica),
        began=replica.gang_began_at is not None,
        head_ended=members[HEAD].ended_at is not None,
    )
    member.state, member.reason = seen.state, seen.reason
    if member.number != HEAD and _ended_as_told(replica, members[HEAD], seen):
        member.state, member.reason = states.STOPPED, ENDED_AS_TOLD
    member.epoch, member.generation, member.attempt = seen.epoch, seen.generation, seen.attempt
    member.pid, member.held_by_pids = seen.pid, list(seen.held_by_pids)
    if member.number == HEAD:
        member.address, member.rendezvous = seen.address, seen.rendezvous
    let_go = Replica.Wanted.RUN not in (replica.wanted, order)
    is_gone = seen.state == states.STOPPED and seen.generation >= replica.generation
    if let_go and is_gone and member.ended_at is None:
        member.ended_at, member.pid = now, None
    return _note_exit(replica, len(members), member, seen)


def _ended_as_told(replica: Replica, head: ReplicaMember, seen: ObservedReplica) -> bool:
    """Whether a part ended by itself because the whole is let go.

    The others are to run until the head has ended, and mostly see its end before they are told of it: to
    their agents that looks like a crash.
    """
    if replica.wanted == Replica.Wanted.RUN or seen.state != states.FAILED:
        return False
    ended = seen.last_exit
    went_well = ended is not None and ended.attempt == seen.attempt and ended.code == 0
    head_ends = head.generation >= replica.generation and head.state in (states.STOPPING, states.STOPPED)
    return went_well or head_ends


def _note_exit(replica: Replica, count: int, member: ReplicaMember, seen: ObservedReplica) -> list[Happening]:
    ended = seen.last_exit
    if ended is None or (member.exit_attempt or 0) >= ended.attempt:
        return []
    member.exit_attempt, member.exit_text = ended.attempt, ended.told()[:500]
    member.exit_code, member.exit_signal = ended.code, ended.signal
    member.exit_after_seconds = ended.after_seconds if ended.is_known else None
    member.exit_log_tail = list(ended.log_tail)
    if member.number == HEAD:
        return []  # its end is told as that of any replica
    where = f"node {member.node.name}, member {member.number} of {count}"
    reason = f"{where}: attempt {ended.attempt} {ended.told()}"
    return [Happening(subject_of(replica), "exited", ("", ""), reason, replica.generation)]


def hold_of(members: list[ReplicaMember]) -> list[int]:
    """Processes that hold the memory that any of these waits for."""
    return [pid for member in members for pid in member.held_by_pids]
