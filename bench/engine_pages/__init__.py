"""Metrics pages of engines to measure with: vLLM's as it came from one, SGLang's made of documented names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_VLLM_PAGE = Path(__file__).with_name("vllm-0.32.0.prom")
_WHOLE = re.compile(r" ([0-9]+)\.0$", re.MULTILINE)
_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_GAUGES = (
    *("num_running_reqs", "num_queue_reqs", "num_paused_reqs", "num_retracted_reqs", "token_usage"),
    *("utilization", "cache_hit_rate", "gen_throughput", "num_used_tokens", "kv_used_tokens"),
    *("kv_available_tokens", "kv_evictable_tokens", "max_total_num_tokens", "page_size", "num_pages"),
    *("hicache_host_used_tokens", "hicache_host_total_tokens", "num_streaming_sessions"),
    *("streaming_session_held_tokens", "num_prefill_bootstrap_queue_reqs"),
    *("num_decode_transfer_queue_reqs", "startup_time_seconds", "weight_memory_usage_gb"),
    *("kv_cache_memory_usage_gb", "routing_keys_active"),
)
_RATIOS = ("token_usage", "utilization", "cache_hit_rate")
_COUNTERS = (
    *("num_requests_total", "num_aborted_requests_total", "prompt_tokens_total", "generation_tokens_total"),
    *("evicted_tokens_total", "load_back_tokens_total", "prefetched_tokens_total", "backuped_tokens_total"),
)
_HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("queue_time_seconds", "kv_transfer_latency_ms", "kv_transfer_speed_gb_s"),
)


def vllm_pages(count: int) -> list[str]:
    """The page of vLLM 0.32 on a CPU after some requests, and so many as it might have come later."""
    page = _VLLM_PAGE.read_text(encoding="utf-8")
    return [_later(page, number) for number in range(count)]


def _later(page: str, number: int) -> str:
    return _WHOLE.sub(lambda found: f" {int(found[1]) + number}.0", page)


def sglang_pages(count: int, *, tensor_ranks: int = 4) -> list[str]:
    """Pages of SGLang 0.5.23 with hierarchical cache, by the names that it documents."""
    return ["\n".join([*_sglang_lines(n, tensor_ranks), ""]) for n in range(count)]


def _sglang_lines(number: int, tensor_ranks: int) -> Iterator[str]:
    ranks = [
        f'engine_type="unified",model_name="Qwen/Qwen3-32B",moe_ep_rank="0",pp_rank="0",tp_rank="{rank}"'
        for rank in range(tensor_ranks)
    ]
    for kind, names in (("gauge", _GAUGES), ("counter", _COUNTERS)):
        for at, name in enumerate(names):
            yield f"# HELP sglang:{name} {name.replace('_', ' ').capitalize()}."
            yield f"# TYPE sglang:{name} {kind}"
            value = 0.25 + number / 100 if name in _RATIOS else float(at + number)
            yield from (f"sglang:{name}{{{labels}}} {value}" for labels in ranks)
    yield "# TYPE sglang:cached_tokens_total counter"
    for source in ("device", "host", "storage"):
        yield f'sglang:cached_tokens_total{{cache_source="{source}",{ranks[0]}}} {float(number)}'
    for name in _HISTOGRAMS:
        yield f"# HELP sglang:{name} Histogram of {name.replace('_', ' ')}."
        yield f"# TYPE sglang:{name} histogram"
        labels = ranks[0]
        yield f"sglang:{name}_sum{{{labels}}} {12.5 + number}"
        for at, bound in enumerate(_BUCKETS):
            yield f'sglang:{name}_bucket{{le="{bound}",{labels}}} {float(at * 10 + number)}'
        yield f'sglang:{name}_bucket{{le="+Inf",{labels}}} {float(300 + number)}'
        yield f"sglang:{name}_count{{{labels}}} {float(300 + number)}"
