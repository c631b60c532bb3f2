"""How much of what is seen may be by chance. Exact, and free of assumptions about distributions. Pure.

Two questions of a new release: do more of its requests fail than may, and do more of its answers take longer
than an order statistic of the old release's? The second one's count, by chance alone, has the negative
hypergeometric distribution whatever durations are distributed like: the theory of exceedances (Gumbel and
von Schelling, 1950), on which precedence tests rest (Balakrishnan and Ng, "Precedence-Type Tests and
Applications", 2006, chapter 2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

CONFIDENCE = 0.999
"""With which a gate of durations closes: it is looked at again and again while answers come in."""
MOST_TRIALS = 500
"""More answers than these add nothing to a verdict but the time it takes: their counts are scaled down."""
_NEGLIGIBLE = 1e-15


@dataclass(frozen=True, slots=True)
class Stratum:
    """New answers held against old ones of their kind: how many are above the old one's `rank`-th longest."""

    new: int
    above: int
    old: int
    rank: int
    """Counted from the longest, which is 1."""


def expected_above(strata: Sequence[Stratum]) -> float:
    """How many are above on average where both are distributed alike."""
    return sum(one.new * one.rank / (one.old + 1) for one in strata)


def most_above_by_chance(strata: Sequence[Stratum], confidence: float = CONFIDENCE) -> int:
    """The count that is exceeded with at most a probability of 1 - `confidence` where both are alike."""
    total = sum(one.new for one in strata)
    scale = min(1.0, MOST_TRIALS / total) if total else 1.0
    chances = [1.0]
    for one in strata:
        chances = _sum_of(chances, _chances_above(int(one.new * scale), one.old, one.rank))
    scaled = _most(chances, confidence)
    # So that `above > count` says the same of the answers as of those that they were scaled down to.
    return scaled if scale == 1.0 else math.ceil((scaled + 1) / scale) - 1


@lru_cache(maxsize=4096)
def _chances_above(new: int, old: int, rank: int) -> tuple[float, ...]:
    """Probability of each count from 0 on; what is left out at the end is negligible."""
    whole = _log_choose(new + old, new)
    found: list[float] = []
    for count in range(new + 1):
        ways = _log_choose(count + rank - 1, count) + _log_choose(new - count + old - rank, new - count)
        found.append(math.exp(ways - whole))
        if found[-1] < _NEGLIGIBLE and count > new * rank / (old + 1):
            break
    return tuple(found)


def _sum_of(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Probabilities of the sum of two counts."""
    total = [0.0] * (len(first) + len(second) - 1)
    for i, one in enumerate(first):
        if one > _NEGLIGIBLE:
            for j, other in enumerate(second):
                total[i + j] += one * other
    return total


def _most(chances: Sequence[float], confidence: float) -> int:
    above = 0.0
    for count in range(len(chances) - 1, -1, -1):
        above += chances[count]
        if above > 1.0 - confidence:
            return count
    return 0


@lru_cache(maxsize=4096)
def most_failures_by_chance(requests: int, ratio: float, confidence: float) -> int:
    """The count of failures that is exceeded with at most a probability of 1 - `confidence` at this ratio."""
    if ratio <= 0.0:
        return 0
    if ratio >= 1.0:
        return requests
    below = 0.0
    for count in range(requests + 1):
        log_chance = _log_choose(requests, count) + count * math.log(ratio)
        below += math.exp(log_chance + (requests - count) * math.log1p(-ratio))
        if below >= confidence:
            return count
    return requests


def _log_choose(many: int, few: int) -> float:
    return math.lgamma(many + 1) - math.lgamma(few + 1) - math.lgamma(many - few + 1)
