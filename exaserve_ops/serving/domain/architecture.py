"""What a model's config.json says about it, for people; and a config again, for models that have none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exaserve_ops.serving.domain.class_defaults import CLASS_DEFAULTS
from exaserve_ops.serving.domain.config_fields import (
    LARGEST,
    Fields,
    LayoutError,
    TextModel,
    find_text_model,
)
from exaserve_ops.serving.domain.context_length import context_length
from exaserve_ops.serving.domain.kv_dtypes import checkpoint_dtype


class UnknownArchitectureError(ValueError):
    """The config is none of a language model; the message names what is missing."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Facts of a language model. 0: the config does not say, or the model has no such thing."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_context_tokens: int
    dtype: str

    def as_config(self) -> dict[str, Any]:
        """A config.json that says the same, for a model that was registered without its own."""
        return {
            "model_type": self.family,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.max_context_tokens,
            "torch_dtype": self.dtype,
            "sliding_window": None,
        }


def described_config(facts: Mapping[str, Any], max_context_tokens: int) -> dict[str, Any]:
    """A config.json for recorded facts; empty where they are none of a model."""
    names = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocabulary")
    counts = {name: facts.get(name) for name in names}
    if not facts.get("family") or not all(isinstance(value, int) for value in counts.values()):
        return {}
    described = Architecture(
        family=str(facts["family"]),
        max_context_tokens=max_context_tokens,
        dtype=str(facts.get("dtype", "")),
        **{name: int(str(value)) for name, value in counts.items()},
    )
    return described.as_config()


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a hub's config.json. Whether its memory can be computed is another question (`kv_bytes_of`).

    Raises `UnknownArchitectureError` that names what is missing.
    """
    text = find_text_model(config)
    if not text.model_type:
        raise UnknownArchitectureError("config.json names no 'model_type'")
    fields = Fields(text.config, CLASS_DEFAULTS.get(text.model_type), text.model_type)
    try:
        layers, hidden = fields.layers(), fields.hidden()
    except LayoutError as error:
        raise UnknownArchitectureError(str(error)) from error
    heads, kv_heads, head_dim = _heads(fields)
    return Architecture(
        family=text.model_type,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=_vocabulary(text),
        max_context_tokens=context_length(config, asked_tokens=None).model_tokens or 0,
        dtype=checkpoint_dtype(text.anywhere("dtype", "torch_dtype")),
    )


def _heads(fields: Fields) -> tuple[int, int, int]:
    """Query heads, key-value heads and head size; zeros for a model without, or of another shape."""
    try:
        return fields.heads(), fields.kv_heads(), fields.head_dim()
    except LayoutError:
        return 0, 0, 0


def _vocabulary(text: TextModel) -> int:
    value = text.anywhere("vocab_size", "padded_vocab_size")
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST else 0
