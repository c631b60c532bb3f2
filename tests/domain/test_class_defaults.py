"""What our table says of a class against the class itself."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from exaserve_ops.serving.domain.class_defaults import CLASS_DEFAULTS, ClassDefaults
from exaserve_ops.serving.domain.kv_bytes import KvBytes, kv_bytes_of

_OUTER = {
    name: name.removesuffix("_text")
    for name in (
        "qwen2_vl_text",
        "qwen2_5_vl_text",
        "qwen2_5_omni_text",
        "qwen3_vl_text",
        "qwen3_vl_moe_text",
    )
}
"""Classes that the library lists only inside the class around them."""
_NO_ATTENTION = {"mamba", "mamba2", "falcon_mamba"}
_SEVERAL_SHAPES = {"gemma4_text"}
"""Their class refuses to name one head size."""


def class_of(model_type: str) -> Any:
    if model_type in _OUTER:
        return type(CONFIG_MAPPING[_OUTER[model_type]]().get_text_config())
    return CONFIG_MAPPING[model_type]


def made(model_type: str, **fields: Any) -> Any:
    return class_of(model_type)(**fields)


@pytest.mark.parametrize("model_type", sorted(CLASS_DEFAULTS))
def test_table_agrees_with_the_class(model_type: str) -> None:
    ours, theirs = CLASS_DEFAULTS[model_type], made(model_type)
    assert ours.layers == theirs.num_hidden_layers or model_type == "nemotron_h"
    assert ours.hidden == theirs.hidden_size
    assert ours.positions == getattr(theirs, "max_position_embeddings", None)
    if model_type not in _NO_ATTENTION:
        assert ours.heads == theirs.num_attention_heads
        check_heads(model_type, ours)


def check_heads(model_type: str, ours: ClassDefaults) -> None:
    """Twice the query heads: do key-value heads follow, or has the class a number of its own?"""
    doubled = made(model_type, num_attention_heads=2 * ours.heads)
    if model_type not in _SEVERAL_SHAPES:
        theirs = getattr(doubled, "num_key_value_heads", None) or 2 * ours.heads
        one_for_all = getattr(doubled, "multi_query", False)
        assert one_for_all or (ours.kv_heads or 2 * ours.heads) == theirs
        wide = made(model_type, hidden_size=2 * ours.hidden)
        size = getattr(wide, "head_dim", None)
        latent = getattr(wide, "kv_lora_rank", None) is not None
        assert latent or (ours.head_dim or 2 * ours.hidden // ours.heads) == (
            size or 2 * ours.hidden // ours.heads
        )


LISTS_LAYERS = (
    "cohere2", "exaone4", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gpt_oss", "llama4_text",
    "ministral", "olmo3", "qwen2", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
)  # fmt: skip


@pytest.mark.parametrize("model_type", LISTS_LAYERS)
def test_rule_for_layers_is_the_one_by_which_the_class_lists_them(model_type: str) -> None:
    """A config with nothing in it, and one with the list that its class saves, mean the same."""
    bare = {"model_type": model_type, "dtype": "bfloat16"}
    empty = kv_bytes_of(bare)
    listed = kv_bytes_of(bare | {"layer_types": made(model_type).to_dict()["layer_types"]})
    assert isinstance(empty, KvBytes)
    assert isinstance(listed, KvBytes)
    assert empty.whole == listed.whole
