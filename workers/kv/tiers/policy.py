"""What is moved between tiers, and when: pure functions of what is there and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Tier = Literal["accelerator", "host", "disk"]
TIERS: tuple[Tier, ...] = ("accelerator", "host", "disk")
LowerTier = Literal["host", "disk"]
LOWER_TIERS: tuple[LowerTier, ...] = ("host", "disk")


@dataclass(frozen=True, slots=True)
class DemotionRules:
    """When cached blocks are copied down before anybody needs their place."""

    idle_seconds: float = 1.0
    """Content that was untouched for so long is copied down when places get scarce,"""
    long_idle_seconds: float = 10.0
    """and after so long in any case."""
    scarce_ratio: float = 0.25
    """Places are scarce when fewer than this part of them hold nothing."""
    batch_blocks: int = 16
    """At most so many at once: the step that does it is to stay short."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Cached content without a holder and without a copy further down."""

    digest: bytes
    idle_since_seconds: float


@dataclass(frozen=True, slots=True)
class Level:
    """How full a tier is, in blocks."""

    free: int
    total: int


def choose_demotions(
    level: Level, coldest_first: Sequence[Candidate], rules: DemotionRules, *, now: float
) -> tuple[bytes, ...]:
    """Return what to copy down now, the coldest first."""
    scarce = level.free < level.total * rules.scarce_ratio
    patience = rules.idle_seconds if scarce else rules.long_idle_seconds
    due = (c.digest for c in coldest_first if now - c.idle_since_seconds >= patience)
    return tuple(digest for digest, _ in zip(due, range(rules.batch_blocks), strict=False))


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds for one block, as measured; `None`: not measured of late, so that it is worth a try."""

    compute: float | None = None
    host: float | None = None
    disk: float | None = None

    def fetch(self, tier: LowerTier) -> float:
        """Seconds to bring a block back from a tier; 0 where that is to be found out."""
        return (self.host if tier == "host" else self.disk) or 0.0


def choose_fetch(run: Sequence[LowerTier], costs: Costs) -> int:
    """Return how many leading blocks of a run to fetch so that the request starts soonest.

    `run` names the tier of each next block of a prefix. What is not fetched is computed, and so is
    all behind it.
    """
    if costs.compute is None:
        return len(run)
    best, best_saved, saved = 0, 0.0, 0.0
    for count, tier in enumerate(run, 1):
        saved += costs.compute - costs.fetch(tier)
        if saved > best_saved:
            best, best_saved = count, saved
    return best


def is_swap_cheaper(blocks: int, tier: LowerTier, costs: Costs) -> bool:
    """Whether to keep a request's blocks in a tier and bring them back rather than compute them again."""
    if costs.compute is None:
        return True
    return blocks * costs.fetch(tier) * _BOTH_WAYS < blocks * costs.compute


_BOTH_WAYS = 2
"""Out and in again; out is taken to cost as much as in."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A cost in seconds a block, smoothed, and when it was last measured."""

    seconds_per_block: float
    measured_at_seconds: float


_SMOOTHING_UP, _SMOOTHING_DOWN = 0.1, 0.5
_OUTLIER_RATIO = 8.0
_SHORTEST_SECONDS = 1e-6
STALE_SECONDS = 60.0
"""A cost that was not measured for so long is found out anew: it may have changed."""


def update_rate(rate: Rate | None, seconds_per_block: float, *, now: float) -> Rate:
    """Return a rate with one more measurement in it.

    It rises slowly and falls quickly, and one measurement counts as 8 times the rate at most: what
    takes longer than usual was mostly held up by something else on the machine.
    """
    if rate is None or now - rate.measured_at_seconds > STALE_SECONDS:
        return Rate(seconds_per_block, now)
    mean = max(rate.seconds_per_block, _SHORTEST_SECONDS)
    sample = min(seconds_per_block, _OUTLIER_RATIO * mean)
    smoothing = _SMOOTHING_UP if sample > mean else _SMOOTHING_DOWN
    return Rate(mean + smoothing * (sample - mean), now)


def current_cost(rate: Rate | None, *, now: float) -> float | None:
    """Return what a rate says now; `None` if that is nothing."""
    if rate is None or now - rate.measured_at_seconds > STALE_SECONDS:
        return None
    return rate.seconds_per_block
