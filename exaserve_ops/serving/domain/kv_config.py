"""From a model's config.json to the layout of its memory, or why that is not known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from exaserve_ops.serving.domain import config_fields
from exaserve_ops.serving.domain.class_defaults import CLASS_DEFAULTS
from exaserve_ops.serving.domain.config_fields import (
    LARGEST,
    Fields,
    LayoutError,
    TextModel,
    find_text_model,
    within_layers,
)
from exaserve_ops.serving.domain.kv_dtypes import checkpoint_dtype, checkpoint_kv_dtype, element_type
from exaserve_ops.serving.domain.kv_families import FAMILIES, Family
from exaserve_ops.serving.domain.kv_layout import KvLayout, LayerMemory, UnknownLayout

_LAYOUT_FIELDS = frozenset(
    {
        "_sliding_window_pattern", "attention_chunk_size", "attention_pattern", "attn_layer_indices",
        "attn_layer_period", "attn_type_list", "block_configs", "cla_share_factor", "compress_ratios",
        "full_attention_interval", "global_head_dim", "hybrid_override_pattern", "index_head_dim",
        "index_topk", "kv_lora_rank", "layers_block_type", "linear_attn_config",
        "linear_num_value_heads", "mamba_d_state", "mamba_expand", "mamba_num_heads",
        "num_global_key_value_heads", "num_kv_shared_layers", "per_layer_config", "q_lora_rank",
        "sliding_window_pattern", "sparse_attention_config", "sparse_config", "ssm_cfg",
        "ssm_state_size", "state_size", "swa_head_dim", "swa_num_key_value_heads", "v_head_dim",
    }
)  # fmt: skip
"""Fields that change what a layer keeps. One that is set and that the reader does not know is refused."""

_ATTENTION_NESTS = ("attn_config", "attention_config")
"""Where DBRX and MPT keep their head counts."""


def read_layout(config: Mapping[str, Any]) -> KvLayout | UnknownLayout:
    """Read what config.json says about memory. Vision and audio towers count in weights only.

    A family that is not known, or a field that changes the layout in a way that is not known, is refused,
    with an upper bound where one exists.
    """
    text = find_text_model(config)
    fields = _fields(text)
    family = FAMILIES.get(text.model_type)
    if family is None:
        named = f"model_type '{text.model_type}'" if text.model_type else "a config without model_type"
        return _unknown(text, f"{named} is not among the {len(FAMILIES)} that are known")
    try:
        _refuse_strange_fields(fields, family)
        layers = family.read(fields)
        return KvLayout(
            model_type=text.model_type,
            layers=layers,
            attention_heads=fields.heads() if any(layer.heads for layer in layers) else 0,
            hidden=fields.hidden(),
            intermediate=fields.optional(config_fields.INTERMEDIATE) or 0,
            vocabulary=_vocabulary(text),
            dtype=checkpoint_dtype(text.anywhere("dtype", "torch_dtype")),
            kv_dtype=checkpoint_kv_dtype(text.anywhere("quantization_config", "compression_config")),
            draft_layers=_draft_layers(fields, family, layers),
            assumptions=fields.assumptions,
            is_quantised=text.anywhere("quantization_config", "compression_config") is not None,
            cache_default=family.cache_default,
        )
    except LayoutError as error:
        return _unknown(text, str(error))


def _fields(text: TextModel) -> Fields:
    config = dict(text.config)
    for name in _ATTENTION_NESTS:
        nest = config.get(name)
        if isinstance(nest, Mapping):
            config = {
                **{k: v for k, v in nest.items() if v is not None and k in config_fields.KV_HEADS},
                **config,
            }
    return Fields(config, CLASS_DEFAULTS.get(text.model_type), text.model_type)


def _refuse_strange_fields(fields: Fields, family: Family) -> None:
    strange = sorted(
        name
        for name in _LAYOUT_FIELDS - family.understands
        if fields.is_set(name) and not _is_harmless(fields, name)
    )
    if strange:
        told = ", ".join(f"'{name}'" for name in strange)
        raise LayoutError(f"{told} of model_type '{fields.model_type}' is not understood")


def _is_harmless(fields: Fields, name: str) -> bool:
    if name == "v_head_dim":
        return bool(fields.raw(name) == fields.raw("head_dim"))
    if name == "cla_share_factor":
        return not fields.is_set("use_cla")
    return False


def _draft_layers(fields: Fields, family: Family, layers: tuple[LayerMemory, ...]) -> tuple[LayerMemory, ...]:
    """Layers for multi-token prediction: each keeps what a layer with attention keeps."""
    told = fields.optional(("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"))
    count = within_layers(told if told is not None else family.draft_layers)
    attending = [layer for layer in layers if layer.heads and layer.window_tokens is None]
    return (replace(attending[-1], state=()),) * count if attending else ()


def _vocabulary(text: TextModel) -> int:
    value = text.anywhere("vocab_size", "padded_vocab_size")
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST else 0


def _unknown(text: TextModel, reason: str) -> UnknownLayout:
    """With the bound that full keys and values in every layer would be, where the fields for it are there."""
    fields = Fields({k: v for k, v in text.config.items() if k != "multi_query"}, None, text.model_type)
    dtype = element_type(checkpoint_dtype(text.anywhere("dtype", "torch_dtype")))
    try:
        layers = fields.optional(config_fields.LAYERS)
        bound = None if layers is None else layers * 2 * fields.kv_heads() * _widest_head(fields)
    except LayoutError:
        bound = None
    facts = tuple((name, fields.raw(name)) for name in sorted(_LAYOUT_FIELDS) if fields.is_set(name))
    return UnknownLayout(
        reason, bound, int(dtype.bytes_each) if dtype and dtype.bytes_each >= 1 else 2, facts
    )


def _widest_head(fields: Fields) -> int:
    sizes = (fields.optional((name,)) for name in ("global_head_dim", "v_head_dim"))
    return max(fields.head_dim(), *(size or 0 for size in sizes))
