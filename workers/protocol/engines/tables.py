"""The tables of all engines whose options are known, by name, and what options say together."""

from __future__ import annotations

from workers.protocol.engines import own, sglang, vllm
from workers.protocol.engines.option import EngineTable, Options, whole

STAGES = "pipeline_stages"
"""Option of the built-in engine: parts of the model, one on each node."""

TABLES: dict[str, EngineTable] = {
    table.engine: table for table in (own.TORCH_TABLE, vllm.TABLE, sglang.TABLE, own.SIMULATED_TABLE)
}


def accelerators_of(engine: str, options: Options) -> int:
    """Accelerators that one replica with these options takes, on all its nodes."""
    match engine:
        case vllm.VLLM:
            return vllm.ranks(options)
        case sglang.SGLANG:
            return sglang.ranks(options)
        case own.TORCH:
            return whole(options, STAGES, 1)
        case _:
            return 1


def nodes_of(engine: str, options: Options) -> int | None:
    """Nodes that one replica with these options has to have; `None`: its accelerators decide."""
    return whole(options, STAGES, 1) if engine == own.TORCH else None


def parallel_words(engine: str, options: Options) -> str:
    """What decides on that number, as it was said; empty for engines that always take one."""
    match engine:
        case vllm.VLLM:
            return vllm.parallel_words(options)
        case sglang.SGLANG:
            return sglang.parallel_words(options)
        case own.TORCH:
            return f"{STAGES} {whole(options, STAGES, 1)}"
        case _:
            return ""


def spans_nodes(engine: str) -> bool:
    """Whether one replica can run on several nodes at once, with options that say so."""
    return engine in {vllm.VLLM, sglang.SGLANG, own.TORCH, own.SIMULATED, own.SIMULATED_NODE}


def takes_any_parts(engine: str) -> bool:
    """Whether a replica over several nodes has as many parts as it is given."""
    return engine in {own.SIMULATED, own.SIMULATED_NODE}


def span_obstacle(engine: str, options: Options) -> tuple[str, str]:
    """Which option does not go with several nodes to a replica, and why; both empty if all do."""
    copies = "data_parallel_size"
    if engine == vllm.VLLM and whole(options, copies, 1) > 1:
        return copies, "it is for copies on one node: leave it out, and have more replicas instead"
    return "", ""
