"""What an engine says of its tiers arrives in the node's telemetry as it was said."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from workers.engines.base import LaunchContext
from workers.engines.kv_blocks import BlockUse, PromptUse
from workers.engines.openai_server.metrics import EngineLoad, EngineMetrics
from workers.engines.own_launch import parse_own_metrics
from workers.engines.torch_adapter import TorchAdapter
from workers.engines.windows import measure_window
from workers.kv.tiers.ports import Swapped, TierFacts, TierUse
from workers.protocol.engines.kinds import EngineOptionError
from workers.protocol.observed import KvSwaps, KvTier

REASON = 'half of what came in "left" again'


def page_of(load: EngineLoad) -> str:
    metrics = EngineMetrics(lambda: load)
    metrics.count_preemptions(recompute=2, swap=3)
    metrics.count_admission(
        queue_seconds=0.1,
        prompt_tokens=100,
        prompt=PromptUse(
            64, evicted_tokens=16, unshared_tokens=16, partial_tokens=4, host_tokens=32, disk_tokens=16
        ),
    )
    return metrics.page().decode()


def test_all_of_the_tiers_reaches_telemetry() -> None:
    swapped = Swapped(
        blocks_in={"host": 3, "disk": 4},
        blocks_out={"host": 5, "disk": 6},
        fetch_waits=7,
        checksum_failures=8,
    )
    facts = TierFacts(
        {"host": TierUse(10, 40), "disk": TierUse(0, 0, "No space left")}, swapped, 100, REASON, 1
    )
    load = EngineLoad(blocks=BlockUse(free=10, used=4, cached=6), tiers=facts)
    sample = parse_own_metrics(page_of(load))
    assert sample.kv_total_blocks == 20  # those that wait elsewhere are not among them
    telemetry = measure_window(None, sample, seconds=0.0)
    assert telemetry.kv_tiers == (
        KvTier(name="accelerator", used_blocks=10, capacity_blocks=20),
        KvTier(name="host", used_blocks=10, capacity_blocks=40),
        KvTier(name="disk", used_blocks=0, capacity_blocks=0, off_reason="No space left"),
    )
    assert telemetry.kv_swaps == KvSwaps(
        blocks_in=7,
        blocks_out=11,
        bytes_in=700,
        bytes_out=1100,
        fetch_waits=7,
        checksum_failures=8,
        preemptions_recompute=2,
        preemptions_swap=3,
    )
    assert telemetry.kv_thrash_reason == REASON
    assert telemetry.prefix_hit_tokens_total == 64
    assert telemetry.prefix_miss_tokens_total == {
        "no_shared_prefix": 16,
        "shorter_than_a_block": 4,
        "evicted": 16,
    }


def test_engine_without_tiers_says_so() -> None:
    sample = parse_own_metrics(page_of(EngineLoad(blocks=BlockUse(free=10, used=4, cached=6))))
    assert [tier.name for tier in sample.kv_tiers] == ["accelerator"]
    assert sample.kv_swaps is None
    assert sample.kv_thrash_reason == ""


def test_hits_by_tier_add_up_to_the_cached_tokens() -> None:
    page = page_of(EngineLoad())
    for tier, tokens in (("accelerator", 16), ("host", 32), ("disk", 16)):
        assert f'exaserve_engine_prefix_cache_hit_tokens_total{{tier="{tier}"}} {tokens}.0' in page


@pytest.fixture
def context(tmp_path: Path) -> LaunchContext:
    return LaunchContext(
        replica_id="r",
        attempt=1,
        served_model_name="m",
        model_dir=tmp_path,
        host="127.0.0.1",
        ports=(1,),
        api_key="k",
        runtime_dir=tmp_path,
        kv_disk_dir=tmp_path / "kv",
    )


def test_folder_is_given_only_to_a_replica_that_asked_for_a_disk(context: LaunchContext) -> None:
    flag = f"--kv-disk-dir={context.kv_disk_dir}"
    adapter = TorchAdapter()
    assert flag not in adapter.build_launch({}, context).argv
    assert flag not in adapter.build_launch({"kv_disk_bytes": 0, "kv_host_bytes": 4096}, context).argv
    launch = adapter.build_launch({"kv_disk_bytes": 4096, "kv_eviction": "lfu"}, context)
    assert {flag, "--kv-disk-bytes=4096", "--kv-eviction=lfu"} <= set(launch.argv)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kv_host_bytes": -1}, "kv_host_bytes must be from 0 to"),
        ({"kv_disk_bytes": "1G"}, "kv_disk_bytes must be a whole number"),
        ({"kv_eviction": "fifo"}, "kv_eviction must be one of lru, lfu"),
        ({"extra_arguments": "--kv-disk-dir=/etc"}, "the agent decides that"),
    ],
)
def test_wrong_sizes_and_words_are_refused_by_name(options: dict[str, str | int], text: str) -> None:
    with pytest.raises(EngineOptionError, match=text):
        TorchAdapter().check_options(options)


def test_how_long_the_block_evicted_last_was_unused_reaches_telemetry() -> None:
    blocks = BlockUse(free=0, used=5, cached=5)
    quiet = parse_own_metrics(page_of(EngineLoad(blocks=blocks)))
    assert quiet.kv_evicted_idle_seconds is None
    since = time.monotonic() - 60.0
    sample = parse_own_metrics(page_of(EngineLoad(blocks=blocks, evicted_idle_since_seconds=since)))
    telemetry = measure_window(None, sample, seconds=0.0)
    assert telemetry.kv_evicted_idle_seconds is not None
    assert telemetry.kv_evicted_idle_seconds >= 60.0
