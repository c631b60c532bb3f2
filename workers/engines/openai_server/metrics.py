"""The engine's Prometheus page, under one prefix, from a registry of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from workers.engines.kv_blocks import BlockUse, PromptUse
from workers.engines.openai_server.tier_metrics import block_families, swap_families
from workers.kv.tiers.ports import TierFacts
from workers.protocol.digests import KV_BLOCK_TOKENS

PREFIX = "exaserve_engine"

_TTFT_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0,
    1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip  # a table reads better than a column
_ITL_SECONDS = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04,
    0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip  # a table reads better than a column
_REQUEST_SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 25.0, 50.0, 100.0, 200.0, 400.0,
)  # fmt: skip  # a table reads better than a column

OUTCOMES = ("stop", "length", "aborted", "error")


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine's load at one moment."""

    running: int = 0
    waiting: int = 0
    blocks: BlockUse | None = None
    """`None` while there is no pool yet."""
    evicted_blocks: int = 0
    """Since the start."""
    evicted_idle_since_seconds: float | None = None
    """Monotonic time since when the block that was evicted last had not been used."""
    tiers: TierFacts | None = None
    """`None`: the engine has no tiers below its blocks."""


class EngineMetrics:
    """Counters and histograms of one engine process; gauges are read from it at each scrape."""

    def __init__(self, read_load: Callable[[], EngineLoad]) -> None:
        """Make the registry; `read_load` is called once a scrape."""
        # They only repeat process_start_time_seconds.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the package has no type there
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(_LoadCollector(read_load))
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.prefix_query_tokens = self._counter(
            "prefix_cache_query_tokens", "Prompt tokens looked up in the prefix cache."
        )
        self._hit_tokens = Counter(
            f"{PREFIX}_prefix_cache_hit_tokens",
            "Prompt tokens found in the prefix cache, by tier.",
            ("tier",),
            registry=self.registry,
        )
        self._miss_tokens = Counter(
            f"{PREFIX}_prefix_cache_miss_tokens",
            "Prompt tokens not found in the prefix cache, by reason.",
            ("reason",),
            registry=self.registry,
        )
        self._count_prompt(PromptUse(0))
        self._preemptions = Counter(
            f"{PREFIX}_preemptions",
            "Requests set back for lack of blocks, by how they go on.",
            ("kind",),
            registry=self.registry,
        )
        self.count_preemptions(recompute=0, swap=0)
        self.session_requests = self._counter("session_requests", "Requests that named a session.")
        self._requests = Counter(
            f"{PREFIX}_requests", "Requests ended.", ("outcome",), registry=self.registry
        )
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to first token.", _TTFT_SECONDS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a request.", _ITL_SECONDS
        )
        self._queue_time = self._histogram(
            "request_queue_seconds", "From arrival to admission.", _TTFT_SECONDS
        )
        self._request_time = self._histogram(
            "e2e_request_seconds", "From arrival to the end.", _REQUEST_SECONDS
        )
        block_tokens = Gauge(f"{PREFIX}_kv_block_tokens", "Tokens in one KV block.", registry=self.registry)
        block_tokens.set(KV_BLOCK_TOKENS)

    def count_admission(self, *, queue_seconds: float, prompt_tokens: int, prompt: PromptUse) -> None:
        """Count a request's first admission; re-admission after preemption is not counted."""
        self._queue_time.observe(queue_seconds)
        self.prompt_tokens.inc(prompt_tokens)
        self.prefix_query_tokens.inc(prompt_tokens)
        self._count_prompt(prompt)

    def _count_prompt(self, prompt: PromptUse) -> None:
        """Hits of all tiers and misses of all reasons add up to the tokens looked up."""
        self._hit_tokens.labels("accelerator").inc(prompt.accelerator_tokens)
        self._hit_tokens.labels("host").inc(prompt.host_tokens)
        self._hit_tokens.labels("disk").inc(prompt.disk_tokens)
        self._miss_tokens.labels("no_shared_prefix").inc(prompt.unshared_tokens)
        self._miss_tokens.labels("shorter_than_a_block").inc(prompt.partial_tokens)
        self._miss_tokens.labels("evicted").inc(prompt.evicted_tokens)

    def count_preemptions(self, *, recompute: int, swap: int) -> None:
        """Count requests that were set back: those whose tokens are computed again, and those kept below."""
        self._preemptions.labels("recompute").inc(recompute)
        self._preemptions.labels("swap").inc(swap)

    def count_outcome(self, outcome: str, seconds: float) -> None:
        """Count the end of a request, one of `OUTCOMES`, and how long it took."""
        self._requests.labels(outcome).inc()
        self._request_time.observe(seconds)

    def describe_kv(self, *, dtype: str, block_bytes: int, attention: str, pool: str) -> None:
        """Say what keys and values are kept as and how they are attended to. Called once, when loaded."""
        about = Info(f"{PREFIX}_kv", "How keys and values are kept and read.", registry=self.registry)
        about.info({"dtype": dtype, "block_bytes": str(block_bytes), "attention": attention, "pool": pool})

    def page(self) -> bytes:
        """Return the page in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", text, buckets=bounds, registry=self.registry)


class _LoadCollector(Collector):
    """Reads the engine's load when the page is asked for, so a gauge can never be stale."""

    def __init__(self, read_load: Callable[[], EngineLoad]) -> None:
        self._read_load = read_load

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        load = self._read_load()
        yield GaugeMetricFamily(f"{PREFIX}_requests_running", "Requests being generated.", load.running)
        yield GaugeMetricFamily(f"{PREFIX}_requests_waiting", "Requests queued.", load.waiting)
        blocks = load.blocks
        if blocks is None:
            return  # still loading: no pool yet, and an empty pool is not an idle one
        yield GaugeMetricFamily(
            f"{PREFIX}_kv_used_ratio", "Part of the KV blocks in use.", blocks.used / blocks.total
        )
        yield from block_families(PREFIX, blocks, load.tiers)
        if load.tiers is not None:
            yield from swap_families(PREFIX, load.tiers)
        if load.evicted_idle_since_seconds is not None:
            yield GaugeMetricFamily(
                f"{PREFIX}_kv_evicted_idle_seconds",
                "How long ago the block evicted last had been used: what was used later is still cached.",
                max(0.0, time.monotonic() - load.evicted_idle_since_seconds),
            )
        yield CounterMetricFamily(
            f"{PREFIX}_kv_evicted_blocks", "Cached blocks given up for others' content.", load.evicted_blocks
        )
