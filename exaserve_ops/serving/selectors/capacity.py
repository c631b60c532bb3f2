"""What a capacity plan is made from: registered models, accelerators of the fleet, measured rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from exaserve_ops.inventory.domain.liveness import RETIRED
from exaserve_ops.inventory.models import Accelerator
from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.serving.domain.engine_launch import LaunchError, read_launch
from exaserve_ops.serving.domain.fleet_plan import MEASURED, STATED, UNKNOWN, Load, Rates, Workload
from exaserve_ops.serving.domain.lifecycle import DELETED
from exaserve_ops.serving.domain.memory_plan import ModelFigures
from exaserve_ops.serving.models import Deployment, Model, Replica
from exaserve_ops.telemetry.selectors import measured_rates

MEASURED_WITHIN = timedelta(hours=24)
PASTED = "pasted config"


@dataclass(frozen=True, slots=True)
class CapacityAsk:
    """One model of a question, as a page or REST reads it."""

    load: Load
    model: str = ""
    """Name of a registered model; empty: `config` and `weights_bytes` say what it is."""
    name: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    weights_bytes: int = 0
    engine: str = "vllm"
    engine_version: str = ""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    sequences: int | None = None
    budget_bytes: int | None = None
    seconds_per_request: float | None = None
    tokens_per_second: float | None = None
    measured_from: str = ""
    """Name of a deployment whose replicas' rates stand in for what is not stated."""
    measured_kv_bytes_per_token: int | None = None
    accepts_upper_bound: bool = False


@dataclass(frozen=True, slots=True)
class AcceleratorKind:
    """Accelerators of the fleet that are alike."""

    name: str
    kind: str
    memory_bytes: int
    per_node: int
    """On most of the nodes that have them."""
    nodes: int
    shares_memory: bool = False
    """Replicas with the same weights hold them on it once."""


def accelerator_kinds() -> list[AcceleratorKind]:
    """Kinds of accelerators that nodes have, the most frequent first."""
    rows = Accelerator.objects.filter(split=False).exclude(node__liveness=RETIRED)
    counts: dict[tuple[str, str, int], Counter[Any]] = {}
    apart: set[tuple[str, str, int]] = set()
    columns = ("node_id", "kind", "name", "memory_bytes", "shares_memory")
    for node, kind, name, size, shares_memory in rows.values_list(*columns):
        key = (name or kind, kind, size)
        counts.setdefault(key, Counter())[node] += 1
        if not shares_memory:
            apart.add(key)
    kinds = [
        AcceleratorKind(*key, Counter(by_node.values()).most_common(1)[0][0], len(by_node), key not in apart)
        for key, by_node in counts.items()
    ]
    return sorted(kinds, key=lambda found: (-found.nodes * found.per_node, found.name, found.memory_bytes))


def workload_of(ask: CapacityAsk, *, now: datetime) -> Workload:
    """Look up what an ask names. Raises `InvalidInputError` naming the field that cannot be used."""
    figures = _figures(ask)
    try:
        launch = read_launch(ask.engine, ask.engine_options, version=ask.engine_version)
    except LaunchError as error:
        where = "engine" if error.option == "engine" else f"engine_options.{error.option}"
        raise InvalidInputError(where, str(error)) from error
    return Workload(
        model=figures,
        launch=launch,
        load=ask.load,
        rates=_rates(ask, now),
        sequences=ask.sequences,
        budget_bytes=ask.budget_bytes,
    )


def _figures(ask: CapacityAsk) -> ModelFigures:
    if ask.model:
        model = Model.objects.filter(name=ask.model).first()
        if model is None:
            raise InvalidInputError("model", f"no model '{ask.model}' is registered")
        name, config = model.name, model.planning_config
        weights_bytes = ask.weights_bytes or model.weights_bytes
    else:
        name, config, weights_bytes = ask.name or PASTED, dict(ask.config), ask.weights_bytes
        if not config:
            raise InvalidInputError("config", "name a registered model, or give a config.json")
    return ModelFigures(
        name=name,
        config=config,
        weights_bytes=weights_bytes,
        measured_kv_bytes_per_token=ask.measured_kv_bytes_per_token,
        accepts_upper_bound=ask.accepts_upper_bound,
    )


def _rates(ask: CapacityAsk, now: datetime) -> Rates:
    """What is stated, and for the rest what a deployment's replicas did within the last day."""
    stated = Rates(
        ask.seconds_per_request,
        STATED if ask.seconds_per_request is not None else UNKNOWN,
        ask.tokens_per_second,
        STATED if ask.tokens_per_second is not None else UNKNOWN,
    )
    if not ask.measured_from:
        return stated
    deployment = Deployment.objects.filter(name=ask.measured_from).exclude(status=DELETED).first()
    if deployment is None:
        raise InvalidInputError("measured_from", f"there is no deployment '{ask.measured_from}'")
    ids = Replica.objects.filter(deployment=deployment).values_list("pk", flat=True)
    seen = measured_rates(list(ids), since=now - MEASURED_WITHIN)
    if seen is None:
        return stated
    seconds = ask.load.output_tokens / seen.tokens_per_second_a_sequence + (seen.ttft_seconds or 0.0)
    return Rates(
        ask.seconds_per_request if ask.seconds_per_request is not None else round(seconds, 3),
        STATED if ask.seconds_per_request is not None else MEASURED,
        ask.tokens_per_second if ask.tokens_per_second is not None else round(seen.tokens_per_second_each, 1),
        STATED if ask.tokens_per_second is not None else MEASURED,
    )
