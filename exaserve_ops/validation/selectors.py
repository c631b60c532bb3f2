"""Reading of validations: as their next step sees them, and as people do."""

from __future__ import annotations

from copy import copy
from typing import Any
from uuid import UUID

from django.db.models import Count, Q, QuerySet

from exaserve_ops.serving.domain import lifecycle as serving
from exaserve_ops.serving.domain.architecture import described_config
from exaserve_ops.serving.domain.context_length import context_length, merge_overrides
from exaserve_ops.serving.domain.engine_launch import TORCH, LaunchError, read_launch
from exaserve_ops.serving.domain.kv_bytes import KvBytes, kv_bytes_of
from exaserve_ops.serving.domain.sleep import refusal
from exaserve_ops.serving.models import Deployment, Model, ModelManifest, Replica
from exaserve_ops.serving.selectors.memory_numbers import memory_of
from exaserve_ops.validation.domain import catalogue
from exaserve_ops.validation.domain import lifecycle as states
from exaserve_ops.validation.domain.asking import Subject
from exaserve_ops.validation.domain.driving import (
    BROKEN,
    ENDING,
    READY,
    STARTING,
    CheckState,
    Trial,
    ValidationView,
)
from exaserve_ops.validation.domain.launching import options_of
from exaserve_ops.validation.domain.model_checks import ModelRecord
from exaserve_ops.validation.domain.tuning import Forecast, Setting, ladders_of
from exaserve_ops.validation.models import Validation, ValidationCheck
from workers.protocol import manifest as manifests

_ROOM_SECONDS = 600.0
_UNWEIGHED = (
    "how much memory a replica needs is not known, so it is placed nowhere: ask again, and say how much"
)


def validations_with_model() -> QuerySet[Validation]:
    """All validations with what they validate."""
    return Validation.objects.select_related("model", "trial")


def counted_validations() -> QuerySet[Validation]:
    """All of them with how many checks have which outcome."""
    rows = validations_with_model()
    counts = {
        status: Count("checks", filter=Q(checks__status=status))
        for status in (states.PASSED, states.FAILED, states.SKIPPED)
    }
    return rows.annotate(all_checks=Count("checks"), **counts)


def live_validations() -> list[Validation]:
    """Those that have not ended, and those that left a trial behind; the oldest first."""
    rows = validations_with_model().filter(Q(status__in=states.VALIDATION.live) | Q(trial__isnull=False))
    return list(rows.order_by("created_at"))


def validation_view(validation: Validation, *, runs_here: bool) -> ValidationView:
    """A validation as its next step sees it."""
    older = Validation.objects.filter(
        model=validation.model_id, status__in=states.VALIDATION.live, created_at__lt=validation.created_at
    )
    checks = validation.checks.order_by("position").values_list(
        "position", "name", "engine", "status", "began_at"
    )
    return ValidationView(
        status=validation.status,
        checks=tuple(CheckState(*row) for row in checks),
        trial=_trial(validation.trial),
        is_first=validation.status != states.QUEUED or not older.exists(),
        runs_here=runs_here,
    )


def trial_replica(deployment: Deployment) -> Replica | None:
    """The replica that a trial runs in now: the newest one that is meant to run."""
    rows = Replica.objects.filter(deployment=deployment, wanted=Replica.Wanted.RUN)
    return rows.exclude(status=serving.STOPPED).select_related("node").order_by("-created_at").first()


def leaving_replicas(validation: Validation) -> bool:
    """Whether something of its trial that was let go still runs."""
    rows = Replica.objects.filter(deployment=validation.trial_id).exclude(wanted=Replica.Wanted.RUN)
    return rows.exclude(status=serving.STOPPED).exists()


def launch_seconds(deployment: Deployment | None) -> float:
    """What a launch of a trial may take: its engine's own time, and room has to be found for it."""
    usual = catalogue.BY_NAME[catalogue.LAUNCH].seconds
    return usual if deployment is None else max(usual, deployment.start_seconds + _ROOM_SECONDS)


def _trial(deployment: Deployment | None) -> Trial:
    if deployment is None or deployment.status == serving.DELETED:
        return Trial()
    if deployment.status != serving.ACTIVE:
        return Trial(ENDING, deployment.engine, "it ends", deployment.created_at)
    if not deployment.replica_memory_bytes:
        return Trial(BROKEN, deployment.engine, _UNWEIGHED, deployment.created_at)
    replica = trial_replica(deployment)
    if replica is None:
        why = "no replica has been made yet"
        return Trial(
            STARTING, deployment.engine, why, deployment.created_at, launch_seconds=launch_seconds(deployment)
        )
    state = {serving.READY: READY, serving.FAILED: BROKEN}.get(replica.status, STARTING)
    why = f"{replica.name} is {replica.status.replace('_', ' ')}"
    if replica.reason:
        why = f"{why}: {replica.reason}"
    if replica.sleep_state and not deployment.standbys_sleep:
        state, why = STARTING, f"{replica.name} is woken"  # a sleeper counts as ready, and answers nobody
    took = None
    if replica.ready_at is not None:
        took = (replica.ready_at - replica.created_at).total_seconds()
    return Trial(state, deployment.engine, why, deployment.created_at, took, launch_seconds(deployment))


def model_record(model: Model) -> ModelRecord:
    """What is recorded of a model, for the checks that ask no engine."""
    config = dict(model.config) or described_config(model.architecture, model.max_context_tokens or 0)
    kv = kv_bytes_of(config) if config else None
    refusal = "" if isinstance(kv, KvBytes) else (kv.summary() if kv is not None else "it has no config.json")
    listed, problem = _manifest_files(model)
    files = model.files.order_by("path").values_list("path", "size_bytes", "sha256")
    return ModelRecord(
        family=str(model.architecture.get("family", "")),
        layers=int(model.architecture.get("layers", 0)),
        context_tokens=model.max_context_tokens,
        vocabulary=int(model.architecture.get("vocabulary", 0)),
        kv_bytes_per_token=model.kv_bytes_per_token,
        kv_refusal=refusal,
        files=tuple((path, size, sha256) for path, size, sha256 in files),
        manifest_files=listed,
        manifest_problem=problem,
    )


def _manifest_files(model: Model) -> tuple[tuple[tuple[str, int, str], ...] | None, str]:
    row = ModelManifest.objects.filter(model=model).first()
    if row is None:
        return None, ""
    try:
        decoded = manifests.decode(bytes(row.body), row.digest)
    except manifests.ManifestError as error:
        return None, str(error)
    return tuple((f.path, f.size_bytes, f.sha256) for f in decoded.files), ""


def subject_of_check(validation: Validation, engine: str, name: str = "") -> Subject:
    """What the checks of one engine are about; `name`: of the check, for what only one of them needs."""
    model, deployment = validation.model, validation.trial
    plan = None
    if deployment is not None:
        rows = Replica.objects.filter(deployment=deployment, wanted=Replica.Wanted.RUN)
        plan = memory_of(deployment, rows.prefetch_related("accelerators"), {}).plan
    forecast = None
    if plan is not None and plan.kv.growth_bytes_each:
        each = plan.kv.growth_bytes_each
        forecast = (plan.claim.pool_low_bytes // each, plan.claim.pool_high_bytes // each)
    context = plan.limit_tokens if plan is not None else model.max_context_tokens or 0
    options = validation.engine_options.get(engine, {})
    return Subject(
        engine=engine,
        vocabulary=int(model.architecture.get("vocabulary", 0)),
        context_tokens=context,
        forecast_tokens=forecast,
        options=options,
        may_borrow=engine == TORCH and validation.nodes_per_replica == 1,
        most_at_once=validation.most_at_once,
        idle_seconds=float(validation.idle_seconds),
        shared_context_tokens=_shared_context(validation),
        why_no_sleep=refusal(engine, options, nodes=validation.nodes_per_replica),
        most_launches=validation.most_launches,
        ttft_limit_seconds=validation.ttft_limit_seconds,
        itl_limit_seconds=validation.itl_limit_seconds,
        forecasts=_forecasts(validation, engine, context) if name == catalogue.TUNING else {},
        earlier=_details(validation, engine),
    )


def _shared_context(validation: Validation) -> int | None:
    """The smallest context of all engines of a run, as they are to be launched; `None`: none is known."""
    model = validation.model
    known = []
    for engine in validation.engines:
        try:
            launch = read_launch(engine, validation.engine_options.get(engine, {}))
        except LaunchError:
            continue  # its own check says so
        config = merge_overrides(model.planning_config, launch.overrides)
        length = context_length(config, asked_tokens=launch.length_tokens, engine=engine)
        known.append(length.tokens or model.max_context_tokens or 0)
    return min((tokens for tokens in known if tokens), default=None)


def _forecasts(validation: Validation, engine: str, context_tokens: int) -> dict[Setting, Forecast]:
    """What the memory plan says of each setting that may be tried."""
    options = validation.engine_options.get(engine, {})
    ladders = ladders_of(engine, options, most_at_once=validation.most_at_once, context_tokens=context_tokens)
    deployment = validation.trial
    if ladders is None or deployment is None:
        return {}
    rows = list(Replica.objects.filter(deployment=deployment).prefetch_related("accelerators"))
    found = {}
    for setting in ladders.settings:
        tried = copy(deployment)
        tried.engine_options = {**options, **options_of(engine, setting)}
        plan = memory_of(tried, rows, {}).plan
        if plan is not None:
            found[setting] = Forecast(plan.verdict, plan.needed_bytes, plan.why)
    return found


def golden_of(validation: Validation) -> dict[str, dict[str, Any]]:
    """Golden answers by engine, of engines that passed."""
    rows = validation.checks.filter(name=catalogue.GOLDEN, status=states.PASSED).order_by("position")
    return {row.engine: row.details for row in rows}


def _details(validation: Validation, engine: str) -> dict[str, dict[str, Any]]:
    rows = validation.checks.filter(engine=engine, status__in=states.CHECK.final)
    return dict(rows.values_list("name", "details"))


def latest_go(model_id: UUID, engine: str) -> Validation | None:
    """The newest validation of a model that ended well and tried this engine; `None`: there is none.

    A newer one that ended badly on the engine takes it back.
    """
    ended = Validation.objects.filter(
        model=model_id, engines__contains=[engine], status__in=(states.GO, states.NO_GO)
    )
    newest = ended.order_by("-ended_at").first()
    if newest is None:
        return None
    failed = ValidationCheck.objects.filter(validation=newest, status=states.FAILED, engine__in=("", engine))
    failed = failed.exclude(name__in=[check.name for check in catalogue.CATALOGUE if check.informs])
    return None if failed.exists() or not _launched(newest, engine) else newest


def _launched(validation: Validation, engine: str) -> bool:
    return validation.checks.filter(name=catalogue.LAUNCH, engine=engine, status=states.PASSED).exists()
