"""Whether a model fits: what other planners got wrong, and how engines themselves count."""

from __future__ import annotations

from typing import Any

import pytest

from exaserve_ops.serving.domain.context_length import context_length, merge_overrides
from exaserve_ops.serving.domain.engine_launch import EngineLaunch, read_launch
from exaserve_ops.serving.domain.manifest import FileEntry
from exaserve_ops.serving.domain.memory_fixes import Attempt, fixes
from exaserve_ops.serving.domain.memory_plan import (
    FITS,
    NOT,
    TIGHT,
    AcceleratorMemory,
    MemoryPlan,
    ModelFigures,
    PlanUnknown,
    SequenceMix,
    plan_memory,
)
from exaserve_ops.serving.domain.weights_size import (
    UnknownWeights,
    WeightsSize,
    weights_of_files,
    weights_of_header,
    weights_of_index,
)
from tests.fakes.model_configs import DEEPSEEK_V3, GEMMA_4_31B, LLAMA_8B, MISTRAL_V01

GIB = 1 << 30
LLAMA = LLAMA_8B | {"intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072}
LLAMA_WEIGHTS_BYTES = 16_060_522_496
LLAMA_FIGURES = ModelFigures("llama-8b", LLAMA, LLAMA_WEIGHTS_BYTES)
CARD_24 = AcceleratorMemory(24 * GIB, "NVIDIA A10")
CARD_80 = AcceleratorMemory(80 * GIB, "NVIDIA H100")
ONE = SequenceMix(mean_tokens=1024)


def vllm(**options: Any) -> EngineLaunch:
    return read_launch("vllm", {"gpu_memory_utilization": 0.9} | options)


def planned(
    launch: EngineLaunch,
    model: ModelFigures = LLAMA_FIGURES,
    card: AcceleratorMemory = CARD_24,
    mix: SequenceMix = ONE,
    **more: Any,
) -> MemoryPlan:
    plan = plan_memory(model, launch, card, mix, **more)
    assert isinstance(plan, MemoryPlan), plan
    return plan


def file(path: str, size: int) -> FileEntry:
    return FileEntry(path, size, "0" * 64)


# --- weights -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deepseek-r1", "model-v2", "qwen-7b-but-70b"])
def test_unknown_weights_block_planning_and_never_count_as_nothing(name: str) -> None:
    plan = plan_memory(ModelFigures(name, LLAMA, 0), vllm(), CARD_80, ONE)
    assert isinstance(plan, PlanUnknown)
    assert "not placed automatically" in plan.reason


def test_weights_are_the_sum_of_the_shards_that_the_index_lists() -> None:
    files = [
        file("model-00001-of-00002.safetensors", 900),
        file("model-00002-of-00002.safetensors", 100),
        file("consolidated.safetensors", 1000),
        file("config.json", 5),
    ]
    index = {
        "metadata": {"total_size": 990},
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
        },
    }
    assert weights_of_files(files, index) == WeightsSize(1000, "sum of 2 shards")
    assert weights_of_files(files) == WeightsSize(1000, "sum of 2 files")
    assert weights_of_index(index) == WeightsSize(990, "total_size of the index")
    missing = weights_of_files(files[:1], index)
    assert isinstance(missing, UnknownWeights)
    assert "model-00002-of-00002.safetensors" in missing.reason


def test_quantised_weights_count_as_stored_and_not_as_parameters_times_type() -> None:
    for method in ("fp8", "awq", "gptq", "compressed-tensors", "auto-round", "mxfp4"):
        quantised = LLAMA | {
            "quantization_config": {"quant_method": method, "bits": 4, "modules_to_not_convert": ["lm_head"]}
        }
        plan = planned(vllm(max_model_len=4096), ModelFigures("q", quantised, 5_730_000_000))
        assert plan.weights_bytes == 5_730_000_000, method


def test_folder_without_weights_has_no_size() -> None:
    for files in ([], [file("config.json", 10)], [file("training_args.bin", 10)], [file("m.safetensors", 0)]):
        assert isinstance(weights_of_files(files), UnknownWeights)
    assert weights_of_files([file("weights.gguf", 7), file("training_args.bin", 10)]) == WeightsSize(
        7, "sum of 1 files"
    )


def test_size_is_read_from_a_header_alone() -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"data_offsets": [0, 64]},
        "b": {"data_offsets": [64, 80]},
    }
    assert weights_of_header(header) == WeightsSize(80, "header of 2 tensors")
    assert isinstance(weights_of_header({"__metadata__": {}}), UnknownWeights)
    for broken in ({}, {"metadata": {"total_size": 0}}, {"metadata": {"total_size": "12"}}):
        assert isinstance(weights_of_index(broken), UnknownWeights)


def test_checkpoint_in_float32_is_counted_in_the_type_that_is_loaded() -> None:
    wide = ModelFigures("wide", LLAMA | {"torch_dtype": "float32"}, 2 * LLAMA_WEIGHTS_BYTES)
    assert planned(vllm(), wide, CARD_80).weights_bytes == LLAMA_WEIGHTS_BYTES
    assert planned(vllm(dtype="float32"), wide, CARD_80).weights_bytes == 2 * LLAMA_WEIGHTS_BYTES
    on_cpu = planned(read_launch("torch", {}), LLAMA_FIGURES, AcceleratorMemory(256 * GIB, "cpu"))
    assert on_cpu.weights_bytes == 2 * LLAMA_WEIGHTS_BYTES
    assert on_cpu.kv.growth_bytes_per_token == 262_144


# --- three numbers -----------------------------------------------------------------------------


def test_reservation_by_flag_is_told_apart_from_what_is_needed() -> None:
    small = ModelFigures(
        "0.6B",
        {
            "model_type": "qwen3",
            "torch_dtype": "bfloat16",
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
        },
        1_503_300_328,
    )
    plan = planned(vllm(max_model_len=4096), small)
    assert plan.claim.bytes == int(0.9 * 24 * GIB)
    assert plan.needed_bytes < 8 * GIB
    assert "gpu_memory_utilization 0.9" in plan.claim.rule


def test_second_replica_counts_by_the_rule_of_its_engines_version() -> None:
    half = AcceleratorMemory(24 * GIB, "x", held_bytes=12 * GIB)
    options = {"gpu_memory_utilization": 0.4, "max_model_len": 4096}
    tiny = ModelFigures("tiny", LLAMA, 2 * GIB)
    today = planned(read_launch("vllm", options, version="0.11.0"), tiny, half)
    assert today.claim.bytes == int(0.4 * 24 * GIB)
    assert not today.claim.problem
    # Before 0.6.5 the first replica's memory was taken for this one's.
    older = planned(read_launch("vllm", options, version="0.6.3"), tiny, half)
    assert older.claim.bytes == 0
    assert older.verdict == NOT
    sglang = read_launch("sglang", {"mem_fraction_static": 0.8, "context_length": 4096})
    after = planned(sglang, tiny, half)
    alone = planned(sglang, tiny, CARD_24)
    assert after.claim.pool_low_bytes == int(0.8 * 12 * GIB) - 2 * GIB
    assert alone.claim.pool_low_bytes == int(0.8 * 24 * GIB) - 2 * GIB


def test_engine_that_finds_too_little_free_at_start_is_not_promised_to_start() -> None:
    taken = AcceleratorMemory(24 * GIB, "x", held_bytes=4 * GIB)
    plan = planned(vllm(max_model_len=4096), ModelFigures("tiny", LLAMA, 2 * GIB), taken)
    assert plan.verdict == NOT
    assert "refuses to start" in plan.why


def test_share_is_the_default_of_the_version() -> None:
    def share(version: str) -> float:
        launch = read_launch("vllm", {"max_model_len": 4096}, version=version)
        return planned(launch, card=CARD_80).claim.bytes / CARD_80.total_bytes

    assert share("0.11.2") == pytest.approx(0.9)
    assert share("0.32.0") == share("") == pytest.approx(0.92)


def test_kv_memory_told_in_bytes_ignores_the_share() -> None:
    plan = planned(vllm(kv_cache_memory_bytes=3 * GIB, max_model_len=20_000))
    assert plan.claim.pool_low_bytes == plan.claim.pool_high_bytes == 3 * GIB
    assert plan.verdict == FITS


# --- verdicts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "verdict"), [(8_192, FITS), (29_000, TIGHT), (35_000, TIGHT), (60_000, NOT), (131_072, NOT)]
)
def test_what_starts_on_one_day_and_not_on_another_is_tight(tokens: int, verdict: str) -> None:
    assert planned(vllm(max_model_len=tokens)).verdict == verdict


def test_band_of_a_verdict_holds_what_engines_were_seen_to_have_left() -> None:
    claim = planned(vllm(max_model_len=29_000)).claim
    for seen_gib in (2.89, 3.81):
        assert claim.pool_low_bytes <= seen_gib * GIB <= claim.pool_high_bytes


def test_window_is_reserved_for_no_more_tokens_than_a_sequence_has() -> None:
    gemma = {**GEMMA_4_31B, "text_config": GEMMA_4_31B["text_config"] | {"max_position_embeddings": 262_144}}
    launch = vllm(max_model_len=128, max_num_seqs=32)
    plan = planned(
        launch, ModelFigures("gemma", gemma, 62 * 10**9), CARD_80, SequenceMix(mean_tokens=128, sequences=32)
    )
    assert plan.wanted_kv_bytes == 32 * 128 * (81_920 + 819_200)
    assert plan.wanted_kv_bytes < 3.5 * GIB


def test_length_after_overrides_of_the_launch_is_what_counts() -> None:
    qwen = {
        "model_type": "qwen2",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "hidden_size": 3584,
        "max_position_embeddings": 32_768,
    }
    figures = ModelFigures("qwen", qwen, 15_231_233_024)
    scaling = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}'
    plain = planned(vllm(), figures, CARD_80)
    stretched = planned(vllm(rope_scaling=scaling), figures, CARD_80)
    assert plain.limit_tokens == 32_768
    assert stretched.limit_tokens == 131_072
    assert stretched.sequence_at_limit_bytes == 4 * plain.sequence_at_limit_bytes
    by_json = vllm(hf_overrides='{"rope_parameters": {"rope_type": "linear", "factor": 2.0}}')
    assert planned(by_json, figures, CARD_80).limit_tokens == 65_536
    as_arguments = vllm(extra_arguments=f"--rope-scaling '{scaling}' --max-model-len=100k")
    assert planned(as_arguments, figures, CARD_80).limit_tokens == 100_000


def test_engines_stretch_positions_each_in_its_own_way() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    config = DEEPSEEK_V3 | {"max_position_embeddings": 163_840, "rope_scaling": yarn | {"factor": 40}}
    assert context_length(config, asked_tokens=None).tokens == 163_840
    assert context_length(config, asked_tokens=None, engine="sglang").tokens == 163_840
    llama3 = LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
    assert context_length(llama3, asked_tokens=None).tokens == 131_072
    gemma = {"text_config": {"model_type": "gemma3_text", "max_position_embeddings": 131_072}}
    assert (
        context_length(gemma | {"rope_scaling": {"type": "linear", "factor": 8}}, asked_tokens=None).tokens
        == 131_072
    )
    too_long = context_length(LLAMA, asked_tokens=200_000)
    assert too_long.tokens == 200_000
    assert "131,072" in too_long.problem


def test_override_replaces_a_scaling_whole_and_merges_the_rest() -> None:
    config = {"text_config": {"rope_scaling": {"type": "linear", "factor": 2}, "hidden_size": 8}, "gone": 1}
    merged = merge_overrides(
        config, {"text_config": {"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "gone": None}
    )
    assert merged == {"text_config": {"rope_scaling": {"rope_type": "yarn", "factor": 4}, "hidden_size": 8}}


def test_window_switched_off_in_vllm_limits_the_length() -> None:
    mistral = ModelFigures("mistral", MISTRAL_V01 | {"max_position_embeddings": 32_768}, 14_483_464_192)
    assert planned(vllm(), mistral).limit_tokens == 32_768
    limited = planned(vllm(disable_sliding_window="true"), mistral)
    assert limited.limit_tokens == 4096


def test_layout_that_is_not_known_is_planned_by_measured_figures_or_not_at_all() -> None:
    config = LLAMA | {"model_type": "deepseek_v4", "compress_ratios": [4, 128]}
    unknown = plan_memory(ModelFigures("v4", config, 10 * GIB), vllm(), CARD_80, ONE)
    assert isinstance(unknown, PlanUnknown)
    assert unknown.upper_bound_bytes_per_token == 131_072
    assert "Unsupported attention layout" in unknown.reason
    by_measure = ModelFigures("v4", config, 10 * GIB, measured_kv_bytes_per_token=15_943)
    assert planned(vllm(), by_measure, CARD_80).kv.growth_bytes_per_token == 15_943
    by_bound = planned(vllm(), ModelFigures("v4", config, 10 * GIB, accepts_upper_bound=True), CARD_80)
    assert by_bound.kv.growth_bytes_per_token == 131_072
    assert any("upper bound" in text for text in by_bound.assumptions)


def test_sequences_held_at_once_never_pass_what_the_engine_runs() -> None:
    few = planned(vllm(max_model_len=2048, max_num_seqs=4), card=CARD_80)
    assert few.sequences_at_mean == few.sequences_at_limit == 4
    many = planned(vllm(max_model_len=2048, max_num_seqs=4), card=CARD_80, mix=SequenceMix(1024, 5))
    assert many.verdict == NOT
    assert "runs 4 at once" in many.why


# --- fixes -------------------------------------------------------------------------------------


def offered(launch: EngineLaunch, mix: SequenceMix = ONE, **more: Any) -> dict[str, Any]:
    attempt = Attempt(LLAMA_FIGURES, launch, CARD_24, mix, accelerators=8, **more)
    plan = planned(launch, mix=mix, budget_bytes=more.get("budget_bytes"))
    return {fix.kind: fix for fix in fixes(attempt, plan)}


def test_every_fix_that_is_offered_really_helps() -> None:
    offers = offered(vllm(max_model_len=60_000))
    assert set(offers) == {"shorter_context", "fp8_kv", "more_accelerators"}
    (length,) = [int(value) for _, value in offers["shorter_context"].options]
    assert planned(vllm(max_model_len=length)).verdict == FITS
    assert planned(vllm(max_model_len=60_000, kv_cache_dtype="fp8")).verdict == offers["fp8_kv"].verdict
    split = vllm(max_model_len=60_000, tensor_parallel_size=2)
    assert planned(split).verdict == offers["more_accelerators"].verdict == FITS


def test_too_many_sequences_are_answered_with_fewer() -> None:
    offers = offered(vllm(max_model_len=4096), SequenceMix(2048, 200))
    (count,) = [int(value) for _, value in offers["fewer_sequences"].options]
    assert planned(vllm(max_model_len=4096), mix=SequenceMix(2048, count)).verdict == FITS


def test_budget_of_the_built_in_engine_is_raised_to_what_fits() -> None:
    launch = read_launch("torch", {"max_model_len": 4096, "dtype": "bfloat16"})
    offers = offered(launch, budget_bytes=17 * GIB)
    (budget,) = [int(value) for _, value in offers["larger_budget"].options]
    assert planned(launch, budget_bytes=budget).verdict == FITS


def test_plan_that_fits_is_offered_no_fix() -> None:
    assert offered(vllm(max_model_len=4096)) == {}
