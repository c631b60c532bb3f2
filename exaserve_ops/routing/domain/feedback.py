"""How much new work each replica is given: a weight from what its engine reported lately. Pure.

Each report is folded into an exponential average with a time constant of three seconds, so that the
last nine seconds carry 95 % of the weight: a shorter window flaps with every long prompt, a longer one
notices trouble late. The weight is what the *worst* of four signs allows, and that sign is its reason.
What an engine does not report takes no part: unknown is neutral, neither good nor bad.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

FULL = 1.0

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class FeedbackPolicy:
    """What the signs do to a weight."""

    time_constant_seconds: float = 3.0
    least_weight: float = 0.1
    """Of a replica that is not ejected: some work goes there, or nobody would see that it is well again."""
    kv_knee_ratio: float = 0.75
    """Up to here memory is no concern; from here the weight falls to its least at a full pool."""
    ttft_tolerance: float = 1.25
    """Times the median of its peers that a TTFT may be before it counts."""
    slow_start_seconds: float = 20.0
    """A new replica has cold caches and kernels: its weight rises to the full over this time."""
    eject_ttft_times: float = 5.0
    """Times the median from which a replica gets no new work at all."""
    eject_share: float = 0.34
    """Most of a group that may be ejected, whatever the signs: never all of it."""
    least_peers: int = 4
    """With fewer known TTFTs nobody is compared with anybody."""
    ttft_floor_seconds: float = 0.05
    """Differences below it are nobody's concern."""


class Reading(NamedTuple):
    """One report of a replica's load; `None` is unknown."""

    kv_used_ratio: float | None = None
    requests_running: float | None = None
    requests_waiting: float | None = None
    ttft_p50_seconds: float | None = None


class Average(NamedTuple):
    """Readings so far, the newest counting most."""

    at_seconds: float
    value: Reading
    first_seconds: float
    """When the replica was first heard of."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A replica's share of new work against a well one's, 0-1, and the sign that set it."""

    value: float
    why: str = ""


_WELL = Weight(FULL)


def fold(average: Average | None, reading: Reading, now: float, policy: FeedbackPolicy) -> Average:
    """Take one more report in. `now` is monotonic; an unknown value leaves the average of it as it is."""
    if average is None:
        return Average(now, reading, now)
    keep = math.exp(-max(0.0, now - average.at_seconds) / policy.time_constant_seconds)
    folded = [
        old if new is None else new if old is None else keep * old + (1.0 - keep) * new
        for old, new in zip(average.value, reading, strict=True)
    ]
    return Average(now, Reading(*folded), average.first_seconds)


def weigh_group(averages: Mapping[K, Average], now: float, policy: FeedbackPolicy) -> dict[K, Weight]:
    """Return the weight of each replica of one deployment, by its key, compared with its peers."""
    known = [a.value.ttft_p50_seconds for a in averages.values() if a.value.ttft_p50_seconds is not None]
    median = statistics.median(known) if len(known) >= policy.least_peers else None
    weights = {name: _weigh(average, median, now, policy) for name, average in averages.items()}
    for name in _ejected(averages, median, policy):
        weights[name] = Weight(0.0, f"ejected: TTFT {policy.eject_ttft_times:g} times its peers' or more")
    return weights


def _weigh(average: Average, median: float | None, now: float, policy: FeedbackPolicy) -> Weight:
    value = average.value
    age = now - average.first_seconds
    signs = (
        (_by_memory(value, policy), "KV memory is nearly full"),
        (_by_queue(value), "requests queue"),
        (_by_ttft(value, median, policy), "TTFT is above its peers'"),
        (age / policy.slow_start_seconds if policy.slow_start_seconds else FULL, "started a moment ago"),
    )
    share, why = min(signs)
    if share >= FULL:
        return _WELL
    return Weight(max(share, policy.least_weight), why)


def _by_memory(value: Reading, policy: FeedbackPolicy) -> float:
    used = value.kv_used_ratio
    if used is None or used <= policy.kv_knee_ratio:
        return FULL
    return (1.0 - used) / (1.0 - policy.kv_knee_ratio)


def _by_queue(value: Reading) -> float:
    """Share of its requests that it serves at once."""
    if not value.requests_waiting:
        return FULL
    running = max(value.requests_running or 0.0, 1.0)
    return running / (running + value.requests_waiting)


def _by_ttft(value: Reading, median: float | None, policy: FeedbackPolicy) -> float:
    ttft = value.ttft_p50_seconds
    if ttft is None or median is None or ttft - median <= policy.ttft_floor_seconds:
        return FULL
    return min(FULL, policy.ttft_tolerance * median / ttft)


def _ejected(averages: Mapping[K, Average], median: float | None, policy: FeedbackPolicy) -> Iterable[K]:
    """The slowest of those that are far too slow, as many as may be."""
    if median is None:
        return ()
    limit = max(median * policy.eject_ttft_times, median + policy.ttft_floor_seconds)
    slow = [
        (-average.value.ttft_p50_seconds, str(name), name)
        for name, average in averages.items()
        if average.value.ttft_p50_seconds is not None and average.value.ttft_p50_seconds >= limit
    ]
    most = int(len(averages) * policy.eject_share)
    return [name for _, _, name in sorted(slow, key=lambda entry: entry[:2])[:most]]
