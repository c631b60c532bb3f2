"""What a model's config.json says about its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KNOWN_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


class UnknownArchitectureError(ValueError):
    """The layout is not one whose memory this version can compute; guessing would be worse."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Facts that memory planning needs. Dense attention with one KV head count for all layers."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_context_tokens: int
    dtype: str

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token over all layers, in the weights' own type."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _DTYPE_BYTES[self.dtype]


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a hub's config.json. Raises `UnknownArchitectureError` that names what is missing."""
    family = str(config.get("model_type", ""))
    if family not in KNOWN_FAMILIES:
        known = ", ".join(sorted(KNOWN_FAMILIES))
        raise UnknownArchitectureError(f"model_type '{family}' is not one of {known}")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if dtype not in _DTYPE_BYTES:
        raise UnknownArchitectureError(f"dtype '{dtype}' is not one of {', '.join(_DTYPE_BYTES)}")
    heads = _positive(config, "num_attention_heads")
    hidden = _positive(config, "hidden_size")
    return Architecture(
        family=family,
        layers=_positive(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocabulary=_positive(config, "vocab_size"),
        max_context_tokens=_positive(config, "max_position_embeddings"),
        dtype=dtype,
    )


def _positive(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise UnknownArchitectureError(f"config.json has no usable '{name}' (found {value!r})")
    return value
