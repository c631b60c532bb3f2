"""What to do so that a deployment becomes what is wanted: a pure plan, with a why for each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.placement import (
    NodeRoom,
    Placement,
    PlacementRequest,
    Refusal,
    choose_placement,
)


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """One replica of the deployment, as recorded."""

    id: str
    name: str
    status: str
    wanted: str
    reason: str
    active_sessions: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class DeploymentSnapshot:
    """One deployment and everything that its plan depends on."""

    id: str
    name: str
    deleting: bool
    replicas_wanted: int
    request: PlacementRequest
    replicas: tuple[ReplicaFacts, ...]
    nodes: tuple[NodeRoom, ...]


@dataclass(frozen=True, slots=True)
class Create:
    """Make `count` new replicas."""

    count: int
    why: str


@dataclass(frozen=True, slots=True)
class Place:
    """Send a pending replica to a node."""

    replica_id: str
    placement: Placement

    @property
    def why(self) -> str:
        """Why this node."""
        return self.placement.why


@dataclass(frozen=True, slots=True)
class Wait:
    """A pending replica has nowhere to go."""

    replica_id: str
    why: str


@dataclass(frozen=True, slots=True)
class LetGo:
    """Drain, stop or cancel a replica: whichever its status calls for."""

    replica_id: str
    event: str
    """Lifecycle event: `drain`, `stop` or `cancel`."""
    why: str


@dataclass(frozen=True, slots=True)
class FinishDeletion:
    """The last replica of a deleted deployment is gone."""

    why: str = "no replica is left"


Step = Create | Place | Wait | LetGo | FinishDeletion

_VICTIM_ORDER = {
    status: rank
    for rank, status in enumerate(
        (
            states.PENDING,
            states.FAILED,
            states.UNREACHABLE,
            states.BACKING_OFF,
            states.PLACED,
            states.STARTING,
            states.LOADING,
            states.READY,
        )
    )
}


def plan_deployment(snapshot: DeploymentSnapshot) -> tuple[Step, ...]:
    """Compare wish and record, and return the steps in the order in which to take them.

    Those that serve nobody go first when there are too many; among the ready, the one with the
    fewest active sessions, then the newest. Pending replicas are placed oldest first.
    """
    kept = [r for r in snapshot.replicas if r.wanted == "run" and r.status != states.STOPPED]
    wanted = 0 if snapshot.deleting else snapshot.replicas_wanted
    victims = sorted(kept, key=_victim_rank)[: max(0, len(kept) - wanted)]
    steps: list[Step] = [_let_go(victim, snapshot, wanted) for victim in victims]
    gone = {victim.id for victim in victims}
    pending = [r for r in kept if r.status == states.PENDING and r.id not in gone]
    steps += _place(snapshot, sorted(pending, key=lambda r: (r.created_at, r.name)))
    if len(kept) < wanted:
        steps.append(Create(wanted - len(kept), f"{len(kept)} of {wanted} replicas exist"))
    if snapshot.deleting and all(r.status == states.STOPPED for r in snapshot.replicas):
        steps.append(FinishDeletion())
    return tuple(steps)


def _victim_rank(replica: ReplicaFacts) -> tuple[int, int, float, str]:
    return (
        _VICTIM_ORDER[replica.status],
        replica.active_sessions,
        -replica.created_at.timestamp(),
        replica.name,
    )


def _let_go(replica: ReplicaFacts, snapshot: DeploymentSnapshot, wanted: int) -> LetGo:
    why = "the deployment is deleted" if snapshot.deleting else f"scaled to {wanted}"
    if replica.status == states.PENDING:
        return LetGo(replica.id, "cancel", why)
    if replica.status == states.READY:
        why += f"; fewest active sessions ({replica.active_sessions})"
        return LetGo(replica.id, "drain", why)
    return LetGo(replica.id, "stop", f"{why}; it was {replica.status}")


def _place(snapshot: DeploymentSnapshot, pending: Sequence[ReplicaFacts]) -> list[Step]:
    steps: list[Step] = []
    rooms = {node.node_id: node for node in snapshot.nodes}
    for replica in pending:
        choice = choose_placement(snapshot.request, tuple(rooms.values()))
        if isinstance(choice, Refusal):
            # The same reason again is no news: the record keeps one row for one change.
            if replica.reason != choice.summary():
                steps.append(Wait(replica.id, choice.summary()))
            continue
        room = rooms[choice.node_id]
        rooms[choice.node_id] = room.reserve(choice.accelerator_uuids, snapshot.request.bytes_each)
        steps.append(Place(replica.id, choice))
    return steps
