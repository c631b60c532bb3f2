"""What a change of a deployment would do, for people to read before they agree. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.facts import STANDBY, DeploymentSnapshot, ReplicaFacts
from exaserve_ops.serving.domain.placement import NodeRoom
from exaserve_ops.serving.domain.reconcile import make_plan, plan_deployment
from exaserve_ops.serving.domain.steps import (
    Create,
    FinishDeletion,
    Hold,
    LetGo,
    Place,
    Promote,
    Quarantine,
    Replace,
    StandDown,
    Step,
    Wait,
)

MAX_SIMULATED = 512
"""More new replicas than this are counted, not placed one by one: nobody reads a longer list."""


MAX_LINES = 200
"""Steps beyond these are counted: a page of thousands of lines is of use to nobody."""
MAX_WAITING = 100


@dataclass(frozen=True, slots=True)
class PlanLine:
    """One step in words: what happens (`verb`), to what, and why."""

    verb: str
    tone: str
    subject: str
    detail: str
    why: str
    simulated: bool = False
    """Whether it happens on a simulated node."""


@dataclass(frozen=True, slots=True)
class PlanPreview:
    """The steps of a change, and how many of them there are of each kind."""

    lines: tuple[PlanLine, ...]
    created: int
    placed: int
    waiting: int
    let_go: int
    sessions_moved: int
    change_roles: int = 0
    """Standbys that are to serve, and serving ones that are to stand by."""
    more_lines: int = 0
    """Steps that are left out of `lines`."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing would happen."""
        return not self.lines


@dataclass(frozen=True, slots=True)
class PlanNow:
    """What is done now, and what is waited for."""

    lines: tuple[PlanLine, ...]
    waiting: tuple[PlanLine, ...]
    more_waiting: int
    """Left out, for nobody reads a longer list."""
    frozen: str
    """Why nothing is healed; empty where it is."""
    more_lines: int = 0
    """Steps that are left out of `lines`."""


def plan_now(snapshot: DeploymentSnapshot, *, now: datetime) -> PlanNow:
    """Return what the controllers do for a deployment as it is, in words."""
    plan = make_plan(snapshot, now=now)
    known = {r.id: r for r in snapshot.replicas}
    waiting = plan.waiting[:MAX_WAITING]
    lines, more_lines = _lines(plan.steps, known, snapshot.nodes)
    return PlanNow(
        lines=lines,
        more_lines=more_lines,
        waiting=tuple(_waiting_line(known[w.replica_id], w.why) for w in waiting),
        more_waiting=len(plan.waiting) - len(waiting),
        frozen=snapshot.healing.frozen,
    )


def preview_scale(
    snapshot: DeploymentSnapshot, replicas: int, *, now: datetime, standbys: int | None = None
) -> PlanPreview:
    """Plan the deployment at other numbers of replicas and standbys, and place what would be created."""
    wanted = snapshot.standbys_wanted if standbys is None else standbys
    return _preview(replace(snapshot, replicas_wanted=replicas, standbys_wanted=wanted), now)


def preview_deletion(snapshot: DeploymentSnapshot, *, now: datetime) -> PlanPreview:
    """Plan the end of the deployment."""
    return _preview(replace(snapshot, deleting=True), now)


def _preview(snapshot: DeploymentSnapshot, now: datetime) -> PlanPreview:
    steps = plan_deployment(snapshot, now=now)
    created = sum(step.count for step in steps if isinstance(step, Create))
    roles = [
        step.role for step in steps if isinstance(step, Create) for _ in range(min(step.count, MAX_SIMULATED))
    ]
    newcomers = tuple(_newcomer(i, role, now) for i, role in enumerate(roles[:MAX_SIMULATED]))
    if newcomers:
        steps = plan_deployment(replace(snapshot, replicas=snapshot.replicas + newcomers), now=now)
    known = {r.id: r for r in (*snapshot.replicas, *newcomers)}
    lines, more_lines = _lines(steps, known, snapshot.nodes)
    gone = [step for step in steps if isinstance(step, LetGo)]
    left = [step for step in steps if isinstance(step, LetGo | StandDown)]
    return PlanPreview(
        lines=lines,
        more_lines=more_lines,
        created=created,
        placed=sum(isinstance(step, Place) for step in steps),
        waiting=sum(isinstance(step, Wait) for step in steps),
        let_go=len(gone),
        sessions_moved=sum(known[step.replica_id].active_sessions for step in left),
        change_roles=sum(isinstance(step, Promote | StandDown) for step in steps),
    )


def _newcomer(index: int, role: str, now: datetime) -> ReplicaFacts:
    name = f"new {'standby' if role == STANDBY else 'replica'} {index + 1}"
    return ReplicaFacts(f"new-{index:05d}", name, states.PENDING, "run", "", 0, now, role=role)


def _waiting_line(replica: ReplicaFacts, why: str) -> PlanLine:
    tone = "warn" if replica.status in {states.PENDING, states.FAILED, states.UNREACHABLE} else "busy"
    simulated = replica.node is not None and replica.node.simulated
    return PlanLine("wait", tone, replica.name, replica.status.replace("_", " "), why, simulated)


def _lines(
    steps: Sequence[Step], known: Mapping[str, ReplicaFacts], nodes: Iterable[NodeRoom]
) -> tuple[tuple[PlanLine, ...], int]:
    """The first steps in words, and how many more there are."""
    simulated = {node.node_id for node in nodes if node.simulated}
    said = [(step, line) for step in steps if (line := _line(step, known)) is not None]
    lines = tuple(
        replace(line, simulated=_node_of(step, known) in simulated) for step, line in said[:MAX_LINES]
    )
    return lines, len(said) - len(lines)


def _node_of(step: Step, known: Mapping[str, ReplicaFacts]) -> str:
    """Id of the node where a step happens; empty where it has none."""
    if isinstance(step, Place | Replace):
        return step.placement.node_id
    if isinstance(step, Create | FinishDeletion):
        return ""
    node = known[step.replica_id].node
    return node.node_id if node is not None else ""


def _line(step: Step, known: Mapping[str, ReplicaFacts]) -> PlanLine | None:
    match step:
        case Place():
            verb = "create" if step.replica_id.startswith("new-") else "place"
            where = f"on {step.placement.where}"
            return PlanLine(verb, "good", known[step.replica_id].name, where, step.why)
        case Wait():
            return PlanLine("wait", "warn", known[step.replica_id].name, "fits nowhere", step.why)
        case LetGo():
            replica = known[step.replica_id]
            detail = f"{replica.status.replace('_', ' ')}, {replica.active_sessions} active sessions"
            return PlanLine(step.event, "bad", replica.name, detail, step.why)
        case Create():
            detail = "placed when there is room"
            noun = ("standby" if step.role == STANDBY else "replica") + ("s" if step.count != 1 else "")
            return PlanLine("create", "good", f"{step.count} more {noun}", detail, step.why)
        case Promote() | StandDown() | Replace() | Quarantine() | Hold():
            return _healing_line(step, known)
        case _:
            return None


def _healing_line(
    step: Promote | StandDown | Replace | Quarantine | Hold, known: Mapping[str, ReplicaFacts]
) -> PlanLine | None:
    name = known[step.replica_id].name
    match step:
        case Promote():
            swapped = f"instead of {known[step.instead_of].name}" if step.instead_of else "it is to serve"
            return PlanLine("promote", "good", name, swapped, step.why)
        case StandDown():
            sessions = f"{known[step.replica_id].active_sessions} active sessions"
            return PlanLine("stand down", "warn", name, f"becomes a standby, {sessions}", step.why)
        case Replace():
            return PlanLine("replace", "good", name, f"by a new one on {step.placement.where}", step.why)
        case Quarantine():
            return PlanLine("quarantine", "bad", ", ".join(step.accelerator_uuids), f"of {name}", step.why)
        case Hold():
            return PlanLine("hold", "warn", name, "is not healed now", step.why) if step.why else None
