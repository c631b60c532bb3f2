"""vLLM's metrics page in this project's terms, whatever the version."""

from __future__ import annotations

from collections.abc import Mapping

from workers.engines.base import EngineSample
from workers.engines.metric_table import PROCESS_START, Figures, Kind, Metric, MetricTable, Name, name_page

_EVERY = "all"
_V1 = "0.8 and later"
_MOST_DIGITS = 15


def _count(*names: Name) -> Metric:
    return Metric(Kind.COUNT, names)


def _histogram(*names: Name) -> Metric:
    return Metric(Kind.HISTOGRAM, names)


_CONNECTOR: Mapping[str, Metric] = {
    "nixl transfers": _count(Name("vllm:nixl_xfer_time_seconds_count", "0.11 and later")),
    "nixl bytes": _count(Name("vllm:nixl_bytes_transferred_sum", "0.11 and later")),
    "nixl failed transfers": _count(Name("vllm:nixl_num_failed_transfers_total", "0.12 and later")),
    "nixl failed notices": _count(Name("vllm:nixl_num_failed_notifications_total", "0.12 and later")),
    "nixl expired requests": _count(Name("vllm:nixl_num_kv_expired_reqs_total", "0.13 and later")),
    "offload bytes loaded": _count(Name("vllm:kv_offload_load_bytes_total", "0.30 and later")),
    "offload bytes stored": _count(Name("vllm:kv_offload_store_bytes_total", "0.30 and later")),
    "offload stores skipped": _count(Name("vllm:kv_offload_stores_skipped_total", "0.30 and later")),
    "offload without room": _count(Name("vllm:kv_offload_allocation_failure_total", "0.30 and later")),
    "offload blocks loaded": _count(Name("vllm:simple_kv_offload_load_blocks_total", "0.30 and later")),
    "mooncake bytes": _count(Name("vllm:mooncake_store_operation_bytes_total", "0.30 and later")),
    "mooncake failed keys": _count(Name("vllm:mooncake_store_operation_failed_keys_total", "0.30 and later")),
}

TABLE = MetricTable(
    engine="vLLM",
    metrics={
        "requests_running": _count(Name("vllm:num_requests_running", _EVERY)),
        "requests_waiting": _count(Name("vllm:num_requests_waiting", _EVERY)),
        "waiting_by_reason": _count(Name("vllm:num_requests_waiting_by_reason", "0.20 and later")),
        "sleep_state": Metric(Kind.LABELS, (Name("vllm:engine_sleep_state", "0.11 and later"),)),
        "kv_used_ratio": Metric(
            Kind.RATIO,
            (
                Name("vllm:kv_cache_usage_perc", "0.10 and later"),
                Name("vllm:gpu_cache_usage_perc", "to 0.11"),
            ),
        ),
        "cache_config": Metric(Kind.LABELS, (Name("vllm:cache_config_info", _EVERY),)),
        "prefix_query_tokens": _count(
            Name("vllm:prefix_cache_queries_total", "0.10 and later"),
            Name("vllm:gpu_prefix_cache_queries_total", "0.8 to 0.11"),
            Name("vllm:gpu_prefix_cache_queries", "0.7"),
        ),
        "prefix_hit_tokens": _count(
            Name("vllm:prefix_cache_hits_total", "0.10 and later"),
            Name("vllm:gpu_prefix_cache_hits_total", "0.8 to 0.11"),
            Name("vllm:gpu_prefix_cache_hits", "0.7"),
        ),
        "prefix_hit_ratio": Metric(
            Kind.RATIO, (Name("vllm:gpu_prefix_cache_hit_rate", "to 0.9, engine V0"),)
        ),
        "external_query_tokens": _count(Name("vllm:external_prefix_cache_queries_total", "0.11 and later")),
        "external_hit_tokens": _count(Name("vllm:external_prefix_cache_hits_total", "0.11 and later")),
        "prompt_tokens": _count(Name("vllm:prompt_tokens_total", _EVERY)),
        "generation_tokens": _count(Name("vllm:generation_tokens_total", _EVERY)),
        "generation_tokens_per_second": _count(
            Name("vllm:avg_generation_throughput_toks_per_s", "to 0.9, engine V0")
        ),
        "requests_by_outcome": _count(Name("vllm:request_success_total", _EVERY)),
        "rejections": _count(Name("vllm:admission_rejections_total", "0.30 and later")),
        "preemptions": _count(Name("vllm:num_preemptions_total", _EVERY)),
        "ttft": _histogram(Name("vllm:time_to_first_token_seconds", _EVERY)),
        "itl": _histogram(
            Name("vllm:inter_token_latency_seconds", "0.11 and later"),
            Name("vllm:time_per_output_token_seconds", "to 0.12"),
        ),
        "queue_time": _histogram(Name("vllm:request_queue_time_seconds", _V1)),
        **_CONNECTOR,
    },
    # Each series says which engine (rank of data parallelism) it is of; ranks of other kinds tell nothing.
    replicated=(),
    strangers={
        "vllm:healthy_pods_total": "a router",
        "vllm:current_qps": "a router",
        "vllm_router": "a router",
        "smg_": "a router",
        "sgl_router_": "a router",
        "sglang:": "SGLang",
        "sglang_": "SGLang",
        "exaserve_engine_": "an engine of this project",
    },
)
_reader = TABLE.make_reader()


def parse_metrics(page: str) -> EngineSample:
    """Read a page. What it does not say is `None`; a bad line is dropped and noted, the rest is used."""
    found = _reader.read(page)
    told = Figures(TABLE, found)
    waiting_by_reason = told.by_label("waiting_by_reason", "reason")
    waiting = told.whole("requests_waiting")
    if waiting is None and waiting_by_reason:
        waiting = round(sum(waiting_by_reason.values()))
    blocks, block_tokens, is_estimate = _blocks(told)
    ttft, itl, queue_time = (told.histogram(what) for what in ("ttft", "itl", "queue_time"))
    odd = name_page(page, found, TABLE)
    return EngineSample(
        process_start_seconds=found.find_value(PROCESS_START),
        requests_running=told.whole("requests_running"),
        requests_waiting=waiting,
        waiting_by_reason=waiting_by_reason,
        sleep_state=_sleep_state(told),
        kv_used_ratio=told.ratio("kv_used_ratio"),
        kv_total_blocks=blocks,
        kv_block_tokens=block_tokens,
        kv_capacity_tokens=None if blocks is None or block_tokens is None else blocks * block_tokens,
        kv_capacity_is_estimate=is_estimate,
        prefix_query_tokens=told.total("prefix_query_tokens"),
        prefix_hit_tokens=told.total("prefix_hit_tokens"),
        prefix_hit_ratio=told.ratio("prefix_hit_ratio"),
        external_query_tokens=told.total("external_query_tokens"),
        external_hit_tokens=told.total("external_hit_tokens"),
        prompt_tokens=told.total("prompt_tokens"),
        generation_tokens=told.total("generation_tokens"),
        generation_tokens_by_model=told.models("generation_tokens"),
        generation_tokens_per_second=told.total("generation_tokens_per_second"),
        requests_finished=told.total("requests_by_outcome"),
        requests_by_outcome=_outcomes(told),
        preemptions=told.total("preemptions"),
        connector=told.present(_CONNECTOR),
        ttft=ttft,
        itl=itl,
        queue_time=queue_time,
        notes=(*told.notes, odd) if odd else tuple(told.notes),
    )


def _outcomes(told: Figures) -> dict[str, float]:
    outcomes = told.by_label("requests_by_outcome", "finished_reason")
    rejected = told.total("rejections")
    return outcomes if rejected is None else {**outcomes, "rejected": rejected}


def _sleep_state(told: Figures) -> str:
    """What the engine says of its sleep; of several engines, of one that is not awake."""
    states = {labels.get("sleep_state", "") for labels in told.labels("sleep_state")} - {""}
    return min(states - {"awake"} or states, default="")


def _blocks(told: Figures) -> tuple[int | None, int | None, bool]:
    """Blocks of all engines together, tokens of one, and whether that is no more than an estimate.

    Of a model with layers of several kinds the label `block_size` need not be what attention uses;
    newer versions say that beside it.
    """
    configs = told.labels("cache_config")
    counts = [_whole(labels.get("num_gpu_blocks", "")) for labels in configs]
    blocks = sum(count for count in counts if count is not None) if any(counts) else None
    for labels in configs:
        effective = _whole(labels.get("effective_attention_block_size", ""))
        if effective is not None:
            return blocks, effective, False
        size = _whole(labels.get("block_size", ""))
        if size is not None:
            return blocks, size, blocks is not None
    return blocks, None, False


def _whole(text: str) -> int | None:
    """Return the number of a label; `None` where it says `None`, or what can be none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None
