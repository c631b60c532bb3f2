"""What people do with rollouts: plan, ask, approve, pause, resume, turn back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import IntegrityError, transaction

from exaserve_ops.audit.services import Subject, record_event
from exaserve_ops.lib.errors import ConflictError, DeniedError, InvalidInputError, StaleError
from exaserve_ops.lib.hints import ring
from exaserve_ops.rollouts.domain import lifecycle as states
from exaserve_ops.rollouts.domain.lifecycle import ROLLOUT
from exaserve_ops.rollouts.domain.policy import PolicyError, RolloutPolicy, read_policy
from exaserve_ops.rollouts.domain.preflight import RolloutPlan, plan_rollout
from exaserve_ops.rollouts.domain.waves import PlannedWave
from exaserve_ops.rollouts.models import Rollout, Wave
from exaserve_ops.rollouts.selectors import preflight_facts
from exaserve_ops.rollouts.services.weights import keep_old_weights, let_weights_go, look_at_weights
from exaserve_ops.serving.models import Deployment, Release
from exaserve_ops.serving.services.releases import ReleaseWish, find_or_create_release

_REASON_CHARACTERS = 500
_WHY_CHARACTERS = 1000
_DOMAIN_CHARACTERS = 160


def checked_policy(given: Mapping[str, Any]) -> RolloutPolicy:
    """Read a policy. Raises `InvalidInputError`, naming the field."""
    try:
        return read_policy(given)
    except PolicyError as error:
        raise InvalidInputError(f"policy.{error.field}", str(error)) from error


@transaction.atomic
def preview_rollout(
    deployment_id: UUID, wish: ReleaseWish, policy: RolloutPolicy, *, actor: str, now: datetime
) -> RolloutPlan:
    """Plan a rollout and leave nothing behind. Raises `InvalidInputError`."""
    with transaction.atomic():
        plan, _ = _plan(deployment_id, wish, policy, actor, now)
        transaction.set_rollback(True)
    return plan


def _plan(
    deployment_id: UUID, wish: ReleaseWish, policy: RolloutPolicy, actor: str, now: datetime
) -> tuple[RolloutPlan, Release]:
    deployment = Deployment.objects.select_related("model").get(pk=deployment_id)
    release = find_or_create_release(deployment_id, wish, actor=actor, now=now)
    weights = look_at_weights(release.model, deployment_id)
    facts = preflight_facts(
        deployment,
        release,
        max_surge=policy.max_surge,
        bytes_to_bring=weights.bytes_to_bring,
        full_disks=weights.full_disks,
        now=now,
    )
    return plan_rollout(facts, policy), release


@transaction.atomic
def create_rollout(
    deployment_id: UUID,
    wish: ReleaseWish,
    policy: RolloutPolicy,
    *,
    reason: str,
    confirmed: str,
    actor: str,
    now: datetime,
) -> Rollout:
    """Ask for a rollout whose plan was seen; `confirmed` is that plan's digest.

    Raises `InvalidInputError`, `ConflictError` where it cannot begin, or `StaleError` where another plan
    than the one that was seen would be carried out.
    """
    if not reason.strip():
        raise InvalidInputError("reason", "say why; it stands in the history")
    Deployment.objects.select_for_update().get(pk=deployment_id)
    plan, release = _plan(deployment_id, wish, policy, actor, now)
    if plan.refusals:
        raise ConflictError(" ".join(plan.refusals))
    if plan.digest != confirmed:
        raise StaleError(f"the plan is another one by now ({plan.digest}): read it again, then decide")
    old = Release.objects.get(deployment=deployment_id, number=plan.old.number)
    try:
        with transaction.atomic():
            rollout = Rollout.objects.create(
                deployment_id=deployment_id,
                from_release=old,
                to_release=release,
                policy=policy.to_json(),
                surge=plan.surge,
                unavailable=plan.unavailable,
                reason=reason[:_REASON_CHARACTERS],
                asked_by=actor[:120],
                warnings=list(plan.warnings),
                estimate=asdict(plan.estimate),
                created_at=now,
                status_changed_at=now,
            )
    except IntegrityError as error:
        raise ConflictError("another rollout of this deployment has not ended") from error
    Wave.objects.bulk_create(wave_rows(rollout, plan.waves, now))
    told = f"release {old.number} to {release.number} in {len(plan.waves)} waves: {reason}"
    record_event(subject_of(rollout), "created", actor=actor, now=now, reason=told)
    if policy.second_approver:
        return rollout
    return advance_rollout(rollout.pk, "start", why=reason, actor=actor, now=now)


def wave_rows(rollout: Rollout, waves: Iterable[PlannedWave], now: datetime) -> list[Wave]:
    """The record of planned waves."""
    return [
        Wave(
            rollout=rollout,
            number=wave.number,
            domain=wave.domain[:_DOMAIN_CHARACTERS],
            domains=list(wave.domains),
            planned=len(wave.replica_ids),
            sessions=wave.sessions,
            soak_seconds=wave.soak_seconds,
            needs_approval=wave.needs_approval,
            why=wave.why,
            since=now,
        )
        for wave in waves
    ]


@transaction.atomic
def approve_rollout(rollout_id: UUID, *, actor: str, now: datetime, reason: str) -> Rollout:
    """Agree to what somebody else asked for.

    Raises `IllegalTransitionError` where nothing waits for that, `DeniedError` for the same person.
    """
    rollout = Rollout.objects.select_for_update().get(pk=rollout_id)
    ROLLOUT.next(rollout.status, "approve")
    if rollout.asked_by == actor:
        raise DeniedError("you asked for this rollout yourself: somebody else must approve it")
    Rollout.objects.filter(pk=rollout_id).update(approved_by=actor[:120])
    return advance_rollout(rollout_id, "approve", why=reason or "approved", actor=actor, now=now)


@transaction.atomic
def resume_rollout(rollout_id: UUID, *, actor: str, now: datetime, reason: str) -> Rollout:
    """Let a rollout go on: past the wave that waited for it, and with its deadlines anew."""
    rollout = advance_rollout(rollout_id, "resume", why=reason, actor=actor, now=now)
    wave = rollout.waves.exclude(status=states.PASSED).order_by("number").first()
    if wave is not None:
        wave.needs_approval = False
        if wave.status != states.FAILED:  # that one is tried again, since this comes after its failure
            wave.since = now
        wave.save(update_fields=["needs_approval", "since"])
    return rollout


def act_on_rollout(rollout_id: UUID, act: str, *, actor: str, now: datetime, reason: str) -> Rollout:
    """Do what a button says: `approve`, `cancel`, `pause`, `resume` or `roll_back`.

    Raises `IllegalTransitionError` where it does not apply now, `InvalidInputError` without a reason.
    """
    if not reason.strip():
        raise InvalidInputError("reason", "say why; it stands in the history")
    special = {"approve": approve_rollout, "resume": resume_rollout}
    if act in special:
        return special[act](rollout_id, actor=actor, now=now, reason=reason)
    if act not in {"cancel", "pause", "roll_back"}:
        raise InvalidInputError("act", "give approve, cancel, pause, resume or roll_back")
    return advance_rollout(rollout_id, act, why=reason, actor=actor, now=now)


@transaction.atomic
def advance_rollout(rollout_id: UUID, event: str, *, why: str, actor: str, now: datetime) -> Rollout:
    """Move on by one event, under the row's lock. Raises `IllegalTransitionError`."""
    related = Rollout.objects.select_related("deployment", "from_release__model")
    rollout = related.select_for_update(of=("self",)).get(pk=rollout_id)
    before, rollout.status = rollout.status, ROLLOUT.next(rollout.status, event)
    if event == "finish_back" and rollout.why:
        why = f"{why}: {rollout.why}"  # its page tells what was wrong with the new one
    rollout.why, rollout.waits_for = why[:_WHY_CHARACTERS], ""
    rollout.status_changed_at = now
    if rollout.started_at is None and rollout.status == states.RUNNING:
        rollout.started_at = now
        keep_old_weights(rollout, actor=actor, now=now)
    if rollout.status in ROLLOUT.final:
        rollout.ended_at = now
        let_weights_go(rollout)
    rollout.save(update_fields=["status", "why", "waits_for", "status_changed_at", "started_at", "ended_at"])
    moved = (before, rollout.status)
    record_event(subject_of(rollout), event, actor=actor, now=now, moved=moved, reason=why)
    ring("rollout", rollout.pk)
    return rollout


def subject_of(rollout: Rollout) -> Subject:
    """The audit subject of a rollout."""
    return Subject("rollout", str(rollout.pk), f"rollout of {rollout.deployment.name}")
