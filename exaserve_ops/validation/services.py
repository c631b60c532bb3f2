"""Writing of validations: what people ask for, and what their steps find."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import transaction

from exaserve_ops.audit.services import Subject, record_event
from exaserve_ops.inventory.domain.liveness import RETIRED
from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.selectors import nodes_with_hardware, supernode_of
from exaserve_ops.lib.errors import ConflictError, InvalidInputError
from exaserve_ops.serving.domain.lifecycle import ACTIVE
from exaserve_ops.serving.domain.memory_plan import CPU
from exaserve_ops.serving.domain.trials import PRIVATE_PREFIX
from exaserve_ops.serving.models import Deployment, Model, Replica
from exaserve_ops.serving.services.deployments import (
    BOUNDS,
    DeploymentWish,
    create_deployment,
    delete_deployment,
    update_deployment,
)
from exaserve_ops.serving.services.options import check_engine
from exaserve_ops.serving.services.releases import ReleaseWish, adopt_release, find_or_create_release
from exaserve_ops.serving.services.replicas import replace_replica
from exaserve_ops.validation.domain import lifecycle as states
from exaserve_ops.validation.domain.asking import Finding
from exaserve_ops.validation.domain.catalogue import BY_NAME, plan_checks
from exaserve_ops.validation.domain.lifecycle import CHECK, VALIDATION
from exaserve_ops.validation.domain.spanning import Candidate, find_obstacle
from exaserve_ops.validation.models import Validation, ValidationCheck

ACTOR = "controller:validations"
MOST_ENGINES = 4
MOST_AT_ONCE = 256
"""Each is a thread of the leading controller: more would measure that, and not the engine."""
MOST_IDLE_SECONDS = 3600
MOST_LAUNCHES = 24
LEAST_LIMIT_SECONDS, MOST_LIMIT_SECONDS = 0.001, 600.0
_TRIAL_DRAIN_SECONDS = 10
_REASON_CHARACTERS = 500
_WHY_CHARACTERS = 1000
_FIGURE_CHARACTERS = 200
_EVENT_OF = {states.PASSED: "pass", states.FAILED: "fail", states.SKIPPED: "skip"}


@dataclass(frozen=True, slots=True)
class ValidationWish:
    """What somebody asks for."""

    model_id: UUID
    engines: tuple[str, ...]
    engine_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By engine."""
    replica_memory_bytes: int = 0
    accelerators_per_replica: int = 1
    nodes_per_replica: int = 1
    """More than one: each trial runs on so many nodes at once, with what is said above on each."""
    nodes: tuple[str, ...] = ()
    idle_seconds: int = 30
    most_at_once: int = 32
    most_launches: int = 6
    """In the search for the best settings; 0: none is made."""
    ttft_limit_seconds: float = 2.0
    itl_limit_seconds: float = 0.1


@transaction.atomic
def ask_validation(wish: ValidationWish, *, reason: str, actor: str, now: datetime) -> Validation:
    """Record a validation; it begins by itself. Raises `InvalidInputError` or `ConflictError`."""
    model = Model.objects.select_for_update().filter(pk=wish.model_id).first()
    if model is None:
        raise InvalidInputError("model", "no such model is registered")
    _check_wish(wish, reason)
    live = Validation.objects.filter(
        model=model, status__in=VALIDATION.live, engines__overlap=list(wish.engines)
    )
    other = live.first()
    if other is not None:
        raise ConflictError(
            f"validation {other.pk} of {model.name} on {', '.join(other.engines)} has not ended: "
            "wait for it, or cancel it"
        )
    validation = Validation.objects.create(
        model=model,
        engines=list(dict.fromkeys(wish.engines)),
        engine_options={engine: dict(options) for engine, options in wish.engine_options.items()},
        replica_memory_bytes=wish.replica_memory_bytes,
        accelerators_per_replica=wish.accelerators_per_replica,
        nodes_per_replica=wish.nodes_per_replica,
        nodes=list(wish.nodes),
        idle_seconds=wish.idle_seconds,
        most_at_once=wish.most_at_once,
        most_launches=wish.most_launches,
        ttft_limit_seconds=wish.ttft_limit_seconds,
        itl_limit_seconds=wish.itl_limit_seconds,
        reason=reason.strip()[:_REASON_CHARACTERS],
        asked_by=actor[:120],
        created_at=now,
        status_changed_at=now,
    )
    for engine in validation.engines:
        _check_trial(validation, engine, now=now)
    ValidationCheck.objects.bulk_create(
        ValidationCheck(validation=validation, position=position, name=check.name, engine=check.engine)
        for position, check in enumerate(plan_checks(validation.engines), 1)
    )
    told = f"{model.name} on {', '.join(validation.engines)}: {validation.reason}"
    record_event(subject_of(validation), "created", actor=actor, now=now, reason=told)
    return validation


def _check_wish(wish: ValidationWish, reason: str) -> None:
    if not reason.strip():
        raise InvalidInputError("reason", "say why; it stands in the history")
    if not 1 <= len(set(wish.engines)) <= MOST_ENGINES:
        raise InvalidInputError("engines", f"name one to {MOST_ENGINES} engines")
    for engine in wish.engines:
        check_engine(engine)
    for engine in wish.engine_options.keys() - set(wish.engines):
        raise InvalidInputError("engine_options", f"'{engine}' is not among the engines")
    _check_nodes(wish.nodes)
    _check_bounds(wish)


def _check_bounds(wish: ValidationWish) -> None:
    bounds = (
        ("idle_seconds", wish.idle_seconds, 0, MOST_IDLE_SECONDS),
        ("most_at_once", wish.most_at_once, 1, MOST_AT_ONCE),
        ("most_launches", wish.most_launches, 0, MOST_LAUNCHES),
        ("replica_memory_bytes", wish.replica_memory_bytes, 0, 1 << 50),
        ("accelerators_per_replica", wish.accelerators_per_replica, *BOUNDS["accelerators_per_replica"]),
        ("nodes_per_replica", wish.nodes_per_replica, *BOUNDS["nodes_per_replica"]),
    )
    for name, value, least, most in bounds:
        if not least <= value <= most:
            raise InvalidInputError(name, f"give a whole number from {least:,} to {most:,}")
    for name, seconds in (
        ("ttft_limit_seconds", wish.ttft_limit_seconds),
        ("itl_limit_seconds", wish.itl_limit_seconds),
    ):
        if not LEAST_LIMIT_SECONDS <= seconds <= MOST_LIMIT_SECONDS:
            raise InvalidInputError(name, f"give {LEAST_LIMIT_SECONDS:g} to {MOST_LIMIT_SECONDS:g} seconds")


def _check_trial(validation: Validation, engine: str, *, now: datetime) -> None:
    """Refuse what no engine can be tried with, before anything starts. Raises `InvalidInputError`.

    The trial is made and taken back, so that all that a deployment is refused for is refused here.
    """
    try:
        with transaction.atomic():
            create_deployment(_trial_wish(validation, engine), actor=ACTOR, now=now)
            transaction.set_rollback(True)
        if validation.nodes_per_replica > 1:
            _check_span(validation, engine)
    except InvalidInputError as error:
        whose = f"{engine}: " if len(validation.engines) > 1 else ""
        raise InvalidInputError(error.field, f"{whose}{error.message}") from error


def _check_span(validation: Validation, engine: str) -> None:
    offering = nodes_with_hardware().exclude(liveness=RETIRED).filter(engines__contains=[engine])
    if validation.nodes:
        offering = offering.filter(name__in=validation.nodes)
    candidates = [
        Candidate(supernode_of(node), any(one.kind != CPU for one in node.accelerators.all()))
        for node in offering
    ]
    options = validation.engine_options.get(engine, {})
    obstacle = find_obstacle(engine, options, validation.nodes_per_replica, candidates)
    if obstacle is not None:
        raise InvalidInputError(obstacle.field, obstacle.why)


def _check_nodes(names: tuple[str, ...]) -> None:
    unknown = set(names) - set(Node.objects.filter(name__in=names).values_list("name", flat=True))
    if unknown:
        raise InvalidInputError("nodes", f"no node is called '{min(unknown)[:64]}'")


@transaction.atomic
def cancel_validation(validation_id: UUID, *, reason: str, actor: str, now: datetime) -> Validation:
    """End a validation before its last check; what it runs is cleared away.

    Raises `InvalidInputError` without a reason, `IllegalTransitionError` where it has ended.
    """
    if not reason.strip():
        raise InvalidInputError("reason", "say why; it stands in the history")
    return advance_validation(validation_id, "cancel", why=reason, actor=actor, now=now)


@transaction.atomic
def advance_validation(validation_id: UUID, event: str, *, why: str, actor: str, now: datetime) -> Validation:
    """Move on by one event, under the row's lock. Raises `IllegalTransitionError`."""
    rows = Validation.objects.select_related("model").select_for_update(of=("self",))
    validation = rows.get(pk=validation_id)
    before, validation.status = validation.status, VALIDATION.next(validation.status, event)
    validation.why, validation.waits_for = why[:_WHY_CHARACTERS], ""
    validation.status_changed_at = now
    if validation.status == states.RUNNING:
        validation.started_at = now
    if validation.status in VALIDATION.final:
        validation.ended_at = now
        _skip_rest(validation, now)
    validation.save(
        update_fields=["status", "why", "waits_for", "status_changed_at", "started_at", "ended_at"]
    )
    moved = (before, validation.status)
    record_event(subject_of(validation), event, actor=actor, now=now, moved=moved, reason=why)
    return validation


def _skip_rest(validation: Validation, now: datetime) -> None:
    why = "the validation was ended first"
    for check in validation.checks.exclude(status__in=CHECK.final):
        advance_check(check, "skip", now=now, finding=Finding(states.SKIPPED, why=why))


def advance_check(
    check: ValidationCheck, event: str, *, now: datetime, finding: Finding | None = None
) -> None:
    """Move a check on by one event, with what it found. Its validation is locked.

    Raises `IllegalTransitionError` where it has an outcome already.
    """
    check.status = CHECK.next(check.status, event)
    if finding is None:
        check.began_at = now
    else:
        check.figure, check.limit = finding.figure[:_FIGURE_CHARACTERS], finding.limit[:_FIGURE_CHARACTERS]
        check.why, check.details = finding.why[:_WHY_CHARACTERS], dict(finding.details)
        check.began_at, check.ended_at = check.began_at or now, now
    check.save()


@transaction.atomic
def begin_check(validation: Validation, position: int, *, now: datetime) -> None:
    """Write down that a check runs; once more where the one that ran it is gone."""
    advance_check(_lock(validation, position), "begin", now=now)
    Validation.objects.filter(pk=validation.pk).update(waits_for="")


@transaction.atomic
def record_finding(validation: Validation, position: int, finding: Finding, *, now: datetime) -> None:
    """Write down what a check found. Raises `IllegalTransitionError` where it has an outcome already."""
    check = _lock(validation, position)
    advance_check(check, _EVENT_OF[finding.outcome], now=now, finding=finding)
    if check.status == states.FAILED:
        title = BY_NAME[check.name].title
        told = f"{title} on {check.engine}: {check.why}" if check.engine else f"{title}: {check.why}"
        record_event(subject_of(validation), "check_failed", actor=ACTOR, now=now, reason=told)


def _lock(validation: Validation, position: int) -> ValidationCheck:
    # The validation first: who ends it waits for the check, and the check finds it ended.
    held = Validation.objects.select_for_update().get(pk=validation.pk)
    if held.status != states.RUNNING:
        raise ConflictError(f"the validation is {held.status} by now")
    return ValidationCheck.objects.select_for_update().get(validation=validation, position=position)


@transaction.atomic
def make_trial(validation: Validation, engine: str, *, now: datetime) -> Deployment:
    """Ask for the deployment of one replica that an engine is tried in; no client can ask for it by name.

    Raises `InvalidInputError` where there can be none.
    """
    held = Validation.objects.select_for_update(of=("self",)).select_related("trial").get(pk=validation.pk)
    if held.trial is not None:
        return held.trial
    if held.status != states.RUNNING:
        raise ConflictError(f"the validation is {held.status} by now")
    deployment = create_deployment(_trial_wish(held, engine), actor=ACTOR, now=now)
    Validation.objects.filter(pk=held.pk).update(trial=deployment)
    return deployment


def _trial_wish(validation: Validation, engine: str) -> DeploymentWish:
    name = f"validation-{str(validation.pk)[:8]}-{engine}-{secrets.token_hex(2)}"
    return DeploymentWish(
        name=name[:60],
        model_id=validation.model_id,
        replicas=1,
        engine=engine,
        engine_options=validation.engine_options.get(engine, {}),
        served_name=f"{PRIVATE_PREFIX}{secrets.token_hex(16)}",
        nodes=tuple(validation.nodes),
        replica_memory_bytes=validation.replica_memory_bytes,
        accelerators_per_replica=validation.accelerators_per_replica,
        nodes_per_replica=validation.nodes_per_replica,
        drain_seconds=_TRIAL_DRAIN_SECONDS,
        balance_sessions=False,
        is_trial=True,
    )


@transaction.atomic
def relaunch_trial(validation: Validation, options: Mapping[str, int], *, now: datetime) -> bool:
    """Have the trial's replica make way for one with these options beside those of the run.

    Returns false, and changes nothing, where it has them already. Raises `InvalidInputError` where no engine
    takes them, `ConflictError` where the trial ends.
    """
    trial = validation.trial
    if trial is None or trial.status != ACTIVE:
        raise ConflictError("nothing is being tried")
    whole = {**validation.engine_options.get(trial.engine, {}), **options}
    running = Replica.objects.filter(deployment=trial, wanted=Replica.Wanted.RUN).order_by("-created_at")
    newest = running.select_related("release").first()
    if newest is not None and newest.release.engine_options == whole:
        return False
    release = find_or_create_release(trial.pk, ReleaseWish(engine_options=whole), actor=ACTOR, now=now)
    adopt_release(release.pk, actor=ACTOR, now=now, reason="the search for the best settings")
    for pk in list(running.values_list("pk", flat=True)):
        replace_replica(pk, why="other settings are tried", actor=ACTOR, now=now, by_validation=True)
    return True


def set_trial_asleep(validation: Validation, *, asleep: bool, now: datetime) -> None:
    """Have the trial's replica sleep, or wake. Raises `InvalidInputError` or `ConflictError`."""
    if validation.trial is None:
        raise ConflictError("nothing is being tried")
    update_deployment(
        validation.trial.pk, {"standbys_sleep": asleep}, actor=ACTOR, now=now, by_validation=True
    )


@transaction.atomic
def end_trial(validation: Validation, *, now: datetime) -> None:
    """Delete what an engine was tried in."""
    held = Validation.objects.select_for_update(of=("self",)).select_related("trial").get(pk=validation.pk)
    if held.trial is not None:
        delete_deployment(
            held.trial.pk, actor=ACTOR, now=now, reason="the engine was tried", by_validation=True
        )


def forget_trial(validation: Validation) -> None:
    """Take note that nothing of it is left."""
    Validation.objects.filter(pk=validation.pk).update(trial=None, waits_for="")


def note_wait(validation: Validation, why: str) -> None:
    """Write down what it waits for, where that changed."""
    changed = Validation.objects.filter(pk=validation.pk).exclude(waits_for=why[:_WHY_CHARACTERS])
    changed.update(waits_for=why[:_WHY_CHARACTERS])


def subject_of(validation: Validation) -> Subject:
    """The audit subject of a validation."""
    return Subject("validation", str(validation.pk), f"validation of {validation.model.name}")
