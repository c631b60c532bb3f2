"""SGLang's pages as they really come, of many versions: what each means in this project's terms."""

from __future__ import annotations

import pytest

from bench.engine_pages import sglang_pages
from workers.engines.exposition import parse_exposition
from workers.engines.sglang.metrics import parse_metrics
from workers.engines.windows import measure_window

LLAMA = 'model_name="meta-llama/Llama-3.1-8B-Instruct"'


def test_documented_page_whose_sums_come_before_their_buckets() -> None:
    page = (
        f"sglang:prompt_tokens_total{{{LLAMA}}} 8.128902e+06\n"
        f"sglang:token_usage{{{LLAMA}}} 0.28\n"
        'sglang:func_latency_seconds_bucket{le="0.07500000000000001",name="generate_request"} 14006.0\n'
        f"sglang:time_per_output_token_seconds_sum{{{LLAMA}}} 866964.5791549598\n"
        f'sglang:time_per_output_token_seconds_bucket{{le="0.07500000000000001",{LLAMA}}} 73.0\n'
        f'sglang:time_per_output_token_seconds_bucket{{le="+Inf",{LLAMA}}} 7.400757e+06\n'
        f"sglang:time_per_output_token_seconds_count{{{LLAMA}}} 7.400757e+06\n"
        f"sglang:num_running_reqs{{{LLAMA}}} 162.0\n"
        f"sglang:num_queue_reqs{{{LLAMA}}} 2826.0\n"
    )
    sample = parse_metrics(page)
    assert (sample.requests_running, sample.requests_waiting) == (162, 2826)
    assert sample.kv_used_ratio == 0.28
    assert sample.prompt_tokens == 8_128_902
    assert sample.itl is not None
    assert sample.itl.total / sample.itl.counts[-1] == pytest.approx(0.1171, abs=0.00005)
    assert sample.notes == ()


@pytest.mark.parametrize(
    "series",
    [
        'sglang:num_running_reqs{name="/shared/Llama-3.2-3B/5cc0ffe0/"}',
        'sglang:num_running_reqs{engine_type="unified",model_name="/shared/Meta-Llama-3-8B-Instruct"}',
        'sglang:num_running_reqs{engine_type="unified",model_name="Qwen-32B",pp_rank="0",tp_rank="0"}',
        'sglang_num_running_reqs{engine_type="unified",model_name="x",moe_ep_rank="0",pp_rank="0",tp_rank="0"}',
    ],
)
def test_every_spelling_of_name_and_labels_is_the_same_figure(series: str) -> None:
    assert parse_metrics(f"{series} 7.0\n").requests_running == 7


def test_two_spellings_on_one_page_are_not_added() -> None:
    page = "sglang_num_running_reqs 4\nsglang:num_running_reqs 4\n"
    assert parse_metrics(page).requests_running == 4


def test_old_pool_size_with_a_path_for_a_model() -> None:
    page = 'sglang:max_total_num_tokens{name="/shared/elr-models/Llama-3.2-3B/5cc0ffe09ee4/"} 570979.0\n'
    sample = parse_metrics(page)
    assert sample.kv_capacity_tokens == 570_979
    assert (sample.kv_total_blocks, sample.kv_block_tokens) == (570_979, 1)


def test_tensor_ranks_tell_the_same_and_the_highest_counts() -> None:
    page = "".join(
        f'sglang:num_queue_reqs{{tp_rank="{rank}"}} {queue}\n'
        f'sglang:num_queue_reqs_total{{tp_rank="{rank}"}} 999\n'
        f'sglang:max_total_num_tokens{{tp_rank="{rank}"}} 262144\n'
        f'sglang:token_usage{{tp_rank="{rank}"}} 0.915 1790347303000\n'
        f'sglang:generation_tokens_total{{tp_rank="{rank}"}} 5000\n'
        f'sglang:time_to_first_token_seconds_bucket{{le="1",tp_rank="{rank}"}} 3\n'
        f'sglang:time_to_first_token_seconds_bucket{{le="+Inf",tp_rank="{rank}"}} 4\n'
        for rank, queue in enumerate((3, 11, 3, 3))
    )
    sample = parse_metrics(page)
    assert sample.requests_waiting == 11
    assert sample.kv_capacity_tokens == 262_144
    assert sample.kv_used_ratio == pytest.approx(0.915)
    assert sample.generation_tokens == 5000
    assert sample.ttft is not None
    assert sample.ttft.counts == (3, 4)
    assert sample.notes == ()


def test_data_parallel_ranks_are_added_up_and_their_tensor_ranks_are_not() -> None:
    page = "".join(
        f'sglang:num_running_reqs{{dp_rank="{dp}",tp_rank="{tp}"}} {running}\n'
        f'sglang:token_usage{{dp_rank="{dp}",tp_rank="{tp}"}} {usage}\n'
        f'sglang:max_total_num_tokens{{dp_rank="{dp}",tp_rank="{tp}"}} 1000\n'
        for dp, running, usage in ((0, 3, 0.2), (1, 5, 0.8))
        for tp in (0, 1)
    )
    sample = parse_metrics(page)
    assert sample.requests_running == 8
    assert sample.kv_used_ratio == pytest.approx(0.5)
    assert sample.kv_capacity_tokens == 2000


@pytest.mark.parametrize(
    ("told", "ratio", "notes"),
    [
        ("0.007507552643049313", 0.007507552643049313, ()),
        ("87.58777633289988", 0.8758777633289988, ("sglang:cache_hit_rate is told in percent",)),
        ("0.0", 0.0, ()),
    ],
)
def test_hit_rate_is_a_ratio_whatever_unit_the_version_tells(
    told: str, ratio: float, notes: tuple[str, ...]
) -> None:
    sample = parse_metrics(f"sglang:cache_hit_rate {told}\n")
    assert sample.prefix_hit_ratio == pytest.approx(ratio)
    assert sample.notes == notes
    assert measure_window(sample, sample, seconds=1.0).prefix_hit_ratio == pytest.approx(ratio)


def test_counted_tokens_go_before_the_engines_own_hit_rate() -> None:
    def page(prompt: int, cached: tuple[int, int]) -> str:
        return (
            f"sglang:cache_hit_rate 0.9\nsglang:prompt_tokens_total {prompt}\n"
            f'sglang:cached_tokens_total{{cache_source="device"}} {cached[0]}\n'
            f'sglang:cached_tokens_total{{cache_source="host"}} {cached[1]}\n'
        )

    old, new = parse_metrics(page(100, (10, 0))), parse_metrics(page(200, (30, 40)))
    assert measure_window(old, new, seconds=1.0).prefix_hit_ratio == pytest.approx(0.6)
    assert measure_window(new, new, seconds=1.0).prefix_hit_ratio is None  # nothing asked, nothing hit


def test_behind_a_gateway_each_worker_is_a_source_of_its_own() -> None:
    page = "".join(
        f'sglang_num_running_reqs{{engine_type="unified",{LLAMA},moe_ep_rank="0",pp_rank="0",tp_rank="0",'
        f'worker_addr="grpc://127.0.0.1:{port}"}} {running}\n\n'
        for port, running in ((8001, 55), (8002, 5))
    )
    assert parse_metrics(page).requests_running == 60


def test_throughput_gauge_is_used_only_where_nothing_is_counted() -> None:
    gauge = 'sglang:gen_throughput{engine_type="unified",pp_rank="0",tp_rank="0"} 0.8371284457403783\n'
    sample = parse_metrics(gauge)
    assert measure_window(sample, sample, seconds=1.0).generation_tokens_per_second == 0.8371284457403783
    counted = parse_metrics(gauge + "sglang:generation_tokens_total 5\n")
    assert measure_window(counted, counted, seconds=1.0).generation_tokens_per_second == 0


def test_milliseconds_become_seconds() -> None:
    sample = parse_metrics("sglang:kv_transfer_latency_ms_sum 1500\nsglang:kv_transfer_latency_ms_count 3\n")
    assert sample.connector == {"transfers": 3, "seconds in transfer": 1.5}


def test_hierarchical_cache_is_shown_as_tiers_in_blocks() -> None:
    sample = parse_metrics(
        "sglang:page_size 16\nsglang:max_total_num_tokens 1600\nsglang:kv_used_tokens 160\n"
        "sglang:hicache_host_used_tokens 320\nsglang:hicache_host_total_tokens 3200\n"
    )
    assert (sample.kv_total_blocks, sample.kv_block_tokens) == (100, 16)
    accelerator, host = sample.kv_tiers
    assert (accelerator.name, accelerator.used_blocks, accelerator.capacity_blocks) == (
        "accelerator",
        10,
        100,
    )
    assert (host.name, host.used_blocks, host.capacity_blocks) == ("host", 20, 200)
    assert parse_metrics("sglang:max_total_num_tokens 1600\n").kv_tiers == ()


def test_why_requests_wait_and_how_they_ended() -> None:
    sample = parse_metrics(
        "sglang:num_queue_reqs 5\nsglang:num_retracted_reqs 2\nsglang:num_paused_reqs 0\n"
        "sglang:num_requests_total 40\nsglang:num_aborted_requests_total 3\n"
    )
    assert sample.requests_waiting == 5
    assert sample.waiting_by_reason == {"retracted": 2, "paused": 0}
    assert (sample.requests_finished, sample.requests_by_outcome) == (40, {"abort": 3})


def test_whole_page_of_the_newest_version_is_read() -> None:
    old, new = (parse_metrics(page) for page in sglang_pages(2))
    assert new.notes == ()
    # How many requests and tokens it counted, its ranks once; what it has no name for stays unknown.
    assert (new.requests_finished, new.generation_tokens, new.kv_block_tokens) == (1, 4, 14)
    silent = {name for name in new.__slots__ if getattr(new, name) is None}
    assert silent == {
        *("process_start_seconds", "kv_evicted_idle_seconds", "kv_cached_tokens", "kv_swaps", "preemptions"),
        *("external_query_tokens", "external_hit_tokens"),
    }
    load = measure_window(old, new, seconds=2.0)
    assert load.generation_tokens_per_second == 0.5
    assert load.ttft_p95_seconds is not None


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("sgl_router_requests_total 3\n", "of a router: scrape the engine's own port"),
        ("vllm:num_requests_running 0\n", "of vLLM"),
        (
            'time_to_first_token_seconds_bucket{engine_type="undefined",le="2.5"} 2.0\n',
            "no metrics of SGLang",
        ),
    ],
)
def test_other_pages_are_named(page: str, said: str) -> None:
    (note,) = parse_metrics(page).notes
    assert said in note


def test_pages_of_engines_without_a_prefix_are_still_read_line_by_line() -> None:
    page = parse_exposition(
        'time_to_first_token_seconds_bucket{engine_type="undefined",le="2.5",model_name="undefined"} 2.0\n'
        "llamacpp:n_busy_slots_per_decode -nan\n"
        "# TYPE prefix_cache_latency_seconds counter\n"
        'prefix_cache_latency_seconds{op="match"} 3.496e-06\n'
        'vllm:spec_decode_num_drafts_total{model_name="my model"} 5000 1790347303000\n'
    )
    assert page.find_value("time_to_first_token_seconds_bucket") == 2
    assert page.find_value("llamacpp:n_busy_slots_per_decode") is None
    assert page.find_value("prefix_cache_latency_seconds") == 3.496e-06
    assert page.find_value("vllm:spec_decode_num_drafts_total", {"model_name": "my model"}) == 5000
    assert page.dropped_lines == 0
