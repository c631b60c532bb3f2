"""What each engine takes of an accelerator by its flags, and what of that becomes KV memory.

The rules differ by engine and version, which is why sums that ignore them come out wrong by half a card.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from exaserve_ops.lib.units import size_text
from exaserve_ops.serving.domain.engine_launch import SGLANG, TORCH, EngineLaunch
from exaserve_ops.serving.domain.reservation import margin_bytes

VLLM_SHARE_BY_VERSION = (((0, 19), 0.92), ((0, 0), 0.9))
"""Default of `gpu_memory_utilization` from a version on."""
VLLM_COUNTS_ITSELF_SINCE = (0, 6, 5)
"""Before, the share was of all that is used on the card, by other processes, too."""
VLLM_CHECKS_FREE_SINCE = (0, 8)
"""From then on it refuses to start where less than its share is free."""
SGLANG_SHARE = 0.88
"""Of weights and KV, where `mem_fraction_static` is left out. SGLang computes 0.75 to 0.9 from the card."""
TORCH_OTHER_RATIO = 0.2
"""Part of a replica's budget that the built-in engine leaves to what is neither weights nor KV."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a replica takes of one accelerator because its flags say so."""

    bytes: int
    pool_low_bytes: int
    """KV memory with everything else at its highest."""
    pool_high_bytes: int
    rule: str
    """How the engine counts, for people."""
    problem: str = ""
    """Why it would not start; empty if it would."""


@dataclass(frozen=True, slots=True)
class ClaimFacts:
    """What a claim is made from."""

    total_bytes: int
    held_bytes: int
    """By others, when the replica starts."""
    weights_bytes: int
    other_low_bytes: int
    """Neither weights nor KV, at its lowest and highest."""
    other_high_bytes: int
    block_bytes: int
    """One block of KV memory."""
    budget_bytes: int | None = None
    """What the deployment sets aside, if it says so."""

    @property
    def free_bytes(self) -> int:
        """Left by others."""
        return max(0, self.total_bytes - self.held_bytes)

    @property
    def fixed_high_bytes(self) -> int:
        """All but KV, at its highest."""
        return self.weights_bytes + self.other_high_bytes

    @property
    def fixed_low_bytes(self) -> int:
        """All but KV, at its lowest."""
        return self.weights_bytes + self.other_low_bytes


def claim_of(launch: EngineLaunch, facts: ClaimFacts) -> Claim:
    """What this launch takes of one accelerator."""
    told = _told_pool(launch, facts)
    if told is not None:
        rule = f"KV memory as told, {size_text(told)}, with weights and overhead beside it"
        if launch.engine == TORCH and facts.budget_bytes is not None:
            rule = f"the deployment's memory per replica; KV memory as told, {size_text(told)}"
            return Claim(facts.budget_bytes, told, told, rule)
        return Claim(facts.fixed_high_bytes + told, told, told, rule)
    if launch.engine == TORCH:
        return _torch(facts)
    if launch.engine == SGLANG:
        return _sglang(launch, facts)
    return _vllm(launch, facts)


def default_share(launch: EngineLaunch) -> float:
    """Share that the engine takes if the launch names none."""
    if launch.engine == SGLANG:
        return SGLANG_SHARE
    if not launch.version:
        return VLLM_SHARE_BY_VERSION[0][1]
    return next(share for since, share in VLLM_SHARE_BY_VERSION if launch.version >= since)


def torch_budget(weights_bytes: int, kv_bytes: int) -> int:
    """Memory to set aside for a replica of the built-in engine, so that it has so much KV memory."""
    return ceil((weights_bytes + kv_bytes) / (1 - TORCH_OTHER_RATIO)) + 1


def _told_pool(launch: EngineLaunch, facts: ClaimFacts) -> int | None:
    if launch.kv_blocks is not None:
        return launch.kv_blocks * facts.block_bytes
    return launch.kv_bytes


def _vllm(launch: EngineLaunch, facts: ClaimFacts) -> Claim:
    """A share of the whole card. What of it is neither weights nor overhead becomes KV memory."""
    ratio = launch.share_ratio or default_share(launch)
    share = int(ratio * facts.total_bytes)
    rule = f"gpu_memory_utilization {ratio:g} of {size_text(facts.total_bytes)}"
    problem = ""
    if launch.version and launch.version < VLLM_COUNTS_ITSELF_SINCE:
        share = max(0, share - facts.held_bytes)
        rule += ", less what other processes hold: this version counts them"
    elif share > facts.free_bytes and (not launch.version or launch.version >= VLLM_CHECKS_FREE_SINCE):
        problem = (
            f"{size_text(facts.free_bytes)} are free and its share is {size_text(share)}: it refuses to start"
        )
    return Claim(
        share, max(0, share - facts.fixed_high_bytes), max(0, share - facts.fixed_low_bytes), rule, problem
    )


def _sglang(launch: EngineLaunch, facts: ClaimFacts) -> Claim:
    """A share of what is free at start, for weights and KV alone; overhead comes out of the rest."""
    ratio = launch.share_ratio or default_share(launch)
    static = int(ratio * facts.free_bytes)
    rest = facts.free_bytes - static
    pool = max(0, static - facts.weights_bytes)
    if launch.kv_tokens is not None:
        pool = min(pool, launch.kv_tokens * facts.block_bytes // launch.block_tokens)
    free = size_text(facts.free_bytes)
    rule = f"mem_fraction_static {ratio:g} of the {free} that are free, overhead beside it"
    problem = ""
    if facts.other_low_bytes > rest:
        other = size_text(facts.other_low_bytes)
        problem = f"{size_text(rest)} are left beside its share, and overhead takes {other}"
    claimed = min(facts.free_bytes, facts.weights_bytes + pool + facts.other_high_bytes)
    return Claim(max(static if launch.kv_tokens is None else 0, claimed), pool, pool, rule, problem)


def _torch(facts: ClaimFacts) -> Claim:
    """Its budget, a fifth of which is left to overhead. Without one: what is free, less the margin."""
    if facts.budget_bytes is None:
        budget = max(0, facts.free_bytes - margin_bytes(facts.total_bytes))
        rule = "what is free, less the margin that is never planned with"
    else:
        budget = facts.budget_bytes
        rule = f"the deployment's memory per replica, {size_text(budget)}"
    pool = max(0, int(budget * (1 - TORCH_OTHER_RATIO)) - facts.weights_bytes)
    return Claim(budget, pool, pool, f"{rule}, a fifth of it for overhead")
