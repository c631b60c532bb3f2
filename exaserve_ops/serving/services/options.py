"""What engines and their options are checked against, and what is computed where nobody says it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from exaserve_ops.inventory.selectors import nodes_in_service
from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.lib.units import size_text
from exaserve_ops.serving.domain.accelerator_wish import WHOLE
from exaserve_ops.serving.domain.architecture import UnknownArchitectureError, read_architecture
from exaserve_ops.serving.domain.config_fields import find_text_model
from exaserve_ops.serving.domain.context_limit import length_problem
from exaserve_ops.serving.domain.engine_launch import TORCH
from exaserve_ops.serving.domain.kv_bytes import KvBytes, KvOptions, kv_bytes_of
from exaserve_ops.serving.domain.model_parts import ModelShape, parts_problem
from exaserve_ops.serving.domain.reservation import CPU
from exaserve_ops.serving.models import Model
from workers.protocol.confidential import find_secret
from workers.protocol.engines.kinds import EngineOptionError
from workers.protocol.engines.option import EngineTable, option_arguments, read_version
from workers.protocol.engines.tables import (
    STAGES,
    TABLES,
    accelerators_of,
    nodes_of,
    parallel_words,
    span_obstacle,
    spans_nodes,
    takes_any_parts,
)

BUILT_IN_ENGINES = frozenset({"torch", "simulated", "simulated-node"})
LEAST_START_SECONDS = 300
SLOW_READ_BYTES_PER_SECOND = 100 << 20
LEAST_MEMORY_BYTES = 1 << 20
_SHRINKING_OPTIONS = frozenset({"quantization", "cpu_offload_gb", "torchao_config"})
"""Options by which an engine holds less of the weights than their files are."""
_ENGINE_OPTION_TYPES = (str, int, float, bool)


def check_engine(engine: str) -> None:
    """Refuse what is neither built in nor offered by a node that has joined. Raises `InvalidInputError`."""
    if engine in BUILT_IN_ENGINES or nodes_in_service().filter(engines__contains=[engine]).exists():
        return
    offered = {name for names in nodes_in_service().values_list("engines", flat=True) for name in names}
    known = ", ".join(sorted(offered | BUILT_IN_ENGINES))
    raise InvalidInputError("engine", f"no node offers '{engine}'; what there is: {known}")


def check_options(engine: str, options: Mapping[str, Any], accelerators: int = 1, *, nodes: int = 1) -> None:
    """Refuse what the engine would not start with, and secrets. Raises `InvalidInputError`.

    `accelerators`: on each of the `nodes` that one replica has. Every version that a node has is asked, since
    a replica may be placed on any of them.
    """
    for name, value in options.items():
        if not isinstance(value, _ENGINE_OPTION_TYPES):
            raise InvalidInputError(f"engine_options.{name}", "give text, a number, true or false")
        secret = find_secret(name) or find_secret(str(value))
        if secret:
            raise InvalidInputError(
                f"engine_options.{name}",
                f"{secret}: no secrets here, since options are shown and stand on a command line; an engine "
                "gets its key from its agent",
            )
    table = TABLES.get(engine)
    if table is not None:
        _check_table(table, options)
    _check_parts(engine, table, options, accelerators, nodes)


def _check_parts(
    engine: str, table: EngineTable | None, options: Mapping[str, Any], accelerators: int, nodes: int
) -> None:
    """Refuse parts that do not make up one replica. Raises `InvalidInputError`."""
    if nodes > 1 and not spans_nodes(engine):
        able = ", ".join(name for name in sorted(TABLES) if spans_nodes(name))
        raise InvalidInputError(
            "nodes_per_replica", f"'{engine}' runs on one node; what can run on several at once: {able}"
        )
    option, obstacle = span_obstacle(engine, options) if nodes > 1 else ("", "")
    if option:
        raise InvalidInputError(f"engine_options.{option}", obstacle)
    needed, told = accelerators_of(engine, options), parallel_words(engine, options)
    if nodes > 1 and not takes_any_parts(engine) and needed != nodes * accelerators:
        raise InvalidInputError(
            "nodes_per_replica",
            f"{told} need {needed} accelerators for each replica, and {nodes} nodes with {accelerators} each "
            f"have {nodes * accelerators}: {_sized(engine, nodes * accelerators)}, or change how many",
        )
    span = nodes_of(engine, options)
    if span not in (None, nodes):
        raise InvalidInputError(
            "nodes_per_replica",
            f"{told} takes {span} for each replica, not {nodes}: give {span}, or {_sized(engine, nodes)}",
        )
    counts = table is not None and bool(table.environment_prefixes or needed > 1)
    if counts and needed != nodes * accelerators:
        raise InvalidInputError(
            "accelerators_per_replica",
            f"{told} need {needed} for each replica, not {accelerators}: give {needed}, or "
            f"{_sized(engine, accelerators)}",
        )


def _sized(engine: str, accelerators: int) -> str:
    """What to say so that the options make up so many accelerators."""
    if engine == TORCH:
        return f"{STAGES} = {accelerators}"
    return f"let the parallel sizes multiply to {accelerators}"


def check_model(engine: str, options: Mapping[str, Any], model: Model) -> None:
    """Refuse what the model, where it is known, cannot be run with. Raises `InvalidInputError`.

    That is parts that it cannot be divided into, and longer sequences than the engine lets it have.
    """
    pads_heads = nodes_in_service().filter(engines__contains=[engine], accelerators__kind=CPU).exists()
    problem = parts_problem(engine, options, _shape_of(model), pads_heads=pads_heads) or length_problem(
        engine, options, model.planning_config, model=model.name
    )
    if problem is not None:
        raise InvalidInputError(f"engine_options.{problem.option}", problem.why)


def _shape_of(model: Model) -> ModelShape:
    """Layers and heads by the model's facts, or else by its config.json."""
    known = {name: model.architecture.get(name) for name in ("layers", "heads", "kv_heads")}
    if not known["layers"]:
        try:
            read = read_architecture(model.config)
        except UnknownArchitectureError:
            return ModelShape(model.name)
        known = {"layers": read.layers, "heads": read.heads, "kv_heads": read.kv_heads}
    if model.config and "kv_lora_rank" in find_text_model(model.config).config:
        known["kv_heads"] = 0
    return ModelShape(model.name, **{n: v if isinstance(v, int) else 0 for n, v in known.items()})


def check_span(nodes: int, asked: Mapping[str, Any], named: Collection[str]) -> None:
    """Refuse what a replica over several nodes cannot have. Raises `InvalidInputError`."""
    if nodes <= 1:
        return
    for name in ("accelerator", "mps_thread_percent", "mps_memory_bytes"):
        if asked.get(name) not in (None, "", WHOLE):
            raise InvalidInputError(name, "a replica over several nodes takes whole accelerators")
    if named and len(set(named)) < nodes:
        raise InvalidInputError(
            "nodes", f"each replica takes {nodes} nodes, and only {len(set(named))} may be used: name more"
        )


def _check_table(table: EngineTable, options: Mapping[str, Any]) -> None:
    nodes_by_version: dict[str, list[str]] = {}
    if table.environment_prefixes:
        offering = nodes_in_service().filter(engines__contains=[table.engine])
        for name, versions in offering.values_list("name", "engine_versions"):
            nodes_by_version.setdefault(versions.get(table.engine, ""), []).append(name)
    for version, nodes in sorted(nodes_by_version.items()) or [("", [])]:
        try:
            option_arguments(table, options, read_version(version))
        except EngineOptionError as error:
            where = f" (on {_few(nodes)})" if len(nodes_by_version) > 1 else ""
            name = f"engine_options.{error.option}" if error.option else "engine_options"
            raise InvalidInputError(name, f"{error}{where}") from error


def _few(names: list[str]) -> str:
    shown, more = sorted(names)[:3], len(names) - 3
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def default_start_seconds(model: Model) -> int:
    """Five minutes, and time to read the weights from a slow disk or a busy share."""
    return LEAST_START_SECONDS + model.weights_bytes // SLOW_READ_BYTES_PER_SECOND


def default_memory_bytes(model: Model, engine: str, *, nodes: int = 1) -> int:
    """Weights, KV for four longest contexts, and a quarter of both for activations and overhead.

    Of a replica over several nodes the part of each. 0 where one of them is not known: placement waits
    then until somebody says it.
    """
    # The built-in engine keeps all tokens of layers with a window, too.
    kv = kv_bytes_of(model.planning_config, KvOptions(windows_off=engine == TORCH))
    if not (model.weights_bytes and model.max_context_tokens and isinstance(kv, KvBytes)):
        return 0
    return (model.weights_bytes + 4 * kv.whole.bytes_at(model.max_context_tokens)) * 5 // 4 // nodes


def check_memory(
    memory_bytes: int, model: Model, engine: str, options: Mapping[str, Any], *, nodes: int = 1
) -> None:
    """Refuse memory that no replica can start with. 0: it is computed. Raises `InvalidInputError`.

    Half of the weights must fit, each node's part of it: their files may be twice as precise as what runs.
    Not where the engine is told to store them smaller or elsewhere, or has none.
    """
    has_all = not (_SHRINKING_OPTIONS & options.keys() or engine.startswith("simulated"))
    weights = -(-model.weights_bytes // (2 * nodes)) if has_all else 0
    least = max(LEAST_MEMORY_BYTES, weights)
    if 0 < memory_bytes < least:
        why = f"half of its weights, which take {size_text(model.weights_bytes)}" if weights == least else ""
        told = f" ({why}{', on each node its part' if nodes > 1 else ''})" if why else ""
        raise InvalidInputError(
            "replica_memory_bytes", f"give at least {least:,} bytes{told}, or 0 to have it computed"
        )
