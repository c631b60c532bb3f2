"""KV bytes of real models' configs: each with what misleads a calculator that does not look closely."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.model_configs import (
    BF16,
    DEEPSEEK_V3,
    GEMMA_3_27B,
    GEMMA_4_31B,
    GPT_OSS_20B,
    LLAMA_8B,
    QWEN3_30B,
    QWEN3_NEXT,
    known,
    parts,
    qwen35,
    refused,
)


def test_plain_grouped_attention_counts_key_value_heads() -> None:
    assert parts(LLAMA_8B) == (131_072, 0, 0)
    assert parts(LLAMA_8B | {"num_hidden_layers": 80, "num_attention_heads": 64, "hidden_size": 8192}) == (
        327_680,
        0,
        0,
    )


def test_window_that_is_switched_off_does_not_cap() -> None:
    qwen = BF16 | {
        "model_type": "qwen2",
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "hidden_size": 3584,
        "sliding_window": 131072,
        "use_sliding_window": False,
        "max_window_layers": 28,
    }
    assert parts(qwen) == (57_344, 0, 0)
    switched_on = parts(qwen | {"use_sliding_window": True, "max_window_layers": 21, "sliding_window": 1024})
    assert switched_on == (2 * 21 * 4 * 128 * 2, 2 * 7 * 4 * 128 * 2 * 1024, 0)


@pytest.mark.parametrize(
    ("layers", "heads", "kv_heads", "hidden", "expected"),
    [(36, 32, 8, 2560, 147_456), (48, 32, 4, 2048, 98_304), (94, 64, 4, 4096, 192_512)],
    ids=["4B", "30B-A3B", "235B-A22B"],
)
def test_explicit_head_size_beats_hidden_size_over_heads(
    layers: int, heads: int, kv_heads: int, hidden: int, expected: int
) -> None:
    config = BF16 | {
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "head_dim": 128,
    }
    assert parts(config)[0] == expected


def test_fewer_kv_heads_than_accelerators_are_repeated_and_not_divided() -> None:
    split = known(QWEN3_30B, tensor_parallel=8)
    assert split.growth_bytes_per_token == 98_304
    assert split.growth_bytes_each == 24_576
    assert known(QWEN3_30B, tensor_parallel=4).growth_bytes_each == 24_576
    assert known(QWEN3_30B, tensor_parallel=2).growth_bytes_each == 49_152


def test_latent_attention_counts_once_with_its_rotated_part_and_is_never_split() -> None:
    assert parts(DEEPSEEK_V3) == (70_272, 0, 0)
    assert parts(DEEPSEEK_V3, draft_layers=True) == (71_424, 0, 0)
    assert known(DEEPSEEK_V3, tensor_parallel=8).growth_bytes_each == 70_272


def test_latent_attention_matches_what_another_engine_allocated() -> None:
    measured_mib = 1166.62  # 32,768 tokens, 32 numbers in 34 bytes
    ours = known(DEEPSEEK_V3, kv_dtype="q8_0").whole.bytes_at(32_768)
    assert ours / (1 << 20) == pytest.approx(measured_mib, abs=0.01)
    assert ours == 61 * 576 * 32_768 * 34 // 32


def test_alternating_windows_cap_half_of_the_layers() -> None:
    gemma2 = BF16 | {
        "model_type": "gemma2",
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "hidden_size": 3584,
        "head_dim": 256,
        "sliding_window": 4096,
    }
    assert parts(gemma2) == (172_032, 704_643_072, 0)


def test_nested_model_with_five_windows_of_six_stays_small_at_long_context() -> None:
    assert parts(GEMMA_3_27B) == (81_920, 436_207_616, 0)
    assert known(GEMMA_3_27B).whole.bytes_at(128_000) == 10_921_967_616


def test_fields_that_are_left_out_mean_the_defaults_of_the_class() -> None:
    left_out = BF16 | {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
    }
    assert parts(left_out) == (2 * 5 * 4 * 256 * 2, 2 * 29 * 4 * 256 * 2 * 1024, 0)
    told = known(left_out).assumptions
    assert any("num_key_value_heads" in text and "4" in text for text in told)
    assert any("head_dim" in text and "256" in text for text in told)


def test_quantised_weights_do_not_shrink_the_cache_and_head_size_is_as_told() -> None:
    assert parts(GPT_OSS_20B) == (24_576, 3_145_728, 0)
    large = GPT_OSS_20B | {
        "num_hidden_layers": 36,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    }
    assert parts(large) == (36_864, 4_718_592, 0)
    rule_alone = {name: value for name, value in GPT_OSS_20B.items() if name != "layer_types"}
    assert parts(rule_alone) == (24_576, 3_145_728, 0)


def test_linear_attention_keeps_a_fixed_state_and_no_tokens() -> None:
    assert parts(QWEN3_NEXT) == (24_576, 0, 77_266_944)


def test_nested_hybrid_counts_attending_layers_and_draft_layers_where_they_are_on() -> None:
    assert parts(qwen35(32, 16, 4096)) == (32_768, 0, 52_690_944)
    assert parts(qwen35(32, 16, 4096), draft_layers=True) == (36_864, 0, 52_690_944)
    assert parts(qwen35(64, 24, 5120))[0] == 65_536


def test_head_size_is_not_hidden_size_over_heads_in_nemo() -> None:
    nemo = BF16 | {
        "model_type": "mistral",
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 5120,
        "head_dim": 128,
        "sliding_window": None,
    }
    assert parts(nemo) == (163_840, 0, 0)


@pytest.mark.parametrize(
    "written", [{}, {"num_kv_heads": 71}, {"n_head_kv": 71}, {"num_key_value_heads": 71}]
)
def test_one_shared_head_beats_whatever_count_is_written(written: dict[str, int]) -> None:
    falcon = BF16 | {
        "model_type": "falcon",
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "hidden_size": 4544,
        "multi_query": True,
        "new_decoder_architecture": False,
    }
    assert parts(falcon | written) == (8_192, 0, 0)
    newer = falcon | {"new_decoder_architecture": True, "num_kv_heads": 8, "num_attention_heads": 128}
    assert parts(newer | {"hidden_size": 8192, "num_hidden_layers": 60})[0] == 2 * 60 * 8 * 64 * 2


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768},
        {"model_type": "opt", "num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768},
        {"model_type": "gpt2"},
    ],
    ids=["gpt2-names", "opt-names", "all-left-out"],
)
def test_older_names_of_fields_are_read_and_missing_kv_heads_mean_all_heads(config: dict[str, Any]) -> None:
    assert parts(BF16 | config) == (36_864, 0, 0)
    assert (4 << 30) // (36_864 * 16) == 7281  # blocks of 16 tokens that an engine makes of 4 GiB


def test_three_other_names_of_one_layout_are_read() -> None:
    chatglm = {
        "model_type": "chatglm",
        "torch_dtype": "float16",
        "num_layers": 28,
        "num_attention_heads": 32,
        "hidden_size": 4096,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "kv_channels": 128,
        "seq_length": 32768,
    }
    assert parts(chatglm) == (28_672, 0, 0)


def test_two_shapes_of_heads_in_one_model_are_both_counted() -> None:
    assert parts(GEMMA_4_31B) == (81_920, 838_860_800, 0)
    told = {"text_config": GEMMA_4_31B["text_config"] | {"attention_k_eq_v": True}}
    assert any("twice" in text for text in known(GEMMA_4_31B | told).assumptions)


def test_chunked_layers_cap_at_their_chunk() -> None:
    scout = BF16 | {
        "model_type": "llama4",
        "text_config": {
            "model_type": "llama4_text",
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "hidden_size": 5120,
            "attention_chunk_size": 8192,
        },
    }
    assert parts(scout) == (49_152, 1_207_959_552, 0)
    marked = {**scout["text_config"], "no_rope_layers": [1, 1, 1, 0] * 12}
    assert parts(scout | {"text_config": marked}) == (49_152, 1_207_959_552, 0)


def test_model_without_grouped_heads_has_no_extra_head_factor() -> None:
    llama2 = LLAMA_8B | {"num_key_value_heads": None}
    assert parts(llama2) == (524_288, 0, 0)


def test_unknown_layout_is_refused_with_a_reason_and_an_upper_bound() -> None:
    deepseek_v4 = BF16 | {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 42,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "hidden_size": 4096,
        "q_lora_rank": 1024,
        "compress_ratios": [0, 0, 4, 128, 4],
    }
    refusal = refused(deepseek_v4)
    assert refusal.upper_bound_bytes_per_token == 84 * 1024
    assert "Unsupported attention layout" in refusal.summary()
    assert "Estimate not available (upper bound 86,016 bytes a token)" in refusal.summary()
    assert dict(refusal.facts)["compress_ratios"] == [0, 0, 4, 128, 4]


@pytest.mark.parametrize(
    "strange",
    [
        {"compress_ratios": [4, 128]},
        {"q_lora_rank": 1536},
        {"kv_lora_rank": 512},
        {"cla_share_factor": 2, "use_cla": True},
        {"block_configs": [{"attention": {"no_op": True}}]},
        {"num_kv_shared_layers": 10},
        {"index_topk": 2048},
        {"per_layer_config": {"0": {"head_dim": 512}}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_known_family_with_a_field_that_changes_its_layout_is_refused(strange: dict[str, Any]) -> None:
    refusal = refused(LLAMA_8B | strange)
    assert next(iter(strange)) in refusal.reason
    assert refusal.upper_bound_bytes_per_token == 131_072


def test_config_without_a_class_is_refused_and_not_taken_for_a_plain_one() -> None:
    nameless = {name: value for name, value in LLAMA_8B.items() if name != "model_type"}
    refusal = refused(nameless)
    assert "without model_type" in refusal.reason
    assert refusal.upper_bound_bytes_per_token == 131_072
