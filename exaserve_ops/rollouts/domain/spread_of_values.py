"""Durations counted into buckets that grow by a tenth: small to keep, exact enough for percentiles. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

_LEAST_SECONDS = 0.0005
_GROWTH = 1.1
_LAST_BUCKET = 160
"""About 35 minutes."""

Buckets = Mapping[int, int]
"""Counts by bucket number."""


def bucket_of(seconds: float) -> int:
    """The bucket that a duration falls into."""
    if seconds <= _LEAST_SECONDS:
        return 0
    return min(_LAST_BUCKET, math.ceil(math.log(seconds / _LEAST_SECONDS, _GROWTH)))


def upper_seconds(bucket: int) -> float:
    """The longest duration of a bucket."""
    return float(_LEAST_SECONDS * _GROWTH**bucket)


def add_up(many: Iterable[Buckets]) -> dict[int, int]:
    """All counts together."""
    total: dict[int, int] = {}
    for buckets in many:
        for bucket, count in buckets.items():
            total[bucket] = total.get(bucket, 0) + count
    return total


def quantile_seconds(buckets: Buckets, share: float) -> float | None:
    """The duration below which this share of all lies; `None` of nothing. Up to a tenth too long."""
    total = sum(buckets.values())
    if not total:
        return None
    seen, last = 0, 0
    for bucket in sorted(buckets):
        seen, last = seen + buckets[bucket], bucket
        if seen >= share * total:
            break
    return upper_seconds(last)


def to_json(buckets: Buckets) -> dict[str, int]:
    """Give what the record keeps: JSON has text for names."""
    return {str(bucket): count for bucket, count in sorted(buckets.items())}


def from_json(kept: Mapping[str, int]) -> dict[int, int]:
    """Read what the record keeps."""
    return {int(bucket): int(count) for bucket, count in kept.items()}
