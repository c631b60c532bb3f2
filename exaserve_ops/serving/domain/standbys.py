"""Which replicas serve and which stand by, of those that there are. Pure.

A ready standby takes requests at once where a serving replica takes none. And where a changed wish leaves too
many of one role and too few of the other, those that there are change roles: what runs is neither let go nor
started anew for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.counting import FIRST_TO_GO, Count
from exaserve_ops.serving.domain.facts import SERVING, STANDBY, DeploymentSnapshot, ReplicaFacts
from exaserve_ops.serving.domain.steps import Promote, StandDown

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
_OF_NO_USE = (states.FAILED, states.UNREACHABLE)
"""What is so is let go where it is too many: it is worth no more than one that is made."""


def plan_promotions(
    kept: Iterable[ReplicaFacts], cover: Mapping[str, ReplicaFacts], snapshot: DeploymentSnapshot
) -> tuple[list[Promote], tuple[ReplicaFacts, ...]]:
    """Swap ready standbys with replicas that should serve and do not.

    Returns the promotions, and the replicas with their roles as they are after them. The one that is
    stood down stays: healed, it is the next standby. One whose replacement is on its way (`cover`)
    has its place taken already, by that replacement; one that is too many is missed by nobody. One that
    serves and still wakes makes way for a standby that is awake, as the one that it stood in for may be
    again.
    """
    kept = tuple(kept)
    # While the one that makes way in a rollout serves on, nobody is missing.
    rolling = {r.id for r in kept if r.roll is not None and r.status == states.READY}
    taken = frozenset(cover) | {r.id for r in kept if r.replaces in rolling}
    missing = [r for r in kept if r.role == SERVING and _is_missing(r, snapshot) and r.id not in taken]
    ready = [r for r in kept if r.role == STANDBY and _answers(r)]
    if not missing or not ready:
        return [], kept
    too_many = {r.id for r in Count(kept, cover, snapshot).surplus(SERVING)}
    missing = [r for r in missing if r.id not in too_many]
    missing.sort(key=lambda r: (_WORST_FIRST.index(r.status), r.name))
    promotions: list[Promote] = []
    roles: dict[str, str] = {}
    for absent, standby in zip(missing, _best_first(ready, kept), strict=False):
        if absent.status == states.READY and standby.sleeps:
            continue  # it would answer no sooner
        promotions.append(Promote(standby.id, absent.id, _why(standby, absent)))
        roles |= {standby.id: SERVING, absent.id: STANDBY}
    return promotions, _with_roles(kept, roles)


def plan_changed_roles(
    kept: tuple[ReplicaFacts, ...], cover: Mapping[str, ReplicaFacts], snapshot: DeploymentSnapshot
) -> tuple[list[Promote | StandDown], tuple[ReplicaFacts, ...]]:
    """Let standbys serve where serving ones are too few, and serving ones that are too many stand by.

    Returns the steps, and the replicas with their roles as they are after them. Ready standbys serve at once,
    and what is made is the next standby; others serve where they are too many. Of serving ones that are too
    many the best stand by, and the others go. One whose replacement stands by instead serves on until that
    is ready; one that stood by itself serves with its replacement.
    """
    count = Count(kept, cover, snapshot)
    lack, too_many = count.lack(SERVING), count.surplus(SERVING)
    if not lack and not too_many:
        return [], kept
    spare = len(count.surplus(STANDBY))
    best = _best_first(_useful(count.of(STANDBY)), kept)[:lack]
    rising = [r for place, r in enumerate(best) if place < spare or _answers(r)]
    falling = _useful(too_many)
    falling = falling[max(0, len(falling) - count.lack(STANDBY)) :]
    wanted = f"{snapshot.wanted(SERVING)} are to serve and {snapshot.wanted(STANDBY)} to stand by"
    promoted = [r for head in rising for r in count.pair(head) if r.role == STANDBY]
    steps: list[Promote | StandDown] = [
        Promote(r.id, "", f"{wanted}; this standby {_state(r)}") for r in promoted
    ]
    steps += [StandDown(r.id, f"{wanted}; {_idle(r)}") for r in falling]
    roles = dict.fromkeys([r.id for r in promoted], SERVING) | dict.fromkeys([r.id for r in falling], STANDBY)
    return steps, _with_roles(kept, roles)


def _with_roles(kept: Sequence[ReplicaFacts], roles: Mapping[str, str]) -> tuple[ReplicaFacts, ...]:
    return tuple(replace(r, role=roles[r.id]) if r.id in roles else r for r in kept)


def _useful(replicas: Iterable[ReplicaFacts]) -> list[ReplicaFacts]:
    return [r for r in replicas if r.status not in _OF_NO_USE]


def _best_first(standbys: Iterable[ReplicaFacts], kept: Collection[ReplicaFacts]) -> list[ReplicaFacts]:
    """Those that answer soonest, and fail together with the fewest that serve."""
    domains = Counter(_domain(r) for r in kept if r.role == SERVING and r.status == states.READY)
    return sorted(
        standbys,
        key=lambda r: (
            -FIRST_TO_GO[r.status],
            _on_drain(r),
            _is_suspect(r),
            r.sleeps,  # it answers some seconds later
            domains[_domain(r)],
            r.created_at,
            r.name,
        ),
    )


def _why(standby: ReplicaFacts, absent: ReplicaFacts) -> str:
    if absent.status == states.READY:
        return f"{absent.name} is not awake yet; this standby is"
    return f"{absent.name} is {absent.status.replace('_', ' ')}; this standby {_state(standby)}"


def _state(standby: ReplicaFacts) -> str:
    if standby.status != states.READY:
        return f"is {standby.status.replace('_', ' ')}"
    return "is woken" if standby.sleeps else "is ready"


def _idle(replica: ReplicaFacts) -> str:
    if replica.status != states.READY:
        return f"it is {replica.status.replace('_', ' ')}"
    moves = ", which move" if replica.active_sessions else ""
    return f"fewest active sessions ({replica.active_sessions}){moves}"


def _is_missing(replica: ReplicaFacts, snapshot: DeploymentSnapshot) -> bool:
    if replica.status == states.UNREACHABLE and snapshot.healing.frozen:
        return False  # perhaps it is we who do not see it
    return replica.status != states.READY or replica.sleeps


def _answers(standby: ReplicaFacts) -> bool:
    """Whether it could serve at once, or as soon as it is awake, and stays."""
    return standby.status == states.READY and not _on_drain(standby)


def _is_suspect(replica: ReplicaFacts) -> bool:
    return any(room.suspect for room in replica.rooms)


def _on_drain(replica: ReplicaFacts) -> bool:
    return replica.emptied is not None


def _domain(replica: ReplicaFacts) -> str:
    return "" if replica.node is None else replica.node.domain
