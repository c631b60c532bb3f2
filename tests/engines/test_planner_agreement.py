"""The planner's KV bytes against what the built-in engine itself takes for a token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from exaserve_ops.serving.domain.engine_launch import read_launch
from exaserve_ops.serving.domain.memory_plan import (
    AcceleratorMemory,
    MemoryPlan,
    ModelFigures,
    SequenceMix,
    plan_memory,
)
from workers.engines.torch_engine.config import ModelConfig, parse_model_config, read_model_config
from workers.engines.torch_engine.kv_pool import allocate_pool, block_bytes, choose_pool_blocks
from workers.engines.torch_engine.loading import choose_dtype
from workers.engines.torch_engine.settings import EngineSettings
from workers.protocol.digests import KV_BLOCK_TOKENS

CPU = torch.device("cpu")
BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 2},
    "llama-without-groups": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_key_value_heads": 4,
        "use_sliding_window": True,
        "sliding_window": 32,
        "max_window_layers": 1,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_key_value_heads": 4,
        "sliding_window": 64,
    },
}


def planned(raw: dict[str, Any], options: dict[str, object], **more: Any) -> MemoryPlan:
    figures = ModelFigures("made", raw, more.pop("weights_bytes", 1 << 20))
    room = AcceleratorMemory(8 << 30, "cpu")
    plan = plan_memory(figures, read_launch("torch", options), room, SequenceMix(100), **more)
    assert isinstance(plan, MemoryPlan), plan
    return plan


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_planner_and_engine_take_the_same_bytes_for_a_token(shape: str, dtype: str) -> None:
    raw = BASE | SHAPES[shape]
    config = parse_model_config(raw, {})
    computed = choose_dtype(dtype, config, CPU)
    pool = allocate_pool(config, 3, dtype=computed, device=CPU)
    plan = planned(raw, {"dtype": dtype})
    assert plan.kv.bytes_each(3 * KV_BLOCK_TOKENS) == pool.blocks.nbytes
    assert plan.kv.growth_bytes_each * KV_BLOCK_TOKENS == block_bytes(config, computed)
    assert not plan.kv.whole.windows


def test_planner_leaves_the_engine_as_many_blocks_as_it_then_makes(demo_model: Path) -> None:
    raw = json.loads((demo_model / "config.json").read_text())
    config: ModelConfig = read_model_config(demo_model)
    weights_bytes = (demo_model / "model.safetensors").stat().st_size
    for budget in (weights_bytes * 2, 64 << 20, 500 << 20):
        plan = planned(raw, {}, weights_bytes=weights_bytes, budget_bytes=budget)
        settings = EngineSettings(demo_model, "m", memory_bytes=budget)
        made = choose_pool_blocks(config, torch.float32, CPU, settings, weights_bytes=weights_bytes)
        assert plan.claim.pool_low_bytes // block_bytes(config, torch.float32) == made


def test_pool_that_is_smaller_than_the_model_allows_shortens_what_is_served(demo_model: Path) -> None:
    raw = json.loads((demo_model / "config.json").read_text())
    plan = planned(raw, {"num_blocks": 192}, weights_bytes=1 << 24, budget_bytes=100 << 20)
    assert plan.limit_tokens == 192 * KV_BLOCK_TOKENS < raw["max_position_embeddings"]
    assert plan.verdict == "fits"
    assert plan.claim.bytes == 100 << 20
    assert any("3,072 tokens" in text for text in plan.assumptions)


def test_planner_and_engine_serve_sequences_of_the_same_length(demo_model: Path) -> None:
    raw = json.loads((demo_model / "config.json").read_text())
    scaled = raw | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    for config in (raw, scaled):
        assert planned(config, {}).limit_tokens == parse_model_config(config, {}).max_position_tokens
