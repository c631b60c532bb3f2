"""Who takes requests at once when a serving replica takes none: a ready standby. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.facts import SERVING, STANDBY, DeploymentSnapshot, ReplicaFacts
from exaserve_ops.serving.domain.steps import Promote

_WORST_FIRST = (
    states.UNREACHABLE,
    states.FAILED,
    states.BACKING_OFF,
    states.PENDING,
    states.PLACED,
    states.STARTING,
    states.LOADING,
    states.READY,  # and asleep or waking: it was a standby itself
)


def plan_promotions(
    kept: Iterable[ReplicaFacts], covered: Iterable[str], snapshot: DeploymentSnapshot
) -> tuple[list[Promote], tuple[ReplicaFacts, ...]]:
    """Swap ready standbys with replicas that should serve and do not.

    Returns the promotions, and the replicas with their roles as they are after them. The one that is
    stood down stays: healed, it is the next standby. One whose replacement is on its way (`covered`)
    has its place taken already, by that replacement. One that serves and still wakes makes way for a
    standby that is awake, as the one that it stood in for may be again.
    """
    kept = tuple(kept)
    # While the one that makes way in a rollout serves on, nobody is missing.
    rolling = {r.id for r in kept if r.roll is not None and r.status == states.READY}
    taken = frozenset(covered) | {r.id for r in kept if r.replaces in rolling}
    missing = [r for r in kept if r.role == SERVING and _is_missing(r, snapshot) and r.id not in taken]
    missing.sort(key=lambda r: (_WORST_FIRST.index(r.status), r.name))
    ready = [r for r in kept if r.role == STANDBY and r.status == states.READY and not _on_drain(r)]
    if not missing or not ready:
        return [], kept
    domains = Counter(_domain(r) for r in kept if r.role == SERVING and r.status == states.READY)
    # Whoever sleeps answers some seconds later.
    ready.sort(key=lambda r: (_is_suspect(r), r.sleeps, domains[_domain(r)], r.created_at, r.name))
    promotions: list[Promote] = []
    roles: dict[str, str] = {}
    for absent, standby in zip(missing, ready, strict=False):
        if absent.status == states.READY and standby.sleeps:
            continue  # it would answer no sooner
        promotions.append(Promote(standby.id, absent.id, _why(standby, absent)))
        roles |= {standby.id: SERVING, absent.id: STANDBY}
    return promotions, tuple(replace(r, role=roles[r.id]) if r.id in roles else r for r in kept)


def _why(standby: ReplicaFacts, absent: ReplicaFacts) -> str:
    if absent.status == states.READY:
        return f"{absent.name} is not awake yet; this standby is"
    is_there = "is woken" if standby.sleeps else "is ready"
    return f"{absent.name} is {absent.status.replace('_', ' ')}; this standby {is_there}"


def _is_missing(replica: ReplicaFacts, snapshot: DeploymentSnapshot) -> bool:
    if replica.status == states.UNREACHABLE and snapshot.healing.frozen:
        return False  # perhaps it is we who do not see it
    return replica.status != states.READY or replica.sleeps


def _is_suspect(replica: ReplicaFacts) -> bool:
    return any(room.suspect for room in replica.rooms)


def _on_drain(replica: ReplicaFacts) -> bool:
    return replica.emptied is not None


def _domain(replica: ReplicaFacts) -> str:
    return "" if replica.node is None else replica.node.domain
