"""Three numbers of a deployment's memory, told apart: needed, reserved, and what is seen to be taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from exaserve_ops.serving.domain.engine_complaints import Complaint, read_complaint
from exaserve_ops.serving.domain.engine_launch import EngineLaunch, LaunchError, read_launch
from exaserve_ops.serving.domain.memory_plan import (
    AcceleratorMemory,
    MemoryPlan,
    ModelFigures,
    PlanUnknown,
    SequenceMix,
    plan_memory,
)
from exaserve_ops.serving.models import Deployment, Replica

TOLD_SECONDS = 10.0
"""Telemetry that is older says nothing about now."""
OVER_RATIO = 0.05
OVER_LEAST_BYTES = 128 << 20
"""Observed beyond what is reserved is told from the larger of both on: below, it is an interpreter's
libraries, and how tools and pages round."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What one replica takes."""

    replica: Replica
    bytes: int
    over_bytes: int
    """Beyond what is reserved; 0 if it keeps within."""


@dataclass(frozen=True, slots=True)
class DeploymentMemory:
    """The three numbers, each of one replica on all its accelerators."""

    plan: MemoryPlan | None
    unknown: str
    """Why there is no plan; empty if there is one."""
    needed_low_bytes: int | None
    needed_bytes: int | None
    reserved_bytes: int
    reserved_by: str
    observed: tuple[Observed, ...]
    complaint: Complaint | None
    """What an engine said when it ended for want of memory."""

    @property
    def verdict(self) -> str:
        """Of the plan; empty without one."""
        return self.plan.verdict if self.plan is not None else ""

    @property
    def observed_bytes(self) -> int | None:
        """Of the replica that takes most; `None` where none has told."""
        return None if self.most is None else self.most.bytes

    @property
    def most(self) -> Observed | None:
        """The replica that takes most."""
        return max(self.observed, key=lambda seen: seen.bytes, default=None)

    @property
    def over(self) -> list[Observed]:
        """Replicas that take clearly more than is reserved, the worst first."""
        beyond = [seen for seen in self.observed if seen.over_bytes]
        return sorted(beyond, key=lambda seen: -seen.over_bytes)


def memory_of(
    deployment: Deployment, replicas: Iterable[Replica], used_bytes: Mapping[str, int]
) -> DeploymentMemory:
    """Three numbers of a deployment; `replicas` with their accelerators, `used_bytes` by their ids."""
    rows = list(replicas)
    each = max(1, deployment.accelerators_per_replica)
    plan = _plan(deployment, rows, each)
    known = plan if isinstance(plan, MemoryPlan) else None
    reserved, rule = deployment.replica_memory_bytes, "memory per replica, as the deployment says"
    if known is not None and known.claim.bytes * each > reserved:
        reserved, rule = known.claim.bytes * each, known.claim.rule
    return DeploymentMemory(
        plan=known,
        unknown="" if known is not None else str(plan),
        needed_low_bytes=None if known is None else known.needed_low_bytes * each,
        needed_bytes=None if known is None else known.needed_bytes * each,
        reserved_bytes=reserved,
        reserved_by=rule,
        observed=tuple(_observed(rows, reserved, used_bytes)),
        complaint=next(filter(None, (read_complaint(row.exit_log_tail) for row in rows)), None),
    )


def _plan(deployment: Deployment, rows: list[Replica], each: int) -> MemoryPlan | str:
    try:
        launch = read_launch(deployment.engine, deployment.engine_options)
    except LaunchError as error:
        return str(error)
    room = _accelerator(rows)
    if room is None:
        return "no replica has been placed yet"
    model = deployment.model
    figures = ModelFigures(model.name, model.planning_config, model.weights_bytes)
    budget = deployment.replica_memory_bytes // each or None
    parts = each * deployment.nodes_per_replica
    plan = plan_memory(figures, _split(launch, parts), room, SequenceMix(1), budget_bytes=budget)
    return plan.reason if isinstance(plan, PlanUnknown) else plan


def _split(launch: EngineLaunch, accelerators: int) -> EngineLaunch:
    """An engine that is given several accelerators splits the model over them, unless told otherwise."""
    if launch.ways != 1 or accelerators == 1:
        return launch
    return replace(launch, kv=replace(launch.kv, tensor_parallel=accelerators))


def _accelerator(rows: list[Replica]) -> AcceleratorMemory | None:
    for row in rows:
        for accelerator in row.accelerators.all():
            return AcceleratorMemory(accelerator.memory_bytes, accelerator.kind)
    return None


def _observed(rows: list[Replica], reserved: int, used_bytes: Mapping[str, int]) -> Iterable[Observed]:
    for row in rows:
        used = used_bytes.get(str(row.pk))
        if used is not None:
            beyond = used - reserved if reserved else 0
            is_told = beyond > max(OVER_LEAST_BYTES, reserved * OVER_RATIO)
            yield Observed(row, used, beyond if is_told else 0)


def used_bytes_of(reports: Iterable[Mapping[str, Any]], *, now_seconds: float) -> dict[str, int]:
    """What replicas take by id, out of what nodes last told; without what is older than `TOLD_SECONDS`."""
    found: dict[str, int] = {}
    for report in reports:
        if now_seconds - (report.get("received_at") or 0) > TOLD_SECONDS:
            continue
        for replica_id, seen in report.get("replicas", {}).items():
            used = seen.get("memory_used_bytes")
            if used is not None:
                found[replica_id] = int(used)
    return found
