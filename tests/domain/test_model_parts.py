"""Sizes that a model cannot be divided by are refused with those that fit, by each engine's own rule."""

from __future__ import annotations

from typing import Any

import pytest

from exaserve_ops.serving.domain.model_parts import ModelShape, PartsProblem, parts_problem

GROUPED = ModelShape("m", layers=30, heads=32, kv_heads=8)
ODD = ModelShape("m", layers=30, heads=14, kv_heads=2)
LATENT = ModelShape("m", layers=61, heads=128)

SHARED_BY_THREE = (
    "m has 32 attention heads and 8 key-value heads, which 3 ranks cannot share evenly: "
    "give 1, 2, 4, 8, 16 or 32"
)
REFUSED: list[tuple[str, dict[str, Any], ModelShape, str, str]] = [
    ("torch", {"pipeline_stages": 31}, GROUPED, "pipeline_stages",
     "m has 30 layers, and each stage needs one: give at most 30"),
    ("vllm", {"pipeline_parallel_size": 31}, GROUPED, "pipeline_parallel_size", "give at most 30"),
    ("sglang", {"pp_size": 31}, GROUPED, "pp_size", "give at most 30"),
    ("sglang", {"pp_size": 2}, ModelShape("m", layers=1), "pp_size", "m has 1 layer, and each stage"),
    ("vllm", {"tensor_parallel_size": 3}, GROUPED, "tensor_parallel_size",
     SHARED_BY_THREE),
    ("vllm", {"tensor_parallel_size": 7}, ODD, "tensor_parallel_size", "give 1, 2 or 14"),
    ("vllm", {"tensor_parallel_size": 64}, GROUPED, "tensor_parallel_size", "64 ranks cannot share"),
    ("sglang", {"tp_size": 6}, GROUPED, "tp_size", "6 ranks cannot share evenly"),
    ("sglang", {"tp_size": 96}, LATENT, "tp_size", "m has 128 attention heads, which 96 ranks"),
    ("sglang", {"tp_size": 6, "dp_size": 2, "enable_dp_attention": True}, GROUPED, "tp_size",
     "which 3 ranks cannot share evenly: give 2, 4, 8, 16, 32 or 64 with dp_size 2"),
    ("sglang", {"tp_size": 8, "dp_size": 3, "enable_dp_attention": True}, GROUPED, "dp_size",
     "it must divide tp_size 8 with enable_dp_attention: 1, 2, 4 or 8 do"),
    ("vllm", {"pipeline_parallel_size": 2, "environment": "VLLM_PP_LAYER_PARTITION=10,10,10"}, GROUPED,
     "environment", "VLLM_PP_LAYER_PARTITION names 3 stages, and there are 2"),
    ("vllm", {"pipeline_parallel_size": 2, "environment": "VLLM_PP_LAYER_PARTITION=16,16"}, GROUPED,
     "environment", "VLLM_PP_LAYER_PARTITION makes 32 layers, and m has 30"),
    ("vllm", {"pipeline_parallel_size": 2, "environment": "VLLM_PP_LAYER_PARTITION=30,0"}, GROUPED,
     "environment", "leaves a stage 0 layers: give at least 1"),
    ("vllm", {"environment": "VLLM_PP_LAYER_PARTITION=all"}, GROUPED,
     "environment", "such as 8,8: not 'all'"),
    ("sglang", {"pp_size": 3, "environment": "SGLANG_PP_LAYER_PARTITION=15,15"}, GROUPED,
     "environment", "SGLANG_PP_LAYER_PARTITION names 2 stages, and there are 3"),
    ("sglang", {"pp_size": 2, "environment": "SGLANG_PP_LAYER_PARTITION=40,-10"}, GROUPED,
     "environment", "leaves a stage -10 layers"),
]  # fmt: skip

TAKEN: list[tuple[str, dict[str, Any], ModelShape]] = [
    ("torch", {}, GROUPED),
    ("torch", {"pipeline_stages": 7}, GROUPED),
    (
        "vllm",
        {"tensor_parallel_size": 8, "pipeline_parallel_size": 4},
        GROUPED,
    ),  # 30 layers, 4 stages: uneven
    ("vllm", {"tensor_parallel_size": 16, "pipeline_parallel_size": 30}, GROUPED),
    ("vllm", {"pipeline_parallel_size": 2, "environment": "VLLM_PP_LAYER_PARTITION=18,12"}, GROUPED),
    ("vllm", {"pipeline_parallel_size": 2, "environment": "VLLM_PP_LAYER_PARTITION=18,12"}, ModelShape("m")),
    ("vllm", {"data_parallel_size": 3}, GROUPED),
    ("vllm", {"tensor_parallel_size": 3, "hf_overrides": '{"num_attention_heads": 3}'}, GROUPED),
    ("vllm", {"tensor_parallel_size": 64}, LATENT),
    ("vllm", {"tensor_parallel_size": 3}, ModelShape("m", layers=30)),
    ("sglang", {"tp_size": 8, "pp_size": 4}, GROUPED),
    ("sglang", {"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}, ODD),
    ("sglang", {"tp_size": 6, "extra_arguments": "--attn_cp_size 3"}, GROUPED),
    ("sglang", {"pp_size": 1, "environment": "SGLANG_PP_LAYER_PARTITION=1,2,3"}, GROUPED),
    ("sglang", {"pp_size": 2, "environment": "SGLANG_PP_LAYER_PARTITION=30,0"}, GROUPED),
    ("simulated", {"anything": 3}, GROUPED),
]


@pytest.mark.parametrize(("engine", "options", "shape", "option", "words"), REFUSED)
def test_size_that_the_engine_cannot_divide_by_is_refused_with_those_that_fit(
    engine: str, options: dict[str, Any], shape: ModelShape, option: str, words: str
) -> None:
    problem = parts_problem(engine, options, shape)
    assert isinstance(problem, PartsProblem)
    assert problem.option == option
    assert words in problem.why


@pytest.mark.parametrize(("engine", "options", "shape"), TAKEN)
def test_what_the_engine_takes_is_taken(engine: str, options: dict[str, Any], shape: ModelShape) -> None:
    assert parts_problem(engine, options, shape) is None


def test_ranks_on_processors_share_no_heads_evenly_with_sglang_which_fills_them_up() -> None:
    assert parts_problem("sglang", {"tp_size": 6}, GROUPED, pads_heads=True) is None
    assert parts_problem("vllm", {"tensor_parallel_size": 6}, GROUPED, pads_heads=True) is not None


def test_long_list_of_sizes_that_fit_is_cut_with_its_largest() -> None:
    many = ModelShape("m", heads=5040)
    problem = parts_problem("vllm", {"tensor_parallel_size": 11}, many)
    assert problem is not None
    assert problem.why.endswith(
        "give 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14 or another such number up to 5040"
    )
