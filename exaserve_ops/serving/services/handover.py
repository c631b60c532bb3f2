"""Recording that a replica which is let go has handed its conversations over."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from django.db import transaction

from exaserve_ops.audit.services import record_event
from exaserve_ops.lib.hints import ring_all
from exaserve_ops.serving.domain.lifecycle import DRAINING
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.selectors.handover import hands_over, stands_down
from exaserve_ops.serving.services.replicas import hints_of, subject_of


@transaction.atomic
def record_handover(replica_id: UUID, *, left_behind: int, reason: str, actor: str, now: datetime) -> None:
    """Have a replica that drains or stands down take nothing more, and end what is open.

    Once; later calls change nothing.
    """
    replica = Replica.objects.select_for_update().get(pk=replica_id)
    if not hands_over(replica) and not stands_down(replica):
        return
    replica.handed_over_at, replica.left_behind = now, left_behind
    replica.generation += (
        replica.status == DRAINING
    )  # what its agent is told of one that stands by is the same
    replica.save(update_fields=["handed_over_at", "left_behind", "generation"])
    told = f"{reason}; {left_behind} sessions are left behind" if left_behind else reason
    record_event(
        subject_of(replica),
        "handed_over",
        actor=actor,
        now=now,
        reason=told,
        generation=replica.generation,
    )
    ring_all([*hints_of(replica, tells_node=True), ("routes", replica.pk)])


@transaction.atomic
def end_drain(replica_id: UUID, *, why: str, actor: str, now: datetime) -> None:
    """Leave a draining replica over several nodes no more time: its head is ended now, then the others.

    Were all told to stop at once, the head would lose the others in the middle of its open requests and
    crash. Once; later calls change nothing.
    """
    replica = Replica.objects.select_for_update().get(pk=replica_id)
    until = replica.drain_deadline_at
    is_over = replica.handed_over_at is not None and until is not None and until <= now
    if replica.status != DRAINING or is_over:
        return
    replica.handed_over_at = replica.handed_over_at or now
    # What is left for open requests is the time between the two: none.
    replica.drain_deadline_at, replica.reason = replica.handed_over_at, why
    replica.generation += 1
    replica.save(update_fields=["handed_over_at", "drain_deadline_at", "reason", "generation"])
    record_event(
        subject_of(replica), "drain_ended", actor=actor, now=now, reason=why, generation=replica.generation
    )
    ring_all([*hints_of(replica, tells_node=True), ("routes", replica.pk)])
