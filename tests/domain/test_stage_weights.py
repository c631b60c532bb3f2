"""What the memory plan says of a pipeline's stages is what the engine loads there."""

from __future__ import annotations

import math

import pytest

from exaserve_ops.serving.domain.engine_launch import read_launch
from exaserve_ops.serving.domain.memory_plan import (
    AcceleratorMemory,
    MemoryPlan,
    ModelFigures,
    SequenceMix,
    plan_memory,
)
from exaserve_ops.serving.domain.stage_weights import stage_weights
from workers.engines.torch_engine.config import parse_model_config, stage_config
from workers.engines.torch_engine.weights import plan_tensors

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
BYTES_EACH = 4


def loaded_bytes(config: dict[str, object], number: int, stages: int) -> int:
    part = stage_config(parse_model_config(config, {}), number, stages)
    return BYTES_EACH * sum(math.prod(tensor.shape) for tensor in plan_tensors(part))


@pytest.mark.parametrize("stages", [1, 2, 3, 7])
@pytest.mark.parametrize("is_tied", [False, True])
def test_each_stage_holds_what_is_planned(stages: int, is_tied: bool) -> None:
    config = {**CONFIG, "tie_word_embeddings": is_tied}
    whole = loaded_bytes(config, 0, 1)
    planned = stage_weights(
        whole, layers=7, embedding_bytes=32_000 * 512 * BYTES_EACH, is_tied=is_tied, stages=stages
    )
    loaded = [loaded_bytes(config, number, stages) for number in range(stages)]
    # The last norm is counted as if it were spread over all layers.
    assert planned == pytest.approx(loaded, abs=512 * BYTES_EACH)
    launch = read_launch("torch", {"pipeline_stages": stages})
    plan = plan_memory(
        ModelFigures("m", config, whole), launch, AcceleratorMemory(1 << 34, "cpu"), SequenceMix(100)
    )
    assert isinstance(plan, MemoryPlan)
    assert plan.weights_bytes == max(planned)


@pytest.mark.parametrize("stages", [2, 3, 7])
def test_a_block_takes_of_the_largest_stage_what_its_layers_take(stages: int) -> None:
    launch = read_launch("torch", {"pipeline_stages": stages})
    plan = plan_memory(
        ModelFigures("m", CONFIG, 1 << 28), launch, AcceleratorMemory(1 << 34, "cpu"), SequenceMix(100)
    )
    assert isinstance(plan, MemoryPlan)
    most = max(
        stage_config(parse_model_config(CONFIG, {}), number, stages).layers for number in range(stages)
    )
    assert plan.kv.growth_bytes_each == 2 * most * 2 * 64 * BYTES_EACH
