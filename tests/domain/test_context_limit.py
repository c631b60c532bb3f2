"""Longer sequences than an engine starts with are refused with the longest that it takes."""

from __future__ import annotations

from typing import Any

import pytest

from exaserve_ops.serving.domain.context_limit import length_problem

PLAIN = {"model_type": "llama", "max_position_embeddings": 4096}
LINEAR = PLAIN | {"rope_scaling": {"rope_type": "linear", "factor": 4}}
YARN = PLAIN | {
    "max_position_embeddings": 131_072,
    "rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 32_768},
}
TOLD = PLAIN | {"model_max_length": 16_384}
INSIDE = {"model_type": "llava", "text_config": PLAIN}

SGLANG_MEANT = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"

REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], int]] = [
    ("vllm", {"max_model_len": 4097}, PLAIN, 4096),
    ("sglang", {"context_length": 8192}, PLAIN, 4096),
    ("vllm", {"max_model_len": 16_385}, LINEAR, 16_384),
    ("vllm", {"max_model_len": 131_073}, YARN, 131_072),
    ("vllm", {"max_model_len": 16_385}, TOLD, 16_384),
    ("vllm", {"max_model_len": 8192}, INSIDE, 4096),
    ("vllm", {"max_model_len": 8193, "hf_overrides": '{"max_position_embeddings": 8192}'}, PLAIN, 8192),
    ("vllm", {"max_model_len": 8192, "environment": "VLLM_ALLOW_LONG_MAX_MODEL_LEN=0"}, PLAIN, 4096),
]
TAKEN: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("vllm", {}, PLAIN),
    ("vllm", {"max_model_len": 4096}, PLAIN),
    ("vllm", {"max_model_len": 16_384}, LINEAR),
    ("vllm", {"max_model_len": 100_000}, YARN),
    ("vllm", {"max_model_len": 8192}, TOLD),
    ("vllm", {"max_model_len": 1_000_000}, {"model_type": "nobody-knows"}),
    ("vllm", {"max_model_len": 8192, "hf_overrides": '{"max_position_embeddings": 8192}'}, PLAIN),
    ("vllm", {"max_model_len": 8192, "environment": "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"}, PLAIN),
    ("sglang", {"context_length": 8192, "environment": f"{SGLANG_MEANT}=true"}, PLAIN),
    ("torch", {"max_model_len": 8192}, PLAIN),
    ("simulated", {"max_model_len": 8192}, PLAIN),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "options", "config", "most"), REFUSED)
def test_longer_sequences_than_the_engine_starts_with_are_refused(
    engine: str, options: dict[str, Any], config: dict[str, Any], most: int
) -> None:
    problem = length_problem(engine, options, config, model="m")
    assert problem is not None
    assert problem.option in options
    assert f"m was made for at most {most:,} tokens" in problem.why
    assert f"give at most {most:,}" in problem.why


@pytest.mark.parametrize(("engine", "options", "config"), TAKEN)
def test_what_an_engine_takes_or_nobody_knows_is_taken(
    engine: str, options: dict[str, Any], config: dict[str, Any]
) -> None:
    assert length_problem(engine, options, config, model="m") is None
