"""Writing of whose turn it is to start, of the times in which some had to wait, and of the limits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import asdict
from datetime import datetime
from uuid import UUID

from django.db import transaction
from django.db.models import Count, Max

from exaserve_ops.audit.services import Subject, record_event
from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.lib.hints import ring, ring_all
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.starts import StartLimits, StartPlan
from exaserve_ops.serving.models import Replica, StagedStart, StartRules

MOST_AT_ONCE = 1_000_000
_RULES = Subject("start_rules", "1", "Start limits")


@transaction.atomic
def carry_out_starts(plan: StartPlan, *, actor: str, now: datetime) -> set[UUID]:
    """Give those their turn whose turn it is, and say beside the others what they wait for.

    Returns the nodes that are to be told. One that is let go or lost its place meanwhile is left alone.
    """
    waiting = Replica.objects.filter(
        status=states.PLACED, wanted=Replica.Wanted.RUN, start_waits_since__isnull=False
    )
    going = waiting.filter(pk__in=plan.go).select_for_update().order_by("pk")
    nodes = dict(going.values_list("pk", "node"))
    Replica.objects.filter(pk__in=nodes).update(start_waits_since=None, start_allowed_at=now)
    by_reason: dict[str, list[str]] = defaultdict(list)
    for one in plan.waits:
        by_reason[one.why].append(one.replica_id)
    for why, replica_ids in by_reason.items():
        waiting.filter(pk__in=replica_ids).exclude(reason=why).update(reason=why)
    gangs = Replica.objects.filter(pk__in=nodes, node_count__gt=1).values_list("pk", flat=True)
    ring_all(("gang", pk) for pk in gangs)
    _keep_account(plan, actor=actor, now=now)
    return set(nodes.values())


def _keep_account(plan: StartPlan, *, actor: str, now: datetime) -> None:
    """Open a staged start when somebody has to wait, and close it when all who did are done."""
    staged = StagedStart.objects.select_for_update().filter(ended_at=None).first()
    if staged is None:
        if plan.held_up:
            staged = StagedStart.objects.create(began_at=now, most_waiting=plan.held_up)
            going = len(plan.go) + len(plan.starting)
            told = f"{plan.held_up:,} replicas wait for their turn while {going:,} start"
            record_event(subject_of(staged), "began", actor=actor, now=now, reason=told)
    elif plan.held_up:
        if plan.held_up > staged.most_waiting:
            staged.most_waiting = plan.held_up
            staged.save(update_fields=["most_waiting"])
    elif not plan.go and not _has_part(plan, staged):
        _close(staged, actor=actor, now=now)


def _has_part(plan: StartPlan, staged: StagedStart) -> bool:
    return any(one.allowed_at and one.allowed_at >= staged.began_at for one in plan.starting)


def _close(staged: StagedStart, *, actor: str, now: datetime) -> None:
    let_go = Replica.objects.filter(start_allowed_at__gte=staged.began_at)
    counted = let_go.aggregate(
        replicas=Count("pk"), waves=Count("start_allowed_at", distinct=True), last=Max("start_allowed_at")
    )
    staged.ended_at = now
    staged.replicas, staged.waves = counted["replicas"], counted["waves"]
    staged.save(update_fields=["ended_at", "replicas", "waves"])
    lasted = (now - staged.began_at).total_seconds()
    told = (
        f"{staged.replicas:,} replicas in {staged.waves:,} waves, {lasted:,.0f} s; "
        f"at most {staged.most_waiting:,} waited"
    )
    record_event(subject_of(staged), "ended", actor=actor, now=now, reason=told)


@transaction.atomic
def set_start_limits(limits: StartLimits, *, actor: str, now: datetime, reason: str) -> StartRules:
    """Have no more start at once than this from now on; what starts already goes on.

    Raises `InvalidInputError`.
    """
    for name, value in asdict(limits).items():
        if not 0 <= value <= MOST_AT_ONCE:
            raise InvalidInputError(name, f"must be 0 (any number) to {MOST_AT_ONCE:,}")
    before = StartRules.objects.select_for_update().first()
    old = StartLimits() if before is None else limits_of(before)
    row, _ = StartRules.objects.update_or_create(pk=1, defaults={**asdict(limits), "changed_at": now})
    changes = _changes(old, limits)
    if changes:
        told = f"{', '.join(changes)}: {reason}" if reason else ", ".join(changes)
        record_event(_RULES, "changed", actor=actor, now=now, reason=told)
        ring("starts", "all")
    return row


def limits_of(row: StartRules) -> StartLimits:
    """What a row says."""
    return StartLimits(**{name: getattr(row, name) for name in asdict(StartLimits())})


def _changes(old: StartLimits, new: StartLimits) -> Collection[str]:
    before, after = asdict(old), asdict(new)
    return [
        f"{name.replace('_', ' ')} {before[name]:,} → {value:,}"
        for name, value in after.items()
        if before[name] != value
    ]


def subject_of(staged: StagedStart) -> Subject:
    """Return the audit subject of a staged start."""
    return Subject("staged_start", str(staged.pk), f"Staged start of {staged.began_at:%H:%M:%S} UTC")
