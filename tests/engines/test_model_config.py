from __future__ import annotations

from typing import Any

import pytest

from workers.engines.torch_engine.config import ModelConfigError, parse_model_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rope_theta": 5000.0,
    "eos_token_id": 7,
}
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": 32,
    "max_window_layers": 1,
}
MISTRAL: dict[str, Any] = {"architectures": ["MistralForCausalLM"]}


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({}, (None, None)),
        ({"sliding_window": 32}, (None, None)),  # means nothing to a Llama
        (QWEN2, (None, 32)),
        ({**QWEN2, "max_window_layers": 0}, (32, 32)),
        ({**QWEN2, "use_sliding_window": False}, (None, None)),
        ({**QWEN2, "layer_types": ["sliding_attention", "full_attention"]}, (32, None)),
        (MISTRAL, (4096, 4096)),
        ({**MISTRAL, "sliding_window": 64}, (64, 64)),
        ({**MISTRAL, "sliding_window": None}, (None, None)),
    ],
)
def test_each_layer_has_the_window_that_the_format_gives_it(
    change: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert parse_model_config({**LLAMA, **change}, {}).layer_windows == windows


def test_defaults_are_those_of_the_format() -> None:
    config = parse_model_config(LLAMA, {})
    assert (config.kv_heads, config.head_size) == (4, 16)
    assert config.rope.theta == 5000
    assert config.eos_token_ids == {7}
    assert not config.tied_embeddings


def test_generation_config_may_name_several_ends() -> None:
    config = parse_model_config(LLAMA, {"eos_token_id": [7, 9]})
    assert config.eos_token_ids == {7, 9}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "unsupported architecture GPT2LMHeadModel"),
        ({"architectures": None}, "none named"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "longrope"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": None}}, "needs a factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "linear"}}, "needs a factor"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({**QWEN2, "layer_types": ["full_attention"]}, "2 layers"),
        ({**QWEN2, "layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({**QWEN2, "max_window_layers": -1}, "max_window_layers"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"torch_dtype": "int8"}, "int8"),
    ],
)
def test_what_this_engine_cannot_serve_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        parse_model_config({**LLAMA, **change}, {})
