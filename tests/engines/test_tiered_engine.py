"""A real engine process with tiers: turns come back from them, and everything that happens is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.engines.conftest import EngineProcess, StartEngine, engine_starter, wait_until
from workers.engines.demo_model import make_demo_model
from workers.engines.kv_blocks import BlockAllocator
from workers.engines.torch_engine.config import read_model_config
from workers.engines.torch_engine.kv_pool import KvPool, allocate_pool
from workers.engines.torch_engine.settings import EngineSettings
from workers.engines.torch_engine.tier_memory import SlabMover, open_tiers
from workers.kv.tiers.heat import Heat

PROMPT = "the quick brown fox jumps over the lazy dog and tells nobody of it, for there is nobody to tell. "
MEGABYTE = 1 << 20
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "demo"
    make_demo_model(folder)
    return folder


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartEngine]:
    with ExitStack() as stack:
        yield stack.enter_context(engine_starter(tmp_path, kv_disk_dir=tmp_path / "kv"))


def complete(client: httpx.Client, prompt: str, *, session: str = "", tokens: int = 4) -> dict[str, Any]:
    body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body, headers={"x-session-id": session} if session else {})
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def push_out(client: httpx.Client) -> None:
    """Use all blocks for other sessions, which are as hot, and were there later."""
    for number in range(12):
        complete(client, f"{number} {PROMPT}", session=f"other-{number}")


def came_from(reply: dict[str, Any]) -> dict[str, int]:
    tokens: dict[str, int] = reply["usage"]["kv"]["cached_tokens"]
    return tokens


def tiers_of(engine: EngineProcess) -> dict[str, tuple[int, int]]:
    return {tier.name: (tier.used_blocks, tier.capacity_blocks) for tier in engine.sample().kv_tiers}


def test_turn_comes_back_from_host_memory_and_is_told_of(start: StartEngine, model: Path) -> None:
    engine = start("torch", model, num_blocks=24, kv_host_bytes=MEGABYTE)
    engine.wait_ready()
    with engine.client() as client:
        first = complete(client, PROMPT, session="s-1")
        assert set(came_from(first).values()) == {0}
        push_out(client)
        again = complete(client, PROMPT, session="s-1")
        assert again["choices"] == first["choices"]
        assert came_from(again)["host"] > 0
        assert came_from(again)["disk"] == 0
        assert sum(came_from(again).values()) == again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert again["usage"]["kv"]["fetches"] == 1
        listed = client.get("/kv/sessions?limit=1").json()
    assert listed["total"] == 13
    (row,) = listed["sessions"]
    assert row["session_id"] == "s-1"
    assert row["use"]["requests"] == 2
    assert row["use"]["cached_tokens"] == came_from(again)
    assert row["use"]["swaps"] == 1
    sample = engine.sample()
    assert sample.kv_total_blocks == 24
    used, capacity = tiers_of(engine)["host"]
    assert 0 < used <= capacity
    assert sample.kv_swaps is not None
    assert sample.kv_swaps.blocks_in * 16 == came_from(again)["host"]
    assert sample.kv_swaps.bytes_out > sample.kv_swaps.bytes_in > 0
    assert sample.kv_swaps.fetch_waits == 1
    assert sample.kv_thrash_reason == ""
    assert set(sample.prefix_miss_tokens) == {"no_shared_prefix", "shorter_than_a_block", "evicted"}
    hits = sample.prefix_hit_tokens
    assert hits is not None
    assert hits >= sum(came_from(again).values())


def test_announced_session_is_on_its_blocks_before_its_turn(start: StartEngine, model: Path) -> None:
    engine = start("torch", model, num_blocks=24, kv_disk_bytes=4 * MEGABYTE)
    engine.wait_ready()
    with engine.client() as client:
        complete(client, PROMPT, session="s-2")
        push_out(client)
        # Written behind the engine's back; only then does the announcement have to read.
        wait_until(lambda: tiers_of(engine)["disk"][0] > 0)
        announced = client.post("/kv/prefetch", json={"session_id": "s-2"})
        assert announced.status_code == 202
        blocks = announced.json()["blocks"]
        assert blocks > 0
        wait_until(lambda: swapped_in(engine) >= blocks)
        again = complete(client, PROMPT, session="s-2")
        assert came_from(again)["accelerator"] > 0
        assert came_from(again)["disk"] == 0
        unknown = client.post("/kv/prefetch", json={"session_id": "nobody"})
        assert unknown.json() == {"blocks": 0}
        for body in ({}, {"session_id": "s", "tokens": [1]}, {"tokens": [-1]}, {"tokens": [10**9]}):
            assert client.post("/kv/prefetch", json=body).status_code == 400, body
        assert client.get("/kv/sessions?limit=0").status_code == 400
    with httpx.Client(base_url=f"http://{engine.address}") as stranger:
        assert stranger.post("/kv/prefetch", json={"session_id": "s-2"}).status_code == 401
        assert stranger.get("/kv/sessions").status_code == 401


def swapped_in(engine: EngineProcess) -> int:
    swaps = engine.sample().kv_swaps
    return 0 if swaps is None else swaps.blocks_in


def test_file_of_a_killed_engine_is_removed_by_the_next_and_its_own_at_its_end(
    start: StartEngine, model: Path, tmp_path: Path
) -> None:
    killed = start("torch", model, num_blocks=24, kv_disk_bytes=4 * MEGABYTE)
    killed.wait_ready()
    assert len(list((tmp_path / "kv").glob("r0-*.slots"))) == 1
    killed.process.kill()
    killed.process.wait(10)
    following = start("torch", model, num_blocks=24, kv_disk_bytes=4 * MEGABYTE)
    following.wait_ready()
    assert [path.name[:3] for path in (tmp_path / "kv").glob("*.slots")] == ["r1-"]
    following.process.terminate()
    assert following.process.wait(20) == 0
    assert list((tmp_path / "kv").glob("*.slots")) == []


def test_tiers_that_cannot_be_had_are_off_with_a_reason(model: Path, tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("no folder")
    settings = EngineSettings(
        model, "demo", kv_host_bytes=1 << 44, kv_disk_bytes=4 * MEGABYTE, kv_disk_dir=tmp_path / "kv"
    )
    pool = allocate_pool(read_model_config(model), 4, dtype=torch.float32, device=CPU)
    heat = Heat()
    allocator = BlockAllocator(4, heat=heat)
    tiers = open_tiers(settings, pool, allocator, heat)
    assert tiers is not None
    uses = tiers.store.facts().uses
    assert "the machine has" in uses["host"].off_reason
    assert "exists" in uses["disk"].off_reason
    assert [use.capacity_blocks for use in uses.values()] == [0, 0]
    for number in range(6):  # blocks leave, and nobody minds
        (block,) = allocator.allocate(1) or [0]
        allocator.register(block, bytes([number]) * 16)
        allocator.release([block])
        tiers.store.tend()
    tiers.close()
    small = replace(settings, kv_host_bytes=10, kv_disk_bytes=10, kv_disk_dir=tmp_path / "other")
    few = open_tiers(small, pool, allocator, heat)
    assert few is not None
    assert all("one block takes" in use.off_reason for use in few.store.facts().uses.values())
    assert open_tiers(replace(settings, kv_host_bytes=0, kv_disk_bytes=0), pool, allocator, heat) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_survive_host_memory_and_bytes_whatever_they_are_made_of(
    model: Path, dtype: torch.dtype
) -> None:
    pool = allocate_pool(read_model_config(model), 4, dtype=dtype, device=CPU, compute_dtype=torch.float32)
    mover = SlabMover(pool, 2)
    fill_with_noise(pool)
    before = [bytes(pool.export_block(block)) for block in range(4)]
    assert len(set(before)) == 4
    mover.to_host(1, 0)
    mover.from_host(0, 2)
    mover.load(3, mover.export(0))
    after = [bytes(pool.export_block(block)) for block in range(4)]
    assert after == [before[0], before[1], before[1], before[0]]
    assert mover.read_host(0) == before[1]
    with pytest.raises(ValueError, match="a block has"):
        pool.import_block(0, b"too short")


def fill_with_noise(pool: KvPool) -> None:
    raw = pool.blocks.flatten(1).view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
