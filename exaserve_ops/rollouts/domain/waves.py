"""Who makes way together: waves that start small, grow, and never cross a failure domain. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from exaserve_ops.rollouts.domain.policy import RolloutPolicy, resolve

CANARY = 1
"""Number of the first wave."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica of the old release."""

    replica_id: str
    name: str
    domain: str
    """What fails together with it, such as `rack r7`; empty where it has no node yet."""
    node_name: str = ""
    active_sessions: int = 0
    is_standby: bool = False


@dataclass(frozen=True, slots=True)
class PlannedWave:
    """Replicas of one failure domain that make way before the next wave begins."""

    number: int
    domain: str
    replica_ids: tuple[str, ...]
    soak_seconds: int
    needs_approval: bool
    why: str
    sessions: int = 0
    """Active ones, that have to go elsewhere."""
    nodes: tuple[str, ...] = ()


def plan_waves(
    candidates: Iterable[Candidate], policy: RolloutPolicy, *, begun: int = 0
) -> tuple[PlannedWave, ...]:
    """Part candidates into waves; `begun` is how many waves there were before.

    The domain with the fewest replicas comes first, since what goes wrong there costs least; within it
    those with the fewest sessions, standbys last. The first wave is the canary, then sizes grow as the
    policy says, each bounded by what is left of the domain. Deterministic: ties go by name.
    """
    by_domain: defaultdict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        by_domain[candidate.domain].append(candidate)
    total = sum(map(len, by_domain.values()))
    waves: list[PlannedWave] = []
    for domain in sorted(by_domain, key=lambda name: (len(by_domain[name]), name)):
        left = sorted(by_domain[domain], key=lambda c: (c.is_standby, c.active_sessions, c.name))
        while left:
            number = begun + len(waves) + 1
            size = wave_size(policy, number, total)
            members, left = left[:size], left[size:]
            waves.append(_wave(number, domain, members, policy))
    return tuple(waves)


def wave_size(policy: RolloutPolicy, number: int, total: int) -> int:
    """How many replicas the wave of this number may have; `total`: all that are to make way."""
    if number == CANARY:
        return max(1, resolve(policy.canary, total))
    step = policy.growth[min(number - 2, len(policy.growth) - 1)]
    return max(1, resolve(step, total))


def _wave(number: int, domain: str, members: list[Candidate], policy: RolloutPolicy) -> PlannedWave:
    is_canary = number == CANARY
    size = "the canary" if is_canary else f"{len(members)} at most at this stage"
    return PlannedWave(
        number=number,
        domain=domain,
        replica_ids=tuple(c.replica_id for c in members),
        soak_seconds=policy.canary_soak_seconds if is_canary else policy.soak_seconds,
        needs_approval=number in policy.approve_waves,
        why=f"{size}, all in {domain or 'no node yet'}",
        sessions=sum(c.active_sessions for c in members),
        nodes=tuple(sorted({c.node_name for c in members if c.node_name})),
    )
