"""What a rollout would do and whether it can, before anything runs. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from exaserve_ops.rollouts.domain.policy import RolloutPolicy, resolve
from exaserve_ops.rollouts.domain.view import IN_PLACE, SURGE
from exaserve_ops.rollouts.domain.waves import Candidate, PlannedWave, plan_waves


@dataclass(frozen=True, slots=True)
class ReleaseContent:
    """What a release runs, for comparing and for showing."""

    number: int
    model_id: str
    model_name: str
    engine: str
    engine_options: Mapping[str, object]
    replica_memory_bytes: int


@dataclass(frozen=True, slots=True)
class PreflightFacts:
    """All that a plan is made from."""

    deployment: str
    wanted: int
    old: ReleaseContent
    new: ReleaseContent
    candidates: tuple[Candidate, ...]
    surge_room: int
    """How many more replicas of the new release fit now; counted up to what the policy would use."""
    no_surge_why: str
    """Why not one more than that fits."""
    misfits: tuple[str, ...] = ()
    """Places of old replicas that a new one does not fit in once the old one is gone, and why."""
    obstacles: tuple[str, ...] = ()
    """What else forbids it."""
    bytes_to_bring: Mapping[str, int] = field(default_factory=dict)
    """Weights that nodes do not have yet, by node name."""
    full_disks: tuple[str, ...] = ()
    """Nodes whose disk has no room for them, and why."""
    start_seconds: float = 60.0
    drain_seconds: float = 60.0
    bring_bytes_per_second: float = float(100 << 20)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What it costs, roughly."""

    seconds: float
    bytes_to_bring: int
    """Over all nodes together."""
    replicas: int
    sessions: int
    """Active conversations that go to another replica, and are computed again there."""


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """The plan as people confirm it."""

    old: ReleaseContent
    new: ReleaseContent
    mode: str
    surge: int
    unavailable: int
    waves: tuple[PlannedWave, ...]
    estimate: Estimate
    warnings: tuple[str, ...]
    refusals: tuple[str, ...]
    """Why it cannot begin; empty where it can."""
    digest: str
    """Names what is confirmed: the same plan has the same one."""


def plan_rollout(facts: PreflightFacts, policy: RolloutPolicy) -> RolloutPlan:
    """Plan a rollout with what is known now; the same facts give the same plan."""
    surge = resolve(policy.max_surge, facts.wanted)
    unavailable = resolve(policy.max_unavailable, facts.wanted)
    mode = SURGE if surge and facts.surge_room else IN_PLACE
    warnings: list[str] = []
    if mode == IN_PLACE and facts.candidates:
        unavailable = max(1, unavailable)
        warnings.append(_capacity_warning(facts, surge, unavailable))
    elif mode == SURGE and facts.surge_room < surge:
        warnings.append(
            f"There is room for {facts.surge_room} more at a time, not for {surge}: it takes longer. "
            f"{facts.no_surge_why}"
        )
    # By what is chosen, not by what room there happens to be: the plan that was read is the one that runs.
    together = surge if mode == SURGE else unavailable
    waves = plan_waves(facts.candidates, policy, width=together)
    warnings += _nodes_together(waves, together)
    width = min(surge, facts.surge_room) if mode == SURGE else unavailable
    refusals = _refusals(facts, mode)
    return RolloutPlan(
        old=facts.old,
        new=facts.new,
        mode=mode,
        surge=surge,
        unavailable=unavailable,
        waves=waves,
        estimate=_estimate(facts, policy, waves, max(1, width)),
        warnings=tuple(warnings),
        refusals=refusals,
        digest=_digest(facts, policy, mode, waves),
    )


def _refusals(facts: PreflightFacts, mode: str) -> tuple[str, ...]:
    found = list(facts.obstacles)
    if mode == IN_PLACE and facts.misfits:
        more = f"; and {len(facts.misfits) - 3} more" if len(facts.misfits) > 3 else ""  # noqa: PLR2004 - as listed
        found.append(
            f"The new release does not fit where the old one runs: {'; '.join(facts.misfits[:3])}{more}"
        )
    if facts.full_disks:
        found.append(f"No room on disk for its weights: {'; '.join(facts.full_disks[:3])}")
    return tuple(found)


def _capacity_warning(facts: PreflightFacts, surge: int, unavailable: int) -> str:
    why = facts.no_surge_why if surge else "No surge is allowed."
    share = unavailable / facts.wanted if facts.wanted else 0.0
    return (
        f"No room for one more replica: each old one drains before its successor starts, {unavailable} at a "
        f"time, so the deployment has up to {share:.0%} less capacity all the while. {why}"
    )


def _nodes_together(waves: Sequence[PlannedWave], width: int) -> list[str]:
    most = max((len(wave.domains) for wave in waves), default=0)
    if most <= 1:
        return []
    told = (
        f"No racks are known, so each node is taken to fail by itself: up to {most} nodes make way in one "
        f"wave, as many as hold the {width} replicas that may make way at once. Tell nodes their racks, and "
        "waves end where racks do."
    )
    return [told]


def _estimate(
    facts: PreflightFacts, policy: RolloutPolicy, waves: tuple[PlannedWave, ...], width: int
) -> Estimate:
    seconds = 0.0
    for wave in waves:
        rounds = -(-len(wave.replica_ids) // width)
        leave = min(policy.sessions_wait_seconds, 10.0) if wave.sessions else 0.0
        drain = facts.drain_seconds if wave.sessions else 0.0
        brought = max((facts.bytes_to_bring.get(node, 0) for node in wave.nodes), default=0)
        seconds += rounds * (facts.start_seconds + leave + drain) + wave.soak_seconds
        seconds += brought / facts.bring_bytes_per_second
    return Estimate(
        seconds=round(seconds, 1),
        bytes_to_bring=sum(facts.bytes_to_bring.values()),
        replicas=len(facts.candidates),
        sessions=sum(candidate.active_sessions for candidate in facts.candidates),
    )


def _digest(facts: PreflightFacts, policy: RolloutPolicy, mode: str, waves: tuple[PlannedWave, ...]) -> str:
    """Of what was shown, less what moves by itself: who has how many sessions, and room for how many."""
    shape = [(wave.number, wave.domain, len(wave.replica_ids), wave.needs_approval) for wave in waves]
    content = (facts.deployment, facts.old, sorted(facts.new.engine_options.items()), facts.new.model_id)
    text = repr((content, facts.new.engine, facts.new.replica_memory_bytes, policy, mode, shape))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
