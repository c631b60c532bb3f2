from __future__ import annotations

from pathlib import Path

import pytest
import torch

from workers.engines.torch_engine.config import ModelConfig, read_model_config
from workers.engines.torch_engine.kv_pool import allocate_pool, block_bytes, choose_pool_blocks
from workers.engines.torch_engine.settings import EngineSettings
from workers.engines.torch_engine.weights import load_weights

CPU = torch.device("cpu")


@pytest.fixture
def config(demo_model: Path) -> ModelConfig:
    return read_model_config(demo_model)


def blocks_of(config: ModelConfig, weights_bytes: int = 0, **settings: int) -> int:
    whole = EngineSettings(Path(), "m", **settings)  # type: ignore[arg-type]  # integers only
    return choose_pool_blocks(config, torch.float32, CPU, whole, weights_bytes=weights_bytes)


def test_block_size_is_what_the_pool_then_takes(config: ModelConfig) -> None:
    pool = allocate_pool(config, 3, dtype=torch.float32, device=CPU)
    assert pool.keys.nbytes + pool.values.nbytes == 3 * block_bytes(config, torch.float32)
    assert block_bytes(config, torch.float32) == 2 * 4 * 2 * 64 * 16 * 4


def test_weights_and_kv_share_the_replicas_budget(config: ModelConfig) -> None:
    one = block_bytes(config, torch.float32)
    assert blocks_of(config, weights_bytes=300 * one, memory_bytes=1000 * one) == 500


def test_nearer_wish_goes_first(config: ModelConfig) -> None:
    one = block_bytes(config, torch.float32)
    assert blocks_of(config, memory_bytes=1000 * one, kv_memory_bytes=7 * one) == 7
    assert blocks_of(config, kv_memory_bytes=7 * one, num_blocks=5) == 5


def test_budget_without_room_for_a_block_is_refused(config: ModelConfig) -> None:
    with pytest.raises(ValueError, match="0 bytes are left for KV"):
        blocks_of(config, weights_bytes=10_000, memory_bytes=10_000)


def test_weights_take_what_their_file_holds(demo_model: Path, config: ModelConfig) -> None:
    weights = load_weights(demo_model, config, device=CPU, dtype=torch.float32, on_progress=lambda _: None)
    size = (demo_model / "model.safetensors").stat().st_size
    assert size * 0.99 < weights.total_bytes < size
