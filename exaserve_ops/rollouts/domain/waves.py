"""Who makes way together: waves that start small, grow, and never cross a failure domain. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from exaserve_ops.rollouts.domain.policy import RolloutPolicy, resolve

CANARY = 1
"""Number of the first wave."""
NODE = "node "
"""Begins the failure domain of a node of which no rack is known."""


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
    """For people; several nodes of which no rack is known stand together."""
    domains: tuple[str, ...]
    """The failure domains themselves: one, or such nodes."""
    replica_ids: tuple[str, ...]
    soak_seconds: int
    needs_approval: bool
    why: str
    sessions: int = 0
    """Active ones, that have to go elsewhere."""
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Part:
    """What waves are cut from: a failure domain, or nodes that stand together."""

    domains: tuple[str, ...]
    candidates: list[Candidate]

    @property
    def name(self) -> str:
        """For people."""
        if len(self.domains) == 1:
            return self.domains[0]
        first, last = (name.removeprefix(NODE) for name in (self.domains[0], self.domains[-1]))
        return f"{len(self.domains)} nodes without a rack, {first} to {last}"


def plan_waves(
    candidates: Iterable[Candidate], policy: RolloutPolicy, *, begun: int = 0, width: int = 1
) -> tuple[PlannedWave, ...]:
    """Part candidates into waves; `begun` is how many waves there were before.

    The domain with the fewest replicas comes first, since what goes wrong there costs least; within it
    those with the fewest sessions, standbys last. The first wave is the canary, then sizes grow as the
    policy says, each bounded by what is left of the domain. A node of which no rack is known may fail by
    itself; as many of them stand together as hold the `width` replicas that may make way at once, so that
    hundreds of nodes are not hundreds of waves. Deterministic: ties go by name.
    """
    by_domain: defaultdict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        by_domain[candidate.domain].append(candidate)
    total = sum(map(len, by_domain.values()))
    waves: list[PlannedWave] = []
    for part in _parts(by_domain, width):
        left = sorted(part.candidates, key=lambda c: (c.is_standby, c.active_sessions, c.name))
        while left:
            number = begun + len(waves) + 1
            size = wave_size(policy, number, total)
            members, left = left[:size], left[size:]
            waves.append(_wave(number, part, members, policy))
    return tuple(waves)


def is_lone_node(domain: str) -> bool:
    """Whether a failure domain is a node of which no rack is known."""
    return domain.startswith(NODE)


def _parts(by_domain: Mapping[str, list[Candidate]], width: int) -> list[_Part]:
    """Racks one by one; nodes without one together, up to `width` replicas, whole nodes each."""
    parts: list[_Part] = []
    for domain in sorted(by_domain, key=lambda name: (len(by_domain[name]), name)):
        own, last = by_domain[domain], parts[-1] if parts else None
        joins = last is not None and is_lone_node(domain) and is_lone_node(last.domains[0])
        if last is not None and joins and len(last.candidates) + len(own) <= width:
            parts[-1] = _Part((*last.domains, domain), [*last.candidates, *own])
        else:
            parts.append(_Part((domain,), own))
    return parts


def wave_size(policy: RolloutPolicy, number: int, total: int) -> int:
    """How many replicas the wave of this number may have; `total`: all that are to make way."""
    if number == CANARY:
        return max(1, resolve(policy.canary, total))
    step = policy.growth[min(number - 2, len(policy.growth) - 1)]
    return max(1, resolve(step, total))


def _wave(number: int, part: _Part, members: list[Candidate], policy: RolloutPolicy) -> PlannedWave:
    is_canary = number == CANARY
    size = "the canary" if is_canary else f"{len(members)} at most at this stage"
    return PlannedWave(
        number=number,
        domain=part.name,
        domains=part.domains,
        replica_ids=tuple(c.replica_id for c in members),
        soak_seconds=policy.canary_soak_seconds if is_canary else policy.soak_seconds,
        needs_approval=number in policy.approve_waves,
        why=f"{size}, all in {part.name or 'no node yet'}",
        sessions=sum(c.active_sessions for c in members),
        nodes=tuple(sorted({c.node_name for c in members if c.node_name})),
    )
