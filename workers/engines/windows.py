"""From two scrapes of an engine to its load over the time between them. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from workers.engines.base import EngineSample, Histogram
from workers.protocol.observed import ReplicaTelemetry

RESTART_NOTE = "engine restarted within the window"

_START_TOLERANCE_SECONDS = 1.0
"""Engines that compute their start from an age jitter a little; a restart moves it by more."""


@dataclass(frozen=True, slots=True)
class Quantile:
    """An estimate, and whether it is only a lower bound because it lies in the last bucket."""

    seconds: float
    is_lower_bound: bool = False


def measure_window(
    old: EngineSample | None, new: EngineSample, *, seconds: float, age_seconds: float = 0.0
) -> ReplicaTelemetry:
    """Return gauges of `new`, and rates and quantiles of what happened between `old` and `new`.

    `seconds` is the time between the two samples, `age_seconds` how old `new` is by now. Across a
    restart all that `new` counted happened in the window, and `old` is of another life: it is not
    used at all. With no `old` there are no rates. A figure that cannot be told is `None`, never 0.
    """
    notes = list(new.notes)
    window = _Window(old, new, seconds)
    if window.restarted:
        notes.append(RESTART_NOTE)
    quantiles = {
        "ttft_p50_seconds": window.quantile("ttft", 0.50),
        "ttft_p95_seconds": window.quantile("ttft", 0.95),
        "ttft_p99_seconds": window.quantile("ttft", 0.99),
        "itl_p50_seconds": window.quantile("itl", 0.50),
        "itl_p95_seconds": window.quantile("itl", 0.95),
    }
    notes += [
        f"{name} is at least this: beyond the last bucket"
        for name, quantile in quantiles.items()
        if quantile is not None and quantile.is_lower_bound
    ]
    return ReplicaTelemetry(
        window_seconds=max(seconds, 0.0) if old is not None else 0.0,
        age_seconds=age_seconds,
        requests_running=new.requests_running,
        requests_waiting=new.requests_waiting,
        kv_used_ratio=new.kv_used_ratio,
        kv_total_blocks=new.kv_total_blocks,
        kv_block_tokens=new.kv_block_tokens,
        requests_per_second=window.rate("requests_finished"),
        prompt_tokens_per_second=window.rate("prompt_tokens"),
        generation_tokens_per_second=window.rate("generation_tokens"),
        prefix_hit_ratio=window.hit_ratio(),
        **{name: None if q is None else q.seconds for name, q in quantiles.items()},
        generation_tokens_total=new.generation_tokens,
        requests_total=new.requests_finished,
        prefix_query_tokens_total=new.prefix_query_tokens,
        prefix_hit_tokens_total=new.prefix_hit_tokens,
        notes=tuple(notes),
        kv_tiers=new.kv_tiers,
        kv_swaps=new.kv_swaps,
        kv_thrash_reason=new.kv_thrash_reason,
        prefix_miss_tokens_total=dict(new.prefix_miss_tokens),
        kv_evicted_idle_seconds=new.kv_evicted_idle_seconds,
    )


def estimate_quantile(histogram: Histogram, rank: float) -> Quantile | None:
    """Quantile of a histogram, `rank` from 0 to 1, linear within a bucket; `None` if it is empty.

    In the last bucket, which has no end, the answer is the highest finite bound.
    """
    count = histogram.counts[-1] if histogram.counts else 0.0
    if count <= 0:
        return None
    target = rank * count
    lower_bound, below = 0.0, 0.0
    for bound, cumulative in zip(histogram.bounds, histogram.counts, strict=True):
        if cumulative >= target and cumulative > below:
            if math.isinf(bound):
                return Quantile(lower_bound, is_lower_bound=True)
            inside = (target - below) / (cumulative - below)
            return Quantile(lower_bound + (bound - lower_bound) * inside)
        lower_bound, below = bound, cumulative
    return None


_COUNTERS = (
    "prefix_query_tokens",
    "prefix_hit_tokens",
    "prompt_tokens",
    "generation_tokens",
    "requests_finished",
)
_HISTOGRAMS = ("ttft", "itl")


class _Window:
    """The difference of two samples of one life, or the whole of a new life."""

    def __init__(self, old: EngineSample | None, new: EngineSample, seconds: float) -> None:
        self._new = new
        self._seconds = seconds
        self._comparable = old is not None and seconds > 0
        self.restarted = old is not None and _is_new_life(old, new)
        self._old = None if self.restarted else old

    def delta(self, name: str) -> float | None:
        after: float | None = getattr(self._new, name)
        if not self._comparable or after is None or self._old is None:
            return after if self._comparable else None
        before: float | None = getattr(self._old, name)
        return None if before is None else after - before

    def rate(self, name: str) -> float | None:
        delta = self.delta(name)
        return None if delta is None else delta / self._seconds

    def hit_ratio(self) -> float | None:
        queries, hits = self.delta("prefix_query_tokens"), self.delta("prefix_hit_tokens")
        if queries is None or hits is None or queries <= 0:
            return None
        return min(hits / queries, 1.0)

    def quantile(self, name: str, rank: float) -> Quantile | None:
        histogram = self._histogram_delta(name)
        return None if histogram is None else estimate_quantile(histogram, rank)

    def _histogram_delta(self, name: str) -> Histogram | None:
        after: Histogram | None = getattr(self._new, name)
        if not self._comparable or after is None or self._old is None:
            return after if self._comparable else None
        before: Histogram | None = getattr(self._old, name)
        if before is None or before.bounds != after.bounds:
            return None
        counts = tuple(b - a for a, b in zip(before.counts, after.counts, strict=True))
        return Histogram(after.bounds, counts, after.total - before.total)


def _is_new_life(old: EngineSample, new: EngineSample) -> bool:
    """Whether the engine started anew between two samples: another start, or a count that fell."""
    if old.process_start_seconds is not None and new.process_start_seconds is not None:
        moved = abs(new.process_start_seconds - old.process_start_seconds)
        if moved > _START_TOLERANCE_SECONDS:
            return True
    if any(_fell(getattr(old, name), getattr(new, name)) for name in _COUNTERS):
        return True
    return any(_histogram_fell(getattr(old, name), getattr(new, name)) for name in _HISTOGRAMS)


def _fell(before: float | None, after: float | None) -> bool:
    return before is not None and after is not None and after < before


def _histogram_fell(before: Histogram | None, after: Histogram | None) -> bool:
    if before is None or after is None or before.bounds != after.bounds:
        return False
    return any(b < a for a, b in zip(before.counts, after.counts, strict=True))
