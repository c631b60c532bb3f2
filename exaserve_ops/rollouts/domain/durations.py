"""Whether a new release's answers take longer than the old one's, told apart from chance. Pure.

Answers are compared with answers of their kind: streamed or whole, and by how many tokens of the prompt had
to be computed. A conversation that was moved is computed anew on its new replica, which is not the release's
fault; so it is held against old answers that computed as much, or against none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from exaserve_ops.rollouts.domain.chance import Stratum, expected_above, most_above_by_chance
from exaserve_ops.rollouts.domain.spread_of_values import Buckets, bucket_of, upper_seconds

P95 = 0.95
LEAST_OLD = 5
"""Old answers of a kind that are too few to say how long its answers take."""
_UPPER_TOKENS = (64, 256, 1024, 4096, 16384)
_MORE, _UNKNOWN, _ARRIVED = "more", "unknown", "arrived"

ByKind = Mapping[str, Buckets]
"""Durations by kind of answer, see `kind_of`."""


def kind_of(*, streamed: bool, computed_tokens: int | None, arrived: bool = False) -> str:
    """The kind of an answer: how it was given, and how many tokens of its prompt were computed, about.

    Where nobody says so (`None`), all that is known is whether the conversation has `arrived` from elsewhere.
    """
    how = "stream" if streamed else "whole"
    if computed_tokens is None:
        return f"{how}:{_ARRIVED if arrived else _UNKNOWN}"
    return f"{how}:{next((str(upper) for upper in _UPPER_TOKENS if computed_tokens <= upper), _MORE)}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """New answers beside old ones of their kind."""

    compared: int = 0
    """New answers that there were old ones of their kind to hold against."""
    compared_old: int = 0
    left_out: int = 0
    """New answers of kinds of which there were too few old ones."""
    above: int = 0
    """Of those compared, how many took longer than the limit of their kind."""
    expected: float = 0.0
    """How many would, on average, of a release that is as slow as the limit allows."""
    by_chance: int = 0
    """How many may by chance, of such a release."""
    limits_seconds: tuple[float, ...] = ()
    """Of each kind that was compared, in rising order."""

    @property
    def is_worse(self) -> bool:
        """Whether so many above are no chance."""
        return self.above > self.by_chance

    @property
    def is_well(self) -> bool:
        """Whether there are no more above than are to be expected."""
        return self.above <= math.ceil(self.expected)


def compare(new: ByKind, old: ByKind, *, most_ratio: float, floor_seconds: float) -> Comparison:
    """Hold new answers against `most_ratio` times the old p95 of their kind, or a floor above that.

    A duration counts as above only if its whole bucket is, which errs on the side of the release.
    """
    strata: list[Stratum] = []
    limits: list[float] = []
    left_out = compared_old = 0
    for kind in sorted({*new, *old}):
        own, others = new.get(kind, {}), old.get(kind, {})
        new_count, old_count = sum(own.values()), sum(others.values())
        if old_count < LEAST_OLD:
            left_out += new_count
            continue
        compared_old += old_count
        if new_count:
            rank = old_count - math.ceil(P95 * old_count) + 1
            limit = max(most_ratio * upper_seconds(_longest(others, rank)), floor_seconds)
            last = bucket_of(limit)
            above = sum(count for bucket, count in own.items() if bucket > last)
            strata.append(Stratum(new_count, above, old_count, rank))
            limits.append(limit)
    return Comparison(
        compared=sum(one.new for one in strata),
        compared_old=compared_old,
        left_out=left_out,
        above=sum(one.above for one in strata),
        expected=expected_above(strata),
        by_chance=most_above_by_chance(strata),
        limits_seconds=tuple(sorted(limits)),
    )


def _longest(buckets: Buckets, rank: int) -> int:
    """Bucket of the `rank`-th longest."""
    seen, found = 0, 0
    for bucket in sorted(buckets, reverse=True):
        seen, found = seen + buckets[bucket], bucket
        if seen >= rank:
            break
    return found
