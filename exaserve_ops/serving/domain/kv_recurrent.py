"""Layers that keep a fixed state of each sequence instead of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exaserve_ops.serving.domain.config_fields import LARGEST, Fields, LayoutError
from exaserve_ops.serving.domain.kv_dtypes import element_type
from exaserve_ops.serving.domain.kv_layout import RECURRENT, LayerMemory, StatePart

_FLOAT32_BYTES = 4


def delta_net_state(fields: Fields) -> LayerMemory:
    """Gated delta net (Qwen3-Next, Qwen3.5): a matrix a value head, and the newest inputs of a convolution.

    The matrices are float32. The convolution's inputs have the model's type in Qwen3-Next; for Qwen3.5,
    whose configs name float32 for the state, engines were seen to allocate float32 for both.
    """
    value_heads = fields.whole(("linear_num_value_heads",), 32)
    key_heads = fields.whole(("linear_num_key_heads",), 16)
    key_dim = fields.whole(("linear_key_head_dim",), 128)
    value_dim = fields.whole(("linear_value_head_dim",), 128)
    kernel = fields.whole(("linear_conv_kernel_dim",), 4)
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    convolution = None if fields.model_type == "qwen3_next" else _FLOAT32_BYTES
    return LayerMemory(
        RECURRENT,
        state=(
            StatePart("state", value_heads, key_dim * value_dim, _state_bytes(fields, "mamba_ssm_dtype")),
            StatePart("convolution", channels, kernel - 1, convolution),
        ),
    )


def delta_attention_state(config: Mapping[str, Any]) -> LayerMemory:
    """Kimi's delta attention: a float32 matrix a head, and a convolution over queries, keys and values.

    Raises `LayoutError` where `linear_attn_config` lacks a field.
    """
    heads, size = config.get("num_heads"), config.get("head_dim")
    kernel = config.get("short_conv_kernel_size", 4)
    if not all(isinstance(value, int) and 0 < value <= LARGEST for value in (heads, size, kernel)):
        raise LayoutError("'linear_attn_config' lacks 'num_heads' or 'head_dim'")
    heads, size = int(heads or 0), int(size or 0)
    return LayerMemory(
        RECURRENT,
        state=(
            StatePart("state", heads, size * size, _FLOAT32_BYTES),
            StatePart("convolution", 3 * heads * size, kernel - 1),
        ),
    )


def mamba_state(fields: Fields) -> LayerMemory:
    """Mamba (first version): a state and a convolution of each channel."""
    expand = fields.whole(("mamba_expand", "expand"), 2)
    channels = expand * fields.hidden()
    if fields.model_type in ("mamba", "falcon_mamba"):
        channels = fields.optional(("intermediate_size",)) or channels
    size = fields.whole(("mamba_d_state", "state_size"), 16)
    kernel = fields.whole(("mamba_d_conv", "conv_kernel"), 4)
    return LayerMemory(
        RECURRENT,
        state=(
            StatePart("state", channels, size, _state_bytes(fields, "mamba_ssm_cache_dtype")),
            StatePart("convolution", channels, kernel - 1),
        ),
    )


def mamba2_state(fields: Fields) -> LayerMemory:
    """Mamba 2: a matrix a head, and a convolution over inputs and both groups' projections."""
    size = fields.whole(("mamba_d_state", "ssm_state_size", "state_size"))
    kernel = fields.whole(("mamba_d_conv", "conv_kernel"), 4)
    groups = fields.whole(("mamba_n_groups", "n_groups"))
    heads = fields.whole(("mamba_n_heads", "mamba_num_heads", "num_heads"))
    head_dim = _mamba_head_dim(fields, heads)
    channels = heads * head_dim + 2 * groups * size
    return LayerMemory(
        RECURRENT,
        state=(
            StatePart("state", heads, head_dim * size, _state_bytes(fields, "mamba_ssm_cache_dtype")),
            StatePart("convolution", channels, kernel - 1),
        ),
    )


def short_convolution_state(fields: Fields) -> LayerMemory:
    """LFM2: the newest inputs of a short convolution."""
    kernel = fields.whole(("conv_L_cache",), 3)
    return LayerMemory(RECURRENT, state=(StatePart("convolution", fields.hidden(), kernel - 1),))


def _mamba_head_dim(fields: Fields, heads: int) -> int:
    names = ("mamba_head_dim",) if fields.is_set("mamba_head_dim") else ("mamba_d_head",)
    if fields.is_set(names[0]) and fields.raw(names[0]) != "auto":
        return fields.whole(names)
    if fields.model_type == "mamba2":
        return fields.whole(("head_dim",), 64)
    inner = fields.optional(("mamba_d_ssm",)) or fields.whole(("mamba_expand", "expand"), 2) * fields.hidden()
    if inner % heads:
        raise LayoutError(f"{heads} state heads do not divide an inner size of {inner}")
    return inner // heads


def _state_bytes(fields: Fields, name: str) -> int:
    """As the config says; else float32, the largest that engines use."""
    stated = fields.raw(name)
    known = element_type(str(stated)) if stated else None
    return _FLOAT32_BYTES if known is None else int(known.bytes_each)
