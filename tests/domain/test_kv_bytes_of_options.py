"""KV bytes under options: element types, windows, splits; and configs that make no sense, refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.model_configs import (
    BF16,
    DEEPSEEK_V3,
    GEMMA_3_27B,
    GEMMA_4_31B,
    LLAMA_8B,
    MISTRAL_V01,
    QWEN3_NEXT,
    known,
    parts,
    refused,
)


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc"])
def test_eight_bit_cache_halves_what_grows_and_what_is_capped(name: str) -> None:
    assert parts(LLAMA_8B, kv_dtype=name) == (65_536, 0, 0)
    assert parts(GEMMA_3_27B, kv_dtype=name) == (40_960, 218_103_808, 0)
    assert parts(DEEPSEEK_V3, kv_dtype=name)[0] == 35_136
    assert parts(QWEN3_NEXT, kv_dtype=name) == (12_288, 0, 77_266_944)


def test_auto_cache_has_the_models_type_unless_the_checkpoint_brings_scales() -> None:
    assert parts(LLAMA_8B, kv_dtype="auto")[0] == 131_072
    for method in ("fp8", "awq", "gptq", "compressed-tensors", "auto-round", "mxfp4"):
        weights_only = {"quantization_config": {"quant_method": method, "bits": 4, "extra_config": {}}}
        assert parts(LLAMA_8B | weights_only)[0] == 131_072, method
    for scales in (
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
        {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}},
    ):
        with_scales = known(LLAMA_8B | {"quantization_config": scales})
        assert with_scales.growth_bytes_per_token == 65_536, scales
        assert "scales" in with_scales.element.why
    assert parts(LLAMA_8B | {"quantization_config": {"kv_cache_scheme": None}})[0] == 131_072


def test_cache_type_that_nobody_knows_is_refused() -> None:
    assert "turbo3" in refused(LLAMA_8B, kv_dtype="turbo3").reason


def test_config_without_element_type_says_what_was_taken() -> None:
    untyped = {name: value for name, value in LLAMA_8B.items() if name != "torch_dtype"}
    assert parts(untyped)[0] == 131_072
    assert any("dtype" in text for text in known(untyped).assumptions)
    assert parts(LLAMA_8B | {"torch_dtype": "float32"})[0] == 262_144


def test_layers_that_all_slide_grow_by_nothing_until_the_window_is_off() -> None:
    assert parts(MISTRAL_V01) == (0, 536_870_912, 0)
    assert parts(MISTRAL_V01, windows_off=True) == (131_072, 0, 0)


def test_window_holds_no_more_than_the_longest_sequence() -> None:
    share = known(GEMMA_4_31B).whole
    assert share.capped_bytes(128) == 2 * 50 * 16 * 256 * 2 * 128
    assert share.capped_bytes(1024) == share.capped_bytes(1_000_000) == 838_860_800
    assert 32 * share.bytes_at(128) == 32 * 128 * (81_920 + 819_200)


@pytest.mark.parametrize(
    "outer",
    [
        {
            "model_type": "qwen2_5_omni",
            "thinker_config": {"audio_config": {"d_model": 1280}, "text_config": {}},
        },
        {"model_type": "ovis", "llm_config": {}, "visual_tokenizer_config": {"hidden_size": 1024}},
        {"model_type": "internvl_chat", "llm_config": {}, "vision_config": {"num_hidden_layers": 24}},
        {"model_type": "llava", "text_config": {}, "vision_config": {"num_attention_heads": 16}},
    ],
    ids=["omni", "ovis", "internvl", "llava"],
)
def test_language_model_is_found_at_any_depth_and_towers_keep_no_kv(outer: dict[str, Any]) -> None:
    inner = {name: value for name, value in LLAMA_8B.items() if name != "torch_dtype"}

    def fill(level: dict[str, Any]) -> dict[str, Any]:
        return {
            name: inner
            if name in ("text_config", "llm_config")
            else fill(value)
            if isinstance(value, dict)
            else value
            for name, value in level.items()
        }

    assert parts(fill(outer) | {"torch_dtype": "bfloat16"}) == (131_072, 0, 0)


def test_nested_model_that_names_no_class_takes_the_outer_ones() -> None:
    vl = {
        "model_type": "qwen3_vl",
        "dtype": "bfloat16",
        "text_config": {"num_hidden_layers": 36, "num_key_value_heads": 8, "num_attention_heads": 32},
        "vision_config": {"depth": 27, "num_heads": 16},
    }
    assert parts(vl)[0] == 2 * 36 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 0),
        ("num_hidden_layers", "32"),
        ("num_key_value_heads", -8),
        ("num_key_value_heads", 2.5),
        ("head_dim", True),
        ("sliding_window", "wide"),
        ("hidden_size", 10**400),
        ("head_dim", 1 << 60),
    ],
)
def test_value_that_is_no_count_is_refused_by_name(field: str, value: object) -> None:
    assert field in refused(MISTRAL_V01 | {field: value}).reason


@pytest.mark.parametrize(
    "config",
    [
        LLAMA_8B | {"num_hidden_layers": 10**9},
        LLAMA_8B | {"num_nextn_predict_layers": 10**9},
        {"model_type": "longcat_flash", "num_layers": 10**9},
        {"model_type": "nemotron_h", "hybrid_override_pattern": "-" * 1_000_000},
    ],
)
def test_layers_without_number_are_refused_and_not_counted_out_in_memory(config: dict[str, Any]) -> None:
    assert "no more than 10,000" in refused(config).reason


def test_state_of_heads_without_number_is_refused() -> None:
    nested = {"full_attn_layers": [1], "num_heads": 10**4000, "head_dim": 10**4000}
    config = {"model_type": "kimi_linear", "num_hidden_layers": 2, "linear_attn_config": nested}
    assert "linear_attn_config" in refused(config).reason


def test_pipeline_of_stages_without_number_is_refused_and_not_laid_out() -> None:
    assert known(LLAMA_8B, pipeline_parallel=32).growth_bytes_each == 4096
    assert "1,000,000,000 stages" in refused(LLAMA_8B, pipeline_parallel=10**9).reason


@pytest.mark.parametrize(
    ("kinds", "told"),
    [(["full_attention"] * 31, "does not name 32"), (["full_attention"] * 31 + ["mystery"], "mystery")],
)
def test_list_of_layers_that_does_not_match_is_refused(kinds: list[str], told: str) -> None:
    assert told in refused(MISTRAL_V01 | {"layer_types": kinds}).reason


def test_split_that_engines_refuse_is_refused_here() -> None:
    assert "3 accelerators" in refused(LLAMA_8B, tensor_parallel=3).reason
    six = LLAMA_8B | {"num_key_value_heads": 6, "num_attention_heads": 24, "head_dim": 128}
    assert "6 KV heads" in refused(six, tensor_parallel=4).reason


def test_pipeline_stage_with_most_layers_decides() -> None:
    staged = known(LLAMA_8B | {"num_hidden_layers": 30}, pipeline_parallel=4)
    assert [share.growth_bytes_per_token // 4096 for share in staged.each] == [7, 8, 8, 7]
    assert staged.growth_bytes_each == 8 * 4096


def test_sparse_latent_attention_adds_its_index_and_defaults_to_eight_bits() -> None:
    v32 = DEEPSEEK_V3 | {"model_type": "deepseek_v32", "index_head_dim": 128, "index_topk": 2048}
    assert parts(v32, kv_dtype="bfloat16")[0] == 61 * (576 * 2 + 132)
    assert parts(v32)[0] == 61 * (576 + 132)
    assert parts(DEEPSEEK_V3, kv_dtype="fp8_ds_mla")[0] == 61 * 656


def test_shared_layers_hold_nothing_of_their_own() -> None:
    small = BF16 | {
        "model_type": "gemma3n",
        "text_config": {
            "model_type": "gemma3n_text",
            "num_hidden_layers": 35,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "sliding_window": 512,
            "num_kv_shared_layers": 15,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        },
    }
    assert parts(small) == (2 * 4 * 2 * 256 * 2, 2 * 16 * 2 * 256 * 2 * 512, 0)


def test_arithmetic_that_people_read_adds_up_to_the_figures() -> None:
    for config in (LLAMA_8B, DEEPSEEK_V3, GEMMA_3_27B, QWEN3_NEXT, GEMMA_4_31B, MISTRAL_V01):
        found = known(config)
        terms = found.terms
        assert sum(t.bytes for t in terms if t.per == "token") == found.whole.growth_bytes_per_token
        assert sum(t.bytes for t in terms if t.per == "sequence") == found.whole.state_bytes
        assert sum(t.bytes for t in terms if "up to" in t.per) == sum(
            w.bytes_per_token for w in found.whole.windows
        )
    assert [term.formula for term in known(DEEPSEEK_V3).terms] == ["61 layers x (512 + 64) x 2 B"]
