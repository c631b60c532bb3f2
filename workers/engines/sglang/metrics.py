"""SGLang's metrics page in this project's terms, whatever the version."""

from __future__ import annotations

from collections.abc import Mapping

from workers.engines.base import EngineSample
from workers.engines.metric_table import PROCESS_START, Figures, Kind, Metric, MetricTable, Name, name_page
from workers.protocol.observed import KvTier

_EVERY = "all"
_GATEWAY = "behind a gateway that writes _ for :"


def _metric(kind: Kind, *names: tuple[str, str], scale: float = 1.0) -> Metric:
    """Both spellings of each name: collectors that allow no colon write an underscore."""
    spelled = (
        Name(f"sglang{mark}{name}", versions if mark == ":" else f"{versions}, {_GATEWAY}", scale)
        for name, versions in names
        for mark in (":", "_")
    )
    return Metric(kind, tuple(spelled))


def _count(name: str, versions: str = _EVERY) -> Metric:
    return _metric(Kind.COUNT, (name, versions))


_CONNECTOR: Mapping[str, Metric] = {
    "transfers": _count("kv_transfer_latency_ms_count", "0.5 and later"),
    "seconds in transfer": _metric(Kind.COUNT, ("kv_transfer_latency_ms_sum", "0.5 and later"), scale=0.001),
    "tokens loaded back": _count("load_back_tokens_total", "0.5 and later"),
    "tokens prefetched": _count("prefetched_tokens_total", "0.5 and later"),
    "tokens backed up": _count("backuped_tokens_total", "0.5 and later"),
    "tokens evicted": _count("evicted_tokens_total", "0.5 and later"),
}

TABLE = MetricTable(
    engine="SGLang",
    metrics={
        "requests_running": _count("num_running_reqs"),
        "requests_waiting": _count("num_queue_reqs"),
        "paused": _count("num_paused_reqs", "0.5 and later"),
        "retracted": _count("num_retracted_reqs", "0.5 and later"),
        "prefill_bootstrap": _count("num_prefill_bootstrap_queue_reqs", "0.5 and later"),
        "decode_transfer": _count("num_decode_transfer_queue_reqs", "0.5 and later"),
        "kv_used_ratio": _metric(Kind.RATIO, ("token_usage", _EVERY)),
        "kv_capacity_tokens": _count("max_total_num_tokens"),
        "kv_used_tokens": _metric(
            Kind.COUNT, ("kv_used_tokens", "0.5.10 and later"), ("num_used_tokens", _EVERY)
        ),
        "kv_block_tokens": _metric(Kind.SAME, ("page_size", "0.5 and later")),
        "host_used_tokens": _count("hicache_host_used_tokens", "0.5 and later"),
        "host_total_tokens": _count("hicache_host_total_tokens", "0.5 and later"),
        "prefix_hit_tokens": _count("cached_tokens_total", "0.4 and later"),
        "prefix_hit_ratio": _metric(Kind.RATIO, ("cache_hit_rate", "all; percent before 0.4")),
        "prompt_tokens": _count("prompt_tokens_total"),
        "generation_tokens": _count("generation_tokens_total"),
        "generation_tokens_per_second": _count("gen_throughput"),
        "requests_finished": _count("num_requests_total", "0.4 and later"),
        "aborted": _count("num_aborted_requests_total", "0.5 and later"),
        "ttft": _metric(Kind.HISTOGRAM, ("time_to_first_token_seconds", _EVERY)),
        "itl": _metric(
            Kind.HISTOGRAM,
            ("inter_token_latency_seconds", "0.4.4 and later"),
            ("time_per_output_token_seconds", "to 0.5"),
        ),
        "queue_time": _metric(Kind.HISTOGRAM, ("queue_time_seconds", "0.5 and later")),
        **_CONNECTOR,
    },
    replicated=("tp_rank", "pp_rank", "moe_ep_rank", "ep_rank", "attn_tp_rank", "attn_cp_rank"),
    strangers={
        "smg_": "a router",
        "sgl_router_": "a router",
        "vllm:": "vLLM",
        "exaserve_engine_": "an engine of this project",
    },
)
_WAITING = ("paused", "retracted", "prefill_bootstrap", "decode_transfer")
_reader = TABLE.make_reader()


def parse_metrics(page: str) -> EngineSample:
    """Read a page. What it does not say is `None`; a bad line is dropped and noted, the rest is used."""
    found = _reader.read(page)
    told = Figures(TABLE, found)
    capacity = told.whole("kv_capacity_tokens")
    # Pages of one token are what it has where none are asked for; before it told their size, too.
    block_tokens = told.whole("kv_block_tokens") or (None if capacity is None else 1)
    hits, prompt_tokens = told.total("prefix_hit_tokens"), told.total("prompt_tokens")
    ttft, itl, queue_time = (told.histogram(what) for what in ("ttft", "itl", "queue_time"))
    aborted = told.total("aborted")
    kv_used_ratio, prefix_hit_ratio = told.ratio("kv_used_ratio"), told.ratio("prefix_hit_ratio")
    odd = name_page(page, found, TABLE)
    return EngineSample(
        process_start_seconds=found.find_value(PROCESS_START),
        requests_running=told.whole("requests_running"),
        requests_waiting=told.whole("requests_waiting"),
        waiting_by_reason=told.present(_WAITING),
        kv_used_ratio=kv_used_ratio,
        kv_total_blocks=None if capacity is None or block_tokens is None else capacity // block_tokens,
        kv_block_tokens=block_tokens,
        kv_capacity_tokens=capacity,
        kv_tiers=_tiers(told, capacity, block_tokens),
        # All tokens of a prompt are looked for; only those found are counted by themselves.
        prefix_query_tokens=None if hits is None else prompt_tokens,
        prefix_hit_tokens=hits,
        prefix_hit_ratio=prefix_hit_ratio,
        prompt_tokens=prompt_tokens,
        generation_tokens=told.total("generation_tokens"),
        generation_tokens_by_model=told.models("generation_tokens"),
        generation_tokens_per_second=told.total("generation_tokens_per_second"),
        requests_finished=told.total("requests_finished"),
        requests_by_outcome={} if aborted is None else {"abort": aborted},
        connector=told.present(_CONNECTOR),
        ttft=ttft,
        itl=itl,
        queue_time=queue_time,
        notes=(*told.notes, odd) if odd else tuple(told.notes),
    )


def _tiers(told: Figures, capacity: int | None, block_tokens: int | None) -> tuple[KvTier, ...]:
    """The hierarchical cache, where it is on: where it computes, and host memory."""
    host, used = told.whole("host_total_tokens"), told.whole("kv_used_tokens")
    if not host or capacity is None or used is None or not block_tokens:
        return ()
    host_used = told.whole("host_used_tokens") or 0
    return (
        KvTier(
            name="accelerator", used_blocks=used // block_tokens, capacity_blocks=capacity // block_tokens
        ),
        KvTier(name="host", used_blocks=host_used // block_tokens, capacity_blocks=host // block_tokens),
    )
