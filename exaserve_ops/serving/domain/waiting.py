"""What is still to come for each replica, in words: a plan also says what it does not do. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.facts import DeploymentSnapshot, ReplicaFacts
from exaserve_ops.serving.domain.steps import Create, FinishDeletion, Hold, Step, Wait, Waiting

_ON_ITS_WAY = {
    states.PENDING: "a node with room",
    states.PLACED: "its agent launches it",
    states.STARTING: "its process opens its port",
    states.LOADING: "the engine loads its weights",
    states.BACKING_OFF: "its agent starts it again",
    states.STOPPING: "its process group must be gone; its memory is reserved until then",
}


def find_waiting(
    snapshot: DeploymentSnapshot,
    holds: Mapping[str, str],
    cover: Mapping[str, ReplicaFacts],
    steps: Iterable[Step],
) -> tuple[Waiting, ...]:
    """Return one line for each replica for which something is to come that is no step of the plan.

    `holds` says why replicas are not healed now, `cover` who takes whose place.
    """
    acted_on = {
        step.replica_id for step in steps if not isinstance(step, Create | FinishDeletion | Hold | Wait)
    }
    found = []
    for replica in snapshot.replicas:
        is_told = replica.id in holds or replica.id in cover
        if replica.id in acted_on or (replica.status == states.READY and not is_told):
            continue
        why = holds.get(replica.id) or _of_pair(replica, cover) or _of_status(replica)
        if why:
            found.append(Waiting(replica.id, why))
    return tuple(found)


def _of_pair(replica: ReplicaFacts, cover: Mapping[str, ReplicaFacts]) -> str:
    successor = cover.get(replica.id)
    if successor is None:
        return ""
    return f"{successor.name} takes its place and is {successor.status.replace('_', ' ')}; it goes once ready"


def _of_status(replica: ReplicaFacts) -> str:
    if replica.status == states.DRAINING:
        until = replica.drain_deadline_at
        what = (
            "its open requests end" if replica.is_handed_over else "its sessions move, then its requests end"
        )
        return what + (f", until {until:%H:%M:%S} UTC at most" if until else "")
    if replica.waits_to_start:
        return replica.reason if replica.reason.startswith("wait") else "its turn to start"
    expected = _ON_ITS_WAY.get(replica.status, "")
    if not expected:
        return ""
    return f"{expected}: {replica.reason}" if replica.reason else expected
