"""Whether an engine takes the longest sequence that its options ask for. Pure.

vLLM and SGLang end at once, after a minute of loading, where it is longer than what the model was made for,
unless a variable says that this is meant. The built-in engine serves the model's own length then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exaserve_ops.serving.domain.config_fields import POSITIONS
from exaserve_ops.serving.domain.context_length import context_length, merge_overrides
from exaserve_ops.serving.domain.engine_launch import LaunchError, read_launch
from workers.protocol.engines import sglang, vllm
from workers.protocol.engines.option import ENVIRONMENT, read_environment
from workers.protocol.engines.tables import TABLES

_MEANT = {
    vllm.VLLM: ("max_model_len", "VLLM_ALLOW_LONG_MAX_MODEL_LEN"),
    sglang.SGLANG: ("context_length", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"),
}
"""By engine the option, and the variable that lets it be longer than the model says."""
_OFF = ("", "0", "false")
_OTHER_LENGTHS = (*POSITIONS, "model_max_length")
"""Fields of config.json that versions of the engines go by: the largest is what none of them refuses."""


@dataclass(frozen=True, slots=True)
class LengthProblem:
    """An option that asks for more than the model has; `why` says what does."""

    option: str
    why: str


def length_problem(
    engine: str, options: Mapping[str, Any], config: Mapping[str, Any], *, model: str
) -> LengthProblem | None:
    """Why an engine will not start with its longest sequence; `None` where it will, or nobody knows.

    `options` are checked ones; `config` is the model's config.json, or what is known in its place.
    """
    if engine not in _MEANT:
        return None
    option, variable = _MEANT[engine]
    if read_environment(TABLES[engine], options).get(variable, "").lower() not in _OFF:
        return None
    try:
        launch = read_launch(engine, options)
    except LaunchError:
        return None  # what else is wrong is said elsewhere
    most = _most_tokens(merge_overrides(config, launch.overrides), engine)
    if most is None or launch.length_tokens is None or launch.length_tokens <= most:
        return None
    return LengthProblem(
        option,
        f"{model} was made for at most {most:,} tokens, and {TABLES[engine].title} does not start with "
        f"{launch.length_tokens:,}: give at most {most:,}, or, if it is meant, {variable}=1 in {ENVIRONMENT}",
    )


def _most_tokens(config: Mapping[str, Any], engine: str) -> int | None:
    """Longest sequence that no version refuses; `None` where the model does not say."""
    length = context_length(config, asked_tokens=None, engine=engine).model_tokens
    if length is None:
        return None
    stated = [config.get(name) for name in _OTHER_LENGTHS]
    return max([length, *(tokens for tokens in stated if type(tokens) is int)])
