"""How long a sequence may be: after scaling of positions and after what a launch overrides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from exaserve_ops.serving.domain.class_defaults import CLASS_DEFAULTS
from exaserve_ops.serving.domain.config_fields import LARGEST, POSITIONS, find_text_model

_NOT_STRETCHED = frozenset({"default", "su", "longrope", "llama3", "mrope", "proportional"})
"""Kinds of scaling whose `factor` is in `max_position_embeddings` already, or that have none."""
_MOST_STRETCHED = 10_000
"""Larger factors are a slip of the pen."""
_STRETCHED_ALREADY = ("gemma3",)
"""Families whose `max_position_embeddings` counts the scaling, whatever its kind."""


@dataclass(frozen=True, slots=True)
class ContextLength:
    """Longest sequence of a launch."""

    tokens: int | None
    """`None` where neither config nor launch says."""
    model_tokens: int | None
    """What the model's config allows, scaling included."""
    why: str
    problem: str = ""
    """Why the engine will not start with it, or only if told to; empty if it will."""


def merge_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Lay overrides of a launch over a config, level by level. A null takes a field away."""
    merged = dict(config)
    for name, value in overrides.items():
        below = merged.get(name)
        if isinstance(value, Mapping) and isinstance(below, Mapping) and not _replaces(name):
            merged[name] = merge_overrides(below, value)
        elif value is None:
            merged.pop(name, None)
        else:
            merged[name] = value
    return merged


def context_length(
    config: Mapping[str, Any], *, asked_tokens: int | None, engine: str = "vllm"
) -> ContextLength:
    """Longest sequence of a launch with this config, overrides merged already.

    `asked_tokens`: as launched; `None`: whatever the model allows.
    """
    model_tokens, why = _model_tokens(config, engine)
    if asked_tokens is None:
        return ContextLength(model_tokens, model_tokens, why)
    problem = ""
    if model_tokens is not None and asked_tokens > model_tokens:
        problem = f"{asked_tokens:,} tokens are more than the model's {model_tokens:,}; engines refuse that"
    return ContextLength(asked_tokens, model_tokens, "as launched", problem)


def _replaces(name: str) -> bool:
    """Scalings are replaced whole: parts of two different ones mean nothing."""
    return name in ("rope_scaling", "rope_parameters")


def _model_tokens(config: Mapping[str, Any], engine: str) -> tuple[int | None, str]:
    text = find_text_model(config)
    stated = [text.config[name] for name in POSITIONS if _is_length(text.config.get(name))]
    if stated:
        positions, why = min(stated), "max_position_embeddings of config.json"
    else:
        defaults = CLASS_DEFAULTS.get(text.model_type)
        if defaults is None or defaults.positions is None:
            return None, "config.json does not say"
        positions, why = defaults.positions, f"as class {text.model_type} has it"
    if text.model_type.startswith(_STRETCHED_ALREADY):
        return positions, why
    return _stretched(positions, text.anywhere("rope_scaling", "rope_parameters"), engine, why)


def _stretched(positions: int, scaling: object, engine: str, why: str) -> tuple[int, str]:
    """With scaling of positions. The built-in engine serves the model's own positions, scaled or not."""
    if not isinstance(scaling, Mapping) or engine == "torch":
        return positions, why
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    factor = scaling.get("factor")
    if kind in _NOT_STRETCHED or not _is_factor(factor):
        return positions, why
    original = scaling.get("original_max_position_embeddings")
    if _is_length(original):
        if engine == "sglang":
            return positions, f"{why}, which counts {kind} scaling"
        if kind == "yarn":
            positions = original
    return int(positions * factor), f"{positions:,} positions stretched {factor:g} times by {kind}"


def _is_factor(value: object) -> TypeGuard[float]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 1 <= value <= _MOST_STRETCHED  # type: ignore[operator]  # a number by then


def _is_length(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST
