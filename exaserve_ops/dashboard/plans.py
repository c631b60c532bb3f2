"""What a change of a deployment would do, for people to read before they agree. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.reconcile import (
    Create,
    DeploymentSnapshot,
    LetGo,
    Place,
    ReplicaFacts,
    Step,
    Wait,
    plan_deployment,
)

MAX_SIMULATED = 512
"""More new replicas than this are counted, not placed one by one: nobody reads a longer list."""


@dataclass(frozen=True, slots=True)
class PlanLine:
    """One step in words: what happens (`verb`), to what, and why."""

    verb: str
    tone: str
    subject: str
    detail: str
    why: str


@dataclass(frozen=True, slots=True)
class PlanPreview:
    """The steps of a change, and how many of them there are of each kind."""

    lines: tuple[PlanLine, ...]
    created: int
    placed: int
    waiting: int
    let_go: int
    sessions_moved: int

    @property
    def is_empty(self) -> bool:
        """Whether nothing would happen."""
        return not self.lines


def preview_scale(snapshot: DeploymentSnapshot, replicas: int, *, now: datetime) -> PlanPreview:
    """Plan the deployment at another number of replicas, and place those that would be created."""
    return _preview(replace(snapshot, replicas_wanted=replicas), now)


def preview_deletion(snapshot: DeploymentSnapshot, *, now: datetime) -> PlanPreview:
    """Plan the end of the deployment."""
    return _preview(replace(snapshot, deleting=True), now)


def _preview(snapshot: DeploymentSnapshot, now: datetime) -> PlanPreview:
    steps = plan_deployment(snapshot, now=now)
    created = sum(step.count for step in steps if isinstance(step, Create))
    newcomers = tuple(_newcomer(i, now) for i in range(min(created, MAX_SIMULATED)))
    if newcomers:
        steps = plan_deployment(replace(snapshot, replicas=snapshot.replicas + newcomers), now=now)
    known = {r.id: r for r in (*snapshot.replicas, *newcomers)}
    lines = tuple(line for step in steps if (line := _line(step, known)) is not None)
    gone = [step for step in steps if isinstance(step, LetGo)]
    return PlanPreview(
        lines=lines,
        created=created,
        placed=sum(isinstance(step, Place) for step in steps),
        waiting=sum(isinstance(step, Wait) for step in steps),
        let_go=len(gone),
        sessions_moved=sum(known[step.replica_id].active_sessions for step in gone),
    )


def _newcomer(index: int, now: datetime) -> ReplicaFacts:
    name = f"new replica {index + 1}"
    return ReplicaFacts(f"new-{index:05d}", name, states.PENDING, "run", "", 0, now)


def _line(step: Step, known: dict[str, ReplicaFacts]) -> PlanLine | None:
    match step:
        case Place():
            verb = "create" if step.replica_id.startswith("new-") else "place"
            where = f"on {step.placement.node_name}"
            return PlanLine(verb, "good", known[step.replica_id].name, where, step.why)
        case Wait():
            return PlanLine("wait", "warn", known[step.replica_id].name, "fits nowhere", step.why)
        case LetGo():
            replica = known[step.replica_id]
            detail = f"{replica.status.replace('_', ' ')}, {replica.active_sessions} active sessions"
            return PlanLine(step.event, "bad", replica.name, detail, step.why)
        case Create():
            detail = "placed when there is room"
            return PlanLine("create", "good", f"{step.count} more replicas", detail, step.why)
        case _:
            return None
