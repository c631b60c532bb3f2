"""What a model folder says about its architecture. No torch: it is read before the port opens."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")

_BIASED_OUTPUT = ("LlamaForCausalLM", "Qwen3ForCausalLM")
"""Architectures whose attention_bias means all four projections."""
_SLIDING = "sliding_attention"
_MISSING = object()


class ModelConfigError(ValueError):
    """The model folder cannot be served by this engine; the message says why."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base frequency and, if scaled, how."""

    theta: float
    kind: str = "default"
    """One of `ROPE_KINDS`. `dynamic` scales only beyond the model's positions, where nothing is served."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    """Of `llama3`."""
    high_freq_factor: float = 4.0
    """Of `llama3`."""
    original_max_position_tokens: int = 8192
    beta_fast: float = 32.0
    """Of `yarn`: dimensions that turn more often within the original positions are left as they are."""
    beta_slow: float = 1.0
    """Of `yarn`: dimensions that turn less often are stretched by the whole factor."""
    truncate: bool = True
    """Of `yarn`: whether those bounds are rounded to whole dimensions."""
    attention_factor: float = 1.0
    """Of `yarn`: cosines and sines are multiplied by it."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Which part of a decoder one process computes."""

    number: int = 0
    count: int = 1
    first_layer: int = 0
    """Of the whole model."""

    @property
    def is_first(self) -> bool:
        """Whether tokens come in here."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether logits come out here."""
        return self.number == self.count - 1


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Architecture of a decoder of the Llama family, or of one stage of it (`stage_config`)."""

    architecture: str
    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    norm_epsilon: float
    rope: RopeConfig
    max_position_tokens: int
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    dtype: str
    """`float32`, `bfloat16` or `float16`: how the weights were saved."""
    eos_token_ids: frozenset[int]
    layer_windows: tuple[int | None, ...]
    """For each layer how many tokens back, itself included, a token sees; `None`: all of them."""
    stage: Stage = Stage()
    """What of the model `layers` are; by default all of it."""

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers that one token keeps in the KV pool."""
        return 2 * self.layers * self.kv_heads * self.head_size


def stage_config(config: ModelConfig, number: int, count: int) -> ModelConfig:
    """Return the part of a model that stage `number` of `count` computes. Raises `ModelConfigError`.

    All have as many layers, or the first ones one more: the last has the head.
    """
    if count > config.layers:
        raise ModelConfigError(f"{config.layers} layers cannot be split over {count} stages")
    share, more = divmod(config.layers, count)
    first = number * share + min(number, more)
    layers = share + (number < more)
    return replace(
        config,
        layers=layers,
        layer_windows=config.layer_windows[first : first + layers],
        stage=Stage(number, count, first),
    )


def read_model_config(model_dir: Path) -> ModelConfig:
    """Read config.json and generation_config.json. Raises `ModelConfigError`."""
    raw = _read_json(model_dir / "config.json")
    path = model_dir / "generation_config.json"
    generation = _read_json(path) if path.exists() else {}
    return parse_model_config(raw, generation)


def parse_model_config(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Turn the two files' contents into a config. Raises `ModelConfigError`."""
    architecture = _architecture(raw)
    _refuse_unsupported(raw)
    heads = _integer(raw, "num_attention_heads")
    hidden_size = _integer(raw, "hidden_size")
    kv_heads = _integer(raw, "num_key_value_heads", heads)
    if kv_heads < 1 or heads % kv_heads:
        raise ModelConfigError(f"{heads} heads cannot share {kv_heads} key-value heads evenly")
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocabulary_size=_integer(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(raw, "intermediate_size"),
        layers=_integer(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_size=_integer(raw, "head_dim", hidden_size // heads),
        norm_epsilon=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw),
        max_position_tokens=_integer(raw, "max_position_embeddings"),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "Qwen2ForCausalLM" or (architecture in _BIASED_OUTPUT and attention_bias),
        output_bias=architecture in _BIASED_OUTPUT and attention_bias,
        qk_norm=architecture == "Qwen3ForCausalLM",
        dtype=_dtype(raw),
        eos_token_ids=_token_ids(generation.get("eos_token_id", raw.get("eos_token_id"))),
        layer_windows=_layer_windows(raw, architecture),
    )


def _architecture(raw: Mapping[str, Any]) -> str:
    named = raw.get("architectures") or []
    for name in named:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    raise ModelConfigError(
        f"unsupported architecture {', '.join(map(str, named)) or '(none named)'}; "
        f"this engine serves {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("quantization_config"):
        raise ModelConfigError("quantized weights (quantization_config) are not supported")
    if raw.get("mlp_bias"):
        raise ModelConfigError("biases in the MLP (mlp_bias) are not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelConfigError(f"activation {raw['hidden_act']!r} is not supported; only silu is")


def _layer_windows(raw: Mapping[str, Any], architecture: str) -> tuple[int | None, ...]:
    layers = _integer(raw, "num_hidden_layers")
    if architecture == "LlamaForCausalLM":
        return (None,) * layers
    if architecture == "MistralForCausalLM":
        # Left out it means 4,096, as the format's first models had it; null means none.
        window = (
            None if raw.get("sliding_window", _MISSING) is None else _integer(raw, "sliding_window", 4096)
        )
        return (window,) * layers
    window = _integer(raw, "sliding_window", 4096) if raw.get("use_sliding_window") else None
    kinds = raw.get("layer_types")
    if kinds is None:
        first = _count(raw, "max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ModelConfigError(f"layer_types must name {layers} layers")
    if not set(kinds) <= {"full_attention", _SLIDING}:
        raise ModelConfigError(f"layer_types {sorted(map(str, set(kinds)))} are not all supported")
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Read both spellings: `rope_theta` with `rope_scaling`, and the newer `rope_parameters`."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ModelConfigError("rope_scaling must be an object")
    theta = float(scaling.get("rope_theta", raw.get("rope_theta", 10_000.0)))
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind not in ROPE_KINDS:
        raise ModelConfigError(f"rope scaling {kind!r} is not supported; {', '.join(ROPE_KINDS)} are")
    if float(scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))) != 1.0:
        raise ModelConfigError("rotating part of a head (partial_rotary_factor) is not supported")
    if kind == "default":
        return RopeConfig(theta)
    try:
        factor = float(scaling["factor"])
    except (KeyError, TypeError) as error:
        raise ModelConfigError(f"rope scaling {kind!r} needs a factor") from error
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_max_position_tokens=int(
            scaling.get("original_max_position_embeddings") or raw.get("max_position_embeddings", 8192)
        ),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        truncate=bool(scaling.get("truncate", True)),
        attention_factor=_attention_factor(scaling, factor) if kind == "yarn" else 1.0,
    )


def _attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """As told, else from how far positions are stretched: longer contexts need sharper scores."""
    told = scaling.get("attention_factor")
    if told is not None:
        return float(told)

    def sharpening(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    part, whole = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return sharpening(float(part)) / sharpening(float(whole)) if part and whole else sharpening(1.0)


def _dtype(raw: Mapping[str, Any]) -> str:
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ModelConfigError(f"weights of type {dtype!r} are not supported")
    return dtype


def _token_ids(value: object) -> frozenset[int]:
    if value is None:
        return frozenset()
    if isinstance(value, int):
        return frozenset({value})
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return frozenset(value)
    raise ModelConfigError(f"eos_token_id must be a token id or a list of them, not {value!r}")


def _integer(raw: Mapping[str, Any], name: str, default: object = _MISSING) -> int:
    value = raw.get(name)
    if value is None:
        value = default
    if value is _MISSING:
        raise ModelConfigError(f"config.json lacks {name}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelConfigError(f"config.json: {name} must be a positive integer, not {value!r}")
    return value


def _count(raw: Mapping[str, Any], name: str, default: int) -> int:
    value = raw.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ModelConfigError(f"config.json: {name} must be 0 or a positive integer, not {value!r}")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ModelConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelConfigError(f"{path} is not a JSON object")
    return value
