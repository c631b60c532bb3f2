"""Whether a model can be divided into as many parts as an engine's options say. Pure.

Each engine has its own rules, and only what it would end with, or could not serve with, is refused. Layers
need not divide evenly: vLLM and SGLang give some stages one more, or as the `environment` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workers.protocol.engines import own, sglang, vllm
from workers.protocol.engines.option import ENVIRONMENT, EXTRA_ARGUMENTS, read_environment, whole
from workers.protocol.engines.tables import STAGES, TABLES

_VLLM_PARTITION = "VLLM_PP_LAYER_PARTITION"
_SGLANG_PARTITION = "SGLANG_PP_LAYER_PARTITION"
_OVERRIDES = {vllm.VLLM: "hf_overrides", sglang.SGLANG: "json_model_override_args"}
"""Options whose fields replace those of config.json: what the model says of itself counts no more."""
_SGLANG_GROUPS = ("attn", "cp", "context-parallel")
"""In an untyped argument of SGLang: it may divide the attention in another way."""
_MOST_SIZES = 12


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model is divided. 0: not known, or it has none."""

    name: str
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    """0 also where all ranks keep the same latent (MLA)."""


@dataclass(frozen=True, slots=True)
class PartsProblem:
    """An option whose size does not go with the model; `why` says which do."""

    option: str
    why: str


Options = Mapping[str, Any]


def parts_problem(
    engine: str, options: Options, shape: ModelShape, *, pads_heads: bool = False
) -> PartsProblem | None:
    """Why a model cannot be divided so; `None` where it can, or nobody knows.

    `options` are checked ones. `pads_heads`: it may run on processors, where SGLang fills heads up.
    """
    if options.get(_OVERRIDES.get(engine, "")):
        return None
    match engine:
        case own.TORCH:
            return _stages_problem(STAGES, whole(options, STAGES, 1), shape)
        case vllm.VLLM:
            return _vllm_problem(options, shape)
        case sglang.SGLANG:
            return _sglang_problem(options, shape, pads_heads=pads_heads)
        case _:
            return None


def _vllm_problem(options: Options, shape: ModelShape) -> PartsProblem | None:
    option, stages = "pipeline_parallel_size", whole(options, "pipeline_parallel_size", 1)
    # A stage without layers has no KV, and leaves all the others one block: nothing is ever served.
    told = _partition(vllm.VLLM, options, _VLLM_PARTITION)
    return (
        _heads_problem("tensor_parallel_size", whole(options, "tensor_parallel_size", 1), shape)
        or _stages_problem(option, stages, shape)
        or (None if told is None else _partition_problem(_VLLM_PARTITION, told, stages, shape, least=1))
    )


def _sglang_problem(options: Options, shape: ModelShape, *, pads_heads: bool) -> PartsProblem | None:
    size, stages = whole(options, "tp_size", 1), whole(options, "pp_size", 1)
    copies = whole(options, "dp_size", 1) if options.get("enable_dp_attention") else 1
    if size % copies:
        words = _listed([n for n in range(1, size + 1) if size % n == 0])
        return PartsProblem("dp_size", f"it must divide tp_size {size} with enable_dp_attention: {words} do")
    extra = str(options.get(EXTRA_ARGUMENTS, "")).replace("_", "-")
    if not pads_heads and not any(word in extra for word in _SGLANG_GROUPS):
        problem = _heads_problem("tp_size", size // copies, shape, copies=copies)
        if problem:
            return problem
    # One stage takes no notice of the variable.
    told = _partition(sglang.SGLANG, options, _SGLANG_PARTITION) if stages > 1 else None
    return _stages_problem("pp_size", stages, shape) or (
        None if told is None else _partition_problem(_SGLANG_PARTITION, told, stages, shape, least=0)
    )


def _stages_problem(option: str, stages: int, shape: ModelShape) -> PartsProblem | None:
    if stages <= 1 or not shape.layers or stages <= shape.layers:
        return None
    has = _count(shape.layers, "layer")
    return PartsProblem(
        option, f"{shape.name} has {has}, and each stage needs one: give at most {shape.layers}"
    )


def _heads_problem(option: str, ranks: int, shape: ModelShape, *, copies: int = 1) -> PartsProblem | None:
    """`ranks` share the heads; `copies` groups of so many make up the option's number."""

    def fits(count: int) -> bool:
        few, many = sorted((count, shape.kv_heads or count))
        return shape.heads % count == 0 and many % few == 0

    if not shape.heads or fits(ranks):
        return None
    has = _count(shape.heads, "attention head")
    if shape.kv_heads:
        has += f" and {_count(shape.kv_heads, 'key-value head')}"
    sizes = _listed([count * copies for count in range(1, shape.heads + 1) if fits(count)])
    beside = f" with dp_size {copies}" if copies > 1 else ""
    return PartsProblem(
        option, f"{shape.name} has {has}, which {ranks} ranks cannot share evenly: give {sizes}{beside}"
    )


def _partition(engine: str, options: Options, variable: str) -> str | None:
    """How many layers each stage is to have, as said; `None` where that is left to the engine."""
    if ENVIRONMENT not in options:
        return None
    return read_environment(TABLES[engine], options).get(variable)


def _partition_problem(
    variable: str, told: str, stages: int, shape: ModelShape, *, least: int
) -> PartsProblem | None:
    try:
        layers = [int(word) for word in told.split(",")]
    except ValueError:
        return PartsProblem(
            ENVIRONMENT, f"{variable} takes one number for each stage, such as 8,8: not '{told}'"
        )
    if len(layers) != stages:
        return PartsProblem(ENVIRONMENT, f"{variable} names {len(layers)} stages, and there are {stages}")
    if min(layers) < least:
        return PartsProblem(
            ENVIRONMENT, f"{variable} leaves a stage {min(layers)} layers: give at least {least}"
        )
    if shape.layers and sum(layers) != shape.layers:
        has = f"{shape.name} has {shape.layers}"
        return PartsProblem(ENVIRONMENT, f"{variable} makes {sum(layers)} layers, and {has}")
    return None


def _count(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number} {what}s"


def _listed(numbers: list[int]) -> str:
    shown = [str(number) for number in numbers[:_MOST_SIZES]]
    if len(numbers) > _MOST_SIZES:
        return f"{', '.join(shown)} or another such number up to {numbers[-1]}"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"
