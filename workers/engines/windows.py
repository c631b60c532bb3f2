"""From two scrapes of an engine to its load over the time between them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from workers.engines.base import EngineSample, Histogram
from workers.protocol.observed import ReplicaTelemetry

RESTART_NOTE = "engine restarted within the window"
FELL_NOTE = "counters fell: rates begin anew"
INTERLEAVED_NOTE = "several sources answer in turn: rates are of one of them"

_START_TOLERANCE_SECONDS = 1.0
"""Engines that compute their start from an age jitter a little; a restart moves it by more."""


@dataclass(frozen=True, slots=True)
class Quantile:
    """An estimate, and whether it is only a lower bound because it lies in the last bucket."""

    seconds: float
    is_lower_bound: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """The two samples that a window is measured between."""

    old: EngineSample | None
    """`None`: there is none that the newest may be compared with."""
    new: EngineSample
    seconds: float
    """Between the two."""
    note: str = ""


@dataclass(slots=True)
class _Source:
    """Samples that may be of one source: none of its counters ever fell."""

    samples: list[tuple[float, EngineSample]] = field(default_factory=list)

    @property
    def last(self) -> EngineSample:
        return self.samples[-1][1]

    def may_have(self, sample: EngineSample) -> bool:
        return not start_moved(self.last, sample) and not _counts_fell(self.last, sample)


def choose_span(samples: Sequence[tuple[float, EngineSample]]) -> Span:
    """Find what the newest of these samples, oldest first, may be compared with.

    Behind one port there may be several processes that each count for themselves, and each scrape meets
    another one. So samples are sorted into sources by their start and by counters that never fall; a
    source that is met again after another one gives the others away, and only its own samples are
    compared. One that is new for good is a restart: what the new life counted happened in the window, if
    the engine says when it began; else nothing is known of the time before.
    """
    sources: list[_Source] = []
    last: _Source | None = None
    interleaved = False
    for moment in samples:
        fitting = [source for source in sources if source.may_have(moment[1])]
        # The nearest: the one whose counters have the least to rise.
        source = max(fitting, key=lambda one: _size(one.last), default=None)
        interleaved |= source is not None and source is not last
        if source is None:
            source = _Source()
            sources.append(source)
        source.samples.append(moment)
        last = source
    if last is None:
        raise ValueError("no sample to look at")
    (first_at, first), (new_at, new) = last.samples[0], last.samples[-1]
    if interleaved or len(sources) == 1:
        old = first if len(last.samples) > 1 else None
        return Span(old, new, new_at - first_at, INTERLEAVED_NOTE if interleaved else "")
    oldest_at, oldest = samples[0]
    if start_moved(oldest, new):
        return Span(oldest, new, new_at - oldest_at)
    return Span(first if len(last.samples) > 1 else None, new, new_at - first_at, FELL_NOTE)


def _size(sample: EngineSample) -> float:
    return math.fsum(getattr(sample, name) or 0.0 for name in _COUNTERS)


def measure_window(
    old: EngineSample | None, new: EngineSample, *, seconds: float, age_seconds: float = 0.0
) -> ReplicaTelemetry:
    """Return gauges of `new`, and rates and quantiles of what happened between `old` and `new`.

    `seconds` is the time between the two samples, `age_seconds` how old `new` is by now. Across a
    restart all that `new` counted happened in the window, and `old` is of another life: it is not
    used at all. With no `old` there are no rates. A figure that cannot be told is `None`, never 0.
    """
    window = _Window(old, new, seconds)
    quantiles = {
        "ttft_p50_seconds": window.quantile("ttft", 0.50),
        "ttft_p95_seconds": window.quantile("ttft", 0.95),
        "ttft_p99_seconds": window.quantile("ttft", 0.99),
        "itl_p50_seconds": window.quantile("itl", 0.50),
        "itl_p95_seconds": window.quantile("itl", 0.95),
        "queue_p50_seconds": window.quantile("queue_time", 0.50),
        "queue_p95_seconds": window.quantile("queue_time", 0.95),
    }
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
        generation_tokens_per_second=_or_else(
            window.rate("generation_tokens"), new.generation_tokens_per_second, told=new.generation_tokens
        ),
        prefix_hit_ratio=_or_else(
            window.hit_ratio("prefix"), new.prefix_hit_ratio, told=new.prefix_query_tokens
        ),
        **{name: None if q is None else q.seconds for name, q in quantiles.items()},
        lower_bounds=tuple(name for name, q in quantiles.items() if q is not None and q.is_lower_bound),
        generation_tokens_total=new.generation_tokens,
        requests_total=new.requests_finished,
        prefix_query_tokens_total=new.prefix_query_tokens,
        prefix_hit_tokens_total=new.prefix_hit_tokens,
        notes=(*new.notes, RESTART_NOTE) if window.restarted else new.notes,
        kv_tiers=new.kv_tiers,
        kv_swaps=new.kv_swaps,
        kv_thrash_reason=new.kv_thrash_reason,
        prefix_miss_tokens_total=dict(new.prefix_miss_tokens),
        kv_evicted_idle_seconds=new.kv_evicted_idle_seconds,
        waiting_by_reason=_told(new.waiting_by_reason),
        sleep_state=new.sleep_state,
        kv_cached_tokens=new.kv_cached_tokens,
        kv_capacity_tokens=new.kv_capacity_tokens,
        kv_capacity_is_estimate=new.kv_capacity_is_estimate,
        external_hit_ratio=window.hit_ratio("external"),
        external_hit_tokens_total=new.external_hit_tokens,
        preemptions_total=new.preemptions,
        preemptions_per_second=window.rate("preemptions"),
        outcomes_total=_told(new.requests_by_outcome),
        connector_totals=_told(new.connector),
        generation_tokens_by_model=dict(new.generation_tokens_by_model),
    )


def _or_else(measured: float | None, gauge: float | None, *, told: float | None) -> float | None:
    """What was measured; an engine's own figure only where it does not count at all."""
    return gauge if measured is None and told is None else measured


def _told(counts: Mapping[str, float]) -> dict[str, float]:
    """Without zeros, which say no more than the total beside them and would fill every report."""
    return {name: count for name, count in counts.items() if count}


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
    "external_query_tokens",
    "external_hit_tokens",
    "preemptions",
)
_HISTOGRAMS = ("ttft", "itl", "queue_time")


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

    def hit_ratio(self, cache: str) -> float | None:
        queries, hits = self.delta(f"{cache}_query_tokens"), self.delta(f"{cache}_hit_tokens")
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


def start_moved(old: EngineSample, new: EngineSample) -> bool:
    """Whether both say when their process started, and that it was not the same."""
    if old.process_start_seconds is None or new.process_start_seconds is None:
        return False
    return abs(new.process_start_seconds - old.process_start_seconds) > _START_TOLERANCE_SECONDS


def _is_new_life(old: EngineSample, new: EngineSample) -> bool:
    """Whether the engine started anew between two samples: another start, or a count that fell."""
    if start_moved(old, new) or _counts_fell(old, new):
        return True
    return any(_histogram_fell(getattr(old, name), getattr(new, name)) for name in _HISTOGRAMS)


def _counts_fell(old: EngineSample, new: EngineSample) -> bool:
    return any(_fell(getattr(old, name), getattr(new, name)) for name in _COUNTERS)


def _fell(before: float | None, after: float | None) -> bool:
    return before is not None and after is not None and after < before


def _histogram_fell(before: Histogram | None, after: Histogram | None) -> bool:
    if before is None or after is None or before.bounds != after.bounds:
        return False
    return any(b < a for a, b in zip(before.counts, after.counts, strict=True))
