"""Room for KV as engines write it in their logs, against what their labels say."""

from __future__ import annotations

import pytest

from workers.engines.base import EngineSample
from workers.engines.capacity_log import LoggedCapacity, read_capacity, with_capacity
from workers.engines.vllm.metrics import parse_metrics

LABELS = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="7281"} 1.0\n'


def test_both_figures_are_read_and_where_they_part_whole_requests_are_believed() -> None:
    logged = read_capacity(
        [
            "INFO [kv_cache_utils.py:1319] GPU KV cache size: 290,864 tokens",
            "INFO [kv_cache_utils.py:1324] Maximum concurrency for 32,768 tokens per request: 33.04x",
        ]
    )
    assert (logged.tokens, logged.request_tokens, logged.requests) == (290_864, 32_768, 33.04)
    assert logged.disagrees
    assert logged.capacity_tokens == round(33.04 * 32_768)
    sample = with_capacity(EngineSample(kv_block_tokens=16), logged)
    assert sample.kv_capacity_tokens == 1_082_655
    assert sample.kv_total_blocks == 1_082_655 // 16
    assert "290864 tokens" in sample.notes[0]


def test_figures_that_agree_are_one() -> None:
    line = (
        "(EngineCore pid=4280) INFO [kv_cache_utils.py:2327] CPU KV cache size: 3,072 tokens, "
        "Maximum concurrency for 1,024 tokens per request: 3.00x"
    )
    logged = read_capacity([line])
    assert (logged.capacity_tokens, logged.disagrees) == (3072, False)
    assert with_capacity(EngineSample(), logged).notes == ()


def test_block_size_of_hybrid_models_comes_from_the_log_and_not_from_the_label() -> None:
    by_label = parse_metrics(LABELS)
    assert (by_label.kv_capacity_tokens, by_label.kv_capacity_is_estimate) == (116_496, True)
    line = "INFO Setting attention block size to 528 tokens to ensure that attention page size is >= mamba's"
    only_block = with_capacity(by_label, read_capacity([line]))
    assert only_block.kv_capacity_is_estimate
    both = with_capacity(by_label, read_capacity([line, "INFO GPU KV cache size: 52,800 tokens"]))
    assert (both.kv_capacity_tokens, both.kv_capacity_is_estimate) == (52_800, False)
    assert (both.kv_block_tokens, both.kv_total_blocks) == (528, 100)


def test_blocks_of_the_first_engine_and_the_pool_of_another_are_read() -> None:
    first = read_capacity(
        [
            "INFO: # GPU blocks: 1952, # CPU blocks: 2048",
            "INFO: Maximum concurrency for 20000 tokens per request: 1.56x",
        ]
    )
    assert first.blocks == 1952
    assert first.capacity_tokens == 31_200
    assert (
        read_capacity(["max_total_num_tokens=262144, chunked_prefill_size=8192"]).capacity_tokens == 262_144
    )


@pytest.mark.parametrize(
    "line",
    [
        "(APIServer pid=7) INFO [utils.py:253] non-default args: {'gpu_memory_utilization': 0.35}",
        "Memory profiling results: kv_cache_size=3.81GiB gpu_memory_utilization=0.90",
        "INFO 10-16 19:06:01 metrics.py:361] Prefix cache hit rate: GPU: 94.35%, CPU: 0.00%",
        "INFO: Running: 0 reqs, Waiting: 3 reqs, GPU KV cache usage: 0.0%",
        "[2025-03-07 09:25:12 TP0] Memory pool end. avail mem=22.03 GB",
        "RuntimeError: Rank 0 scheduler died during initialization (exit code: 255).",
        f"GPU KV cache size: {'9' * 5000} tokens",
        f"Maximum concurrency for 10 tokens per request: {'9' * 400}x",
        f"Maximum concurrency for {'9' * 5000} tokens per request: 3x",
        f"# GPU blocks: {'9' * 5000}, # CPU blocks: 3",
        "",
    ],
)
def test_other_lines_say_nothing_of_room(line: str) -> None:
    logged = read_capacity([line])
    assert logged == LoggedCapacity()
    sample = parse_metrics(LABELS)
    assert with_capacity(sample, logged) is sample
