"""Writing of what healing decided: who serves and stands by, replacements, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from django.db import transaction

from exaserve_ops.audit.services import Happening, record_event, record_events
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.lib.hints import ring, ring_all
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.healing import ROLLOUT
from exaserve_ops.serving.domain.placement import Placement
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.services.replicas import HANDOVER, create_replicas, place_replica, subject_of


@dataclass(frozen=True, slots=True)
class Promotion:
    """A standby that is to serve, and the replica in whose place; `None`: more are to serve than before."""

    standby_id: UUID
    instead_of: UUID | None
    why: str


@transaction.atomic
def promote_standbys(promotions: Sequence[Promotion], *, actor: str, now: datetime) -> list[str]:
    """Let standbys serve, ready ones in place of replicas that do not; those become the standbys.

    All in one transaction, since requests wait for each. Returns why some were left out: one of the two
    is no longer what the plan saw.
    """
    pairs = {pk for one in promotions for pk in (one.standby_id, one.instead_of) if pk is not None}
    locked = Replica.objects.select_for_update(of=("self",)).select_related("deployment")
    rows = {row.pk: row for row in locked.filter(pk__in=pairs).order_by("pk")}
    roles = {pk: row.role for pk, row in rows.items()}
    left_out: list[str] = []
    happenings: list[Happening] = []
    for one in promotions:
        standby, absent = rows[one.standby_id], rows.get(one.instead_of) if one.instead_of else None
        refusal = _why_no_rise(standby) if absent is None else _why_no_swap(standby, absent)
        if refusal:
            left_out.append(refusal)
            continue
        standby.role = Replica.Role.SERVING
        happenings.append(Happening(subject_of(standby), "promoted", reason=one.why))
        if absent is not None:
            absent.role = Replica.Role.STANDBY
            stood_down = f"{standby.name} serves in its place"
            happenings.append(Happening(subject_of(absent), "stood_down", reason=stood_down))
    moved = [row for row in rows.values() if row.role != roles[row.pk]]
    # Whoever had just stood down itself keeps what it has not handed over.
    risen = [row.pk for row in moved if row.role == Replica.Role.SERVING]
    Replica.objects.filter(pk__in=risen).update(role=Replica.Role.SERVING, **dict.fromkeys(HANDOVER))
    fallen = [row.pk for row in moved if row.role == Replica.Role.STANDBY]
    Replica.objects.filter(pk__in=fallen).update(role=Replica.Role.STANDBY)
    record_events(happenings, actor=actor, now=now)
    ring_all([hint for row in moved for hint in _hints_of_role(row)])
    return left_out


@transaction.atomic
def stand_down(replica_id: UUID, *, why: str, actor: str, now: datetime) -> None:
    """Have a serving replica stand by: its conversations leave it first, as they leave one that is let go.

    Raises `ConflictError` where it does not serve any more.
    """
    replica = Replica.objects.select_for_update(of=("self",)).select_related("deployment").get(pk=replica_id)
    if replica.role != Replica.Role.SERVING or replica.wanted != Replica.Wanted.RUN:
        raise ConflictError(f"replica {replica.name} does not serve any more")
    replica.role = Replica.Role.STANDBY
    replica.drain_deadline_at = replica.handed_over_at = replica.left_behind = None
    if replica.status == states.READY and not replica.sleep_state:
        replica.drain_deadline_at = now + timedelta(seconds=replica.deployment.drain_seconds)
    replica.save(update_fields=["role", *HANDOVER])
    record_event(subject_of(replica), "stood_down", actor=actor, now=now, reason=why)
    ring_all(_hints_of_role(replica))


def _hints_of_role(replica: Replica) -> list[tuple[str, object]]:
    hints: list[tuple[str, object]] = [("routes", "all"), ("deployment", replica.deployment_id)]
    if replica.deployment.standbys_sleep and replica.node_id:
        hints.append(("node", replica.node_id))  # who is to sleep is part of what nodes are told
    return hints


def _why_no_rise(standby: Replica) -> str:
    if standby.role != Replica.Role.STANDBY or standby.wanted != Replica.Wanted.RUN:
        return f"{standby.name} is no standby any more"
    return ""


def _why_no_swap(standby: Replica, absent: Replica) -> str:
    ready = standby.role == Replica.Role.STANDBY and standby.status == states.READY
    if not ready or standby.wanted != Replica.Wanted.RUN:
        return f"{standby.name} is no ready standby any more"
    is_ready = absent.status == states.READY
    if absent.role != Replica.Role.SERVING or (is_ready and not absent.sleep_state):
        return f"{absent.name} serves, or is replaced already"
    if is_ready and standby.sleep_state:
        return f"{standby.name} sleeps, and would answer no sooner than {absent.name}, which wakes"
    return ""


@transaction.atomic
def make_replacement(
    replica_id: UUID, placement: Placement, *, cause: str, why: str, actor: str, now: datetime
) -> Replica:
    """Make and place one replica that takes the place of another, once: a second call finds the first.

    It has the release that the old one rolls to, else the old one's. Raises `ConflictError` where the
    old one is being let go already.
    """
    old = Replica.objects.select_for_update().get(pk=replica_id)
    if old.wanted != Replica.Wanted.RUN:
        raise ConflictError(f"replica {old.name} is {old.status} already")
    if cause == ROLLOUT and old.rolls_to_id is None:
        raise ConflictError(f"replica {old.name} makes way for nobody now")
    known = old.replacements.filter(wanted=Replica.Wanted.RUN).exclude(status=states.STOPPED).first()
    if known is not None:
        return known
    release_id = old.rolls_to_id or old.release_id
    [made] = create_replicas(
        old.deployment_id, 1, why=why, actor=actor, now=now, role=old.role, release_id=release_id
    )
    made.replaces, made.made_for = old, cause
    made.save(update_fields=["replaces", "made_for"])
    record_event(subject_of(old), "replaced", actor=actor, now=now, reason=f"{cause}: by {made.name}")
    return place_replica(made.pk, placement, actor=actor, now=now)


@transaction.atomic
def record_hold(replica_id: UUID, why: str, *, actor: str, now: datetime) -> None:
    """Say why a replica is not healed now, or with empty text that this is over; one event a change."""
    replica = Replica.objects.select_for_update().get(pk=replica_id)
    if replica.healing_note == why[:1000]:
        return
    replica.healing_note = why[:1000]
    replica.save(update_fields=["healing_note"])
    if why:
        record_event(subject_of(replica), "healing_waits", actor=actor, now=now, reason=why)


@transaction.atomic
def record_slowness(replica_id: UUID, reason: str, *, actor: str, now: datetime) -> None:
    """Mark a ready replica as slower than its peers, or with empty text as no longer so."""
    replica = Replica.objects.select_for_update().get(pk=replica_id)
    slow = bool(reason) and replica.status == states.READY
    if slow == (replica.slow_since is not None):
        return  # the figures move all the time; the verdict is what is recorded
    replica.slow_since, replica.slow_reason = (now, reason[:500]) if slow else (None, "")
    replica.save(update_fields=["slow_since", "slow_reason"])
    event = "slow" if slow else "slow_over"
    record_event(subject_of(replica), event, actor=actor, now=now, reason=reason)
    ring("deployment", replica.deployment_id)
