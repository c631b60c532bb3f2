"""vLLM's pages as they really come, of many versions: what each means in this project's terms."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from workers.engines.exposition import parse_exposition
from workers.engines.vllm.metrics import parse_metrics
from workers.engines.windows import estimate_quantile, measure_window

REAL_PAGE = Path(__file__).parents[2] / "bench/engine_pages/vllm-0.32.0.prom"


def test_whole_page_of_a_real_engine_is_read() -> None:
    sample = parse_metrics(REAL_PAGE.read_text(encoding="utf-8"))
    assert sample.notes == ()
    assert (sample.requests_running, sample.requests_waiting) == (0, 0)
    assert sample.requests_finished == 31
    assert sample.requests_by_outcome["length"] == 31
    assert sample.prompt_tokens == 5347
    assert sample.generation_tokens == 728
    assert (sample.prefix_query_tokens, sample.prefix_hit_tokens) == (5347, 4512)
    assert (sample.external_query_tokens, sample.preemptions) == (0, 0)
    assert sample.sleep_state == "awake"
    assert (sample.kv_total_blocks, sample.kv_block_tokens, sample.kv_capacity_tokens) == (96, 32, 3072)
    assert not sample.kv_capacity_is_estimate
    assert sample.process_start_seconds == 1796048498.44
    for histogram, count in ((sample.ttft, 31), (sample.itl, 697), (sample.queue_time, 31)):
        assert histogram is not None
        assert histogram.counts[-1] == count


MIXED = """\
process_start_time_seconds 1.7181405583e+09
vllm:cache_config_info{block_size="16",cache_dtype="auto",cpu_kvcache_space_bytes="4294967296",\
enable_prefix_caching="False",gpu_memory_utilization="0.9",num_cpu_blocks="0",num_gpu_blocks="7281",\
num_gpu_blocks_override="None",sliding_window="None",swap_space_bytes="4294967296"} 1.0
vllm:gpu_cache_usage_perc{model_name="facebook/opt-125m"} 0.0
vllm:kv_cache_usage_perc{model_name="facebook/opt-125m"} 0.0
vllm:num_requests_swapped{model_name="facebook/opt-125m"} 0.0
vllm:cpu_cache_usage_perc{model_name="facebook/opt-125m"} 0.7
vllm:time_to_first_token_seconds_bucket{le="0.25",model_name="facebook/opt-125m"} 0.0
vllm:time_to_first_token_seconds_bucket{le="0.5",model_name="facebook/opt-125m"} 1.0
vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="facebook/opt-125m"} 1.0
vllm:time_to_first_token_seconds_sum{model_name="facebook/opt-125m"} 0.31326723098754883
vllm:engine_sleep_state{model_name="facebook/opt-125m",sleep_state="awake"} 1.0
vllm:prefix_cache_queries_total{model_name="facebook/opt-125m"} 117.0
vllm:prefix_cache_hits_total{model_name="facebook/opt-125m"} 64.0
vllm:prompt_tokens_by_source_total{model_name="facebook/opt-125m",source="local_compute"} 53.0
vllm:iteration_tokens_total_bucket{le="1.0",model_name="facebook/opt-125m"} 19.0
"""


def test_page_with_names_of_several_versions_counts_each_thing_once() -> None:
    sample = parse_metrics(MIXED)
    assert sample.kv_used_ratio == 0.0
    assert sample.kv_capacity_tokens == 116_496
    assert sample.kv_capacity_is_estimate
    assert sample.sleep_state == "awake"
    assert sample.ttft is not None
    assert sample.ttft.counts[-1] == 1
    assert sample.ttft.total == pytest.approx(0.313, abs=0.001)
    for rank in (0.01, 0.5, 0.95, 1.0):
        quantile = estimate_quantile(sample.ttft, rank)
        assert quantile is not None
        assert 0.25 < quantile.seconds <= 0.5
    load = measure_window(parse_metrics(""), sample, seconds=10.0)
    assert load.prefix_hit_ratio is None  # nothing to count from: what came before is not known
    before = "".join(line for line in MIXED.splitlines(keepends=True) if "prefix_cache" not in line)
    zeros = 'vllm:prefix_cache_queries_total{m="x"} 0\nvllm:prefix_cache_hits_total{m="x"} 0\n'
    load = measure_window(parse_metrics(before + zeros), sample, seconds=10.0)
    assert load.prefix_hit_ratio == pytest.approx(0.547, abs=0.0005)


@pytest.mark.parametrize(
    "names",
    [("gpu_cache_usage_perc",), ("kv_cache_usage_perc",), ("gpu_cache_usage_perc", "kv_cache_usage_perc")],
)
def test_renamed_gauge_is_one_figure_whichever_name_is_there(names: tuple[str, ...]) -> None:
    page = "".join(f'vllm:{name}{{model_name="m"}} 0.62\n' for name in names)
    assert parse_metrics(page).kv_used_ratio == pytest.approx(0.62)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("time_per_output_token_seconds", "inter_token_latency_seconds", "itl"),
        ("gpu_prefix_cache_queries_total", "prefix_cache_queries_total", "prefix_query_tokens"),
        ("gpu_prefix_cache_hits_total", "prefix_cache_hits_total", "prefix_hit_tokens"),
    ],
)
def test_old_name_is_read_and_gives_way_to_the_new_one(old: str, new: str, field: str) -> None:
    def page(name: str, count: int) -> str:
        if field == "itl":
            return f'vllm:{name}_bucket{{le="1"}} {count}\nvllm:{name}_bucket{{le="+Inf"}} {count}\n'
        return f"vllm:{name} {count}\n"

    def count(text: str) -> float:
        value = getattr(parse_metrics(text), field)
        return float(value.counts[-1] if field == "itl" else value)

    assert count(page(old, 3)) == 3
    assert count(page(new, 4)) == 4
    assert count(page(old, 3) + page(new, 4)) == 4
    assert count(page(new, 4) + page(old, 3)) == 4


@pytest.mark.parametrize("blocks", ["None", "", "null"])
def test_blocks_that_are_not_told_are_unknown_and_not_zero(blocks: str) -> None:
    page = (
        f'vllm:cache_config_info{{block_size="16",cpu_offload_gb="0",num_cpu_blocks="None",'
        f'num_gpu_blocks="{blocks}",prefix_caching_hash_algo="builtin",swap_space_bytes="4294967296"}} 1.0\n'
    )
    sample = parse_metrics(page)
    assert (sample.kv_total_blocks, sample.kv_capacity_tokens) == (None, None)
    assert sample.kv_block_tokens == 16
    assert sample.notes == ()


def test_block_size_of_hybrid_models_is_what_attention_uses() -> None:
    page = (
        'vllm:cache_config_info{block_size="16",effective_attention_block_size="528",num_gpu_blocks="10"} 1\n'
    )
    sample = parse_metrics(page)
    assert (sample.kv_block_tokens, sample.kv_capacity_tokens) == (528, 5280)
    assert not sample.kv_capacity_is_estimate


def test_creation_times_and_small_ratios_with_exponents() -> None:
    sample = parse_metrics(
        "# HELP vllm:gpu_prefix_cache_queries_created GPU prefix cache queries, in terms of number of "
        "queriedtokens. DEPRECATED: Use vllm:prefix_cache_queries instead.\n"
        "# TYPE vllm:gpu_prefix_cache_queries_created gauge\n"
        'vllm:gpu_prefix_cache_queries_created{engine="0",model_name="zai-org/GLM"} 1.7537953269352946e9\n'
        'vllm:kv_cache_usage_perc{engine="0",model_name="zai-org/GLM-4.5"} 9.75010481363281e-06\n'
        'vllm:prefix_cache_queries_total{engine="0",model_name="zai-org/GLM-4.5"} 32.0\n'
    )
    assert sample.kv_used_ratio == pytest.approx(9.75010481363281e-06)
    assert sample.prefix_query_tokens == 32
    assert sample.notes == ()


def test_histogram_whose_family_ends_in_total_is_a_histogram() -> None:
    page = parse_exposition(
        "process_start_time_seconds 1.74262400557e+09\n"
        "# TYPE vllm:iteration_tokens_total histogram\n"
        'vllm:iteration_tokens_total_bucket{le="512.0",model_name="Qwen/Qwen2.5"} 122351.0\n'
        'vllm:iteration_tokens_total_bucket{le="+Inf",model_name="Qwen/Qwen2.5"} 122651.0\n'
        'vllm:iteration_tokens_total_count{model_name="Qwen/Qwen2.5"} 122651.0\n'
        'vllm:iteration_tokens_total_sum{model_name="Qwen/Qwen2.5"} 1.7350745e+07\n'
    )
    histogram = page.find_histogram("vllm:iteration_tokens_total")
    assert histogram is not None
    assert histogram.total / histogram.counts[-1] == pytest.approx(141.5, abs=0.05)
    quantile = estimate_quantile(histogram, 0.999)
    assert quantile is not None
    assert (quantile.seconds, quantile.is_lower_bound) == (512.0, True)


def test_engines_of_one_replica_are_added_up_whatever_the_order_of_labels() -> None:
    page = "".join(
        f'vllm:num_requests_running{{engine="{engine}",model_name="/home/jovyan/qwen3-8b"}} {running}\n'
        f'vllm:kv_cache_usage_perc{{model_name="/home/jovyan/qwen3-8b",engine="{engine}"}} {used}\n'
        f'vllm:inter_token_latency_seconds_bucket{{engine="{engine}",le="7680.0",model_name="/home/x"}} 1.0\n'
        f'vllm:inter_token_latency_seconds_bucket{{engine="{engine}",le="+Inf",model_name="/home/x"}} 2.0\n'
        f'vllm:cache_config_info{{engine="{engine}",block_size="16",num_gpu_blocks="100"}} 1\n'
        for engine, running, used in ((0, 3, 0.2), (1, 5, 0.6))
    )
    sample = parse_metrics(page)
    assert sample.requests_running == 8
    assert sample.kv_used_ratio == pytest.approx(0.4)
    assert sample.kv_total_blocks == 200
    assert sample.itl is not None
    assert sample.itl.counts == (2, 4)


def test_waiting_is_the_plain_figure_and_reasons_are_its_split() -> None:
    split = (
        'vllm:num_requests_waiting_by_reason{reason="capacity"} 72\n'
        'vllm:num_requests_waiting_by_reason{reason="deferred"} 0\n'
    )
    plain = "vllm:num_requests_running 24\nvllm:num_requests_waiting 72\n"
    sample = parse_metrics(plain + split)
    assert (sample.requests_running, sample.requests_waiting) == (24, 72)
    assert sample.waiting_by_reason == {"capacity": 72, "deferred": 0}
    only_split = split.replace('"deferred"} 0', '"deferred"} 3')
    assert parse_metrics(only_split).requests_waiting == 75


def test_newest_pages_have_integers_and_new_labels() -> None:
    sample = parse_metrics(
        'vllm:kv_cache_usage_perc{engine="0",model_name="qwen3.6"} 0.4565217391304348\n'
        'vllm:generation_tokens_total{engine="0",model_name="qwen3.6"} 15000\n'
        'vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 100000\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 5000\n'
    )
    assert sample.kv_used_ratio == 0.4565217391304348
    assert sample.generation_tokens == 15000
    assert sample.requests_waiting is None


def test_pages_of_the_first_engine_have_a_rate_and_no_types() -> None:
    page = (
        'vllm:avg_generation_throughput_toks_per_s{model_name="mistral-7b"} 252.0\n'
        'vllm:gpu_cache_usage_perc{model_name="mistral-7b"} 0.5\n'
    )
    sample = parse_metrics(page)
    assert sample.kv_used_ratio == 0.5
    assert measure_window(sample, sample, seconds=1.0).generation_tokens_per_second == 252.0
    counted = parse_metrics(page + "vllm:generation_tokens_total 10\n")
    assert measure_window(counted, counted, seconds=1.0).generation_tokens_per_second == 0.0


def test_adapters_of_one_base_model_are_added_up_and_told_apart() -> None:
    page = (
        'vllm:generation_tokens_total{model_name="sql-lora"} 5.0\n'
        'vllm:generation_tokens_total{model_name="meta-llama/Llama-2-7b-hf"} 10.0\n'
    )
    sample = parse_metrics(page)
    assert sample.generation_tokens == 15
    assert sample.generation_tokens_by_model == {"sql-lora": 5, "meta-llama/Llama-2-7b-hf": 10}
    assert parse_metrics(page.splitlines()[0] + "\n").generation_tokens_by_model == {}


def test_sleep_is_told_by_the_series_that_holds() -> None:
    def page(engine: int, state: str) -> str:
        return "".join(
            f'vllm:engine_sleep_state{{engine="{engine}",sleep_state="{name}"}} {float(name == state)}\n'
            for name in ("awake", "weights_offloaded", "discard_all")
        )

    assert parse_metrics(page(0, "weights_offloaded")).sleep_state == "weights_offloaded"
    assert parse_metrics(page(0, "awake") + page(1, "discard_all")).sleep_state == "discard_all"
    assert parse_metrics("vllm:num_requests_running 0\n").sleep_state == ""


def test_what_requests_came_to_and_what_was_refused() -> None:
    sample = parse_metrics(
        'vllm:request_success_total{engine="0",finished_reason="stop"} 4\n'
        'vllm:request_success_total{engine="1",finished_reason="stop"} 3\n'
        'vllm:request_success_total{engine="0",finished_reason="abort"} 2\n'
        'vllm:admission_rejections_total{reason="max_num_queued_reqs"} 6\n'
        "vllm:num_preemptions_total 9\n"
    )
    assert sample.requests_by_outcome == {"stop": 7, "abort": 2, "rejected": 6}
    assert sample.requests_finished == 9
    assert sample.preemptions == 9


def test_connectors_tell_what_went_through_them() -> None:
    sample = parse_metrics(
        'vllm:nixl_xfer_time_seconds_bucket{le="+Inf"} 3\nvllm:nixl_xfer_time_seconds_count 3\n'
        "vllm:nixl_bytes_transferred_sum 1180000\nvllm:nixl_num_failed_transfers_total 0\n"
        "vllm:external_prefix_cache_queries_total 600\nvllm:external_prefix_cache_hits_total 552\n"
    )
    assert sample.connector == {"nixl transfers": 3, "nixl bytes": 1_180_000, "nixl failed transfers": 0}
    assert (sample.external_query_tokens, sample.external_hit_tokens) == (600, 552)


def test_whose_series_it_is_is_not_taken_from_labels_that_mean_nothing() -> None:
    page = 'vllm:num_requests_running{engine_type="undefined",model_name="undefined"} 2\n'
    assert parse_metrics(page).requests_running == 2


@pytest.mark.parametrize("text", ["NaN", "-nan", "+Inf", "-Inf", "nan", "1e400"])
def test_figure_that_is_no_number_is_no_figure(text: str) -> None:
    page = (
        f"vllm:kv_cache_usage_perc {text}\nvllm:generation_tokens_total {text}\n"
        f'vllm:time_to_first_token_seconds_bucket{{le="+Inf"}} {text}\n'
    )
    sample = parse_metrics(page)
    assert (sample.kv_used_ratio, sample.generation_tokens, sample.ttft) == (None, None, None)


HUGE = ("1e308", "1.7e308", "9" * 300, "-1e30")


@pytest.mark.parametrize("text", HUGE)
def test_what_no_engine_counts_to_is_no_figure_and_fits_every_message(text: str) -> None:
    page = (
        f'vllm:num_requests_running{{e="0"}} {text}\nvllm:num_requests_running{{e="1"}} {text}\n'
        f'vllm:num_requests_waiting 1e22\nvllm:generation_tokens_total{{e="0"}} {text}\n'
        f'vllm:generation_tokens_total{{e="1"}} {text}\nvllm:num_preemptions_total 4\n'
        f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{"9" * 5000}"}} 1\n'
        f'vllm:time_to_first_token_seconds_bucket{{le="+Inf"}} {text}\n'
    )
    sample = parse_metrics(page)
    assert (sample.requests_running, sample.requests_waiting, sample.generation_tokens) == (None, None, None)
    assert (sample.kv_total_blocks, sample.ttft, sample.preemptions) == (None, None, 4)
    load = measure_window(sample, sample, seconds=1.0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(load), type=type(load)) == load


def test_absent_stays_absent_and_zero_stays_zero() -> None:
    five_gauges = "".join(f"vllm:num_requests_{name} 0\n" for name in ("running", "waiting"))
    sample = parse_metrics(five_gauges)
    assert (sample.requests_running, sample.requests_waiting) == (0, 0)
    for name in ("ttft", "itl", "generation_tokens", "requests_finished", "kv_used_ratio", "preemptions"):
        assert getattr(sample, name) is None


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("<!doctype html>\n<html></html>\n", "a web page came, no metrics"),
        ("vllm:healthy_pods_total 3\nvllm:current_qps 1\n", "of a router: scrape the engine's own port"),
        ("smg_requests_total 3\n", "of a router"),
        ("# TYPE sglang:token_usage gauge\nsglang:token_usage 0.1\n", "of SGLang"),
        ("exaserve_engine_requests_running 1\n", "of an engine of this project"),
        ("", "no metrics of vLLM on the page"),
        ("llamacpp:n_busy_slots_per_decode -nan\n", "no metrics of vLLM on the page"),
    ],
)
def test_page_of_something_else_is_named(page: str, said: str) -> None:
    (note,) = parse_metrics(page).notes
    assert said in note


def test_a_ratio_in_percent_is_recognised_and_noted() -> None:
    sample = parse_metrics("vllm:kv_cache_usage_perc 62.5\n")
    assert sample.kv_used_ratio == 0.625
    assert sample.notes == ("vllm:kv_cache_usage_perc is told in percent",)
    assert parse_metrics("vllm:kv_cache_usage_perc 1.0000001\n").kv_used_ratio == 1.0


def test_buckets_that_are_declared_as_something_else_are_left_alone_with_a_note() -> None:
    sample = parse_metrics(
        "# TYPE vllm:time_to_first_token_seconds counter\n"
        'vllm:time_to_first_token_seconds_bucket{le="+Inf"} 3\n'
    )
    assert sample.ttft is None
    assert sample.notes == ("vllm:time_to_first_token_seconds is no usable histogram",)


def test_cut_and_damaged_pages_lose_no_more_than_their_bad_lines() -> None:
    text = REAL_PAGE.read_text(encoding="utf-8")
    whole = parse_metrics(text)
    at = text.index("vllm:time_to_first_token_seconds_bucket")
    cut = parse_metrics(text[: at + 40])
    assert cut.generation_tokens == whole.generation_tokens
    assert cut.ttft is None
    assert cut.notes == ("page cut off",)
    damaged = parse_metrics(
        text.replace("vllm:num_requests_running{", 'vllm:num_requests_running{x="y"z",', 1)
    )
    assert damaged.requests_running is None
    assert damaged.requests_waiting == whole.requests_waiting
    assert damaged.notes == ("1 lines dropped",)
    assert math.isclose(damaged.prompt_tokens or 0.0, whole.prompt_tokens or 1.0)
