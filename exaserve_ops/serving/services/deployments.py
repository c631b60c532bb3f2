"""Writing of deployments: what people want."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import IntegrityError, transaction

from exaserve_ops.audit.services import Subject, record_event
from exaserve_ops.inventory.models import Node
from exaserve_ops.lib.errors import ConflictError, InvalidInputError, StaleError
from exaserve_ops.lib.hints import ring
from exaserve_ops.serving.domain import sleep
from exaserve_ops.serving.domain.accelerator_wish import ANY, MpsShare, WishError, check_size, read_wish
from exaserve_ops.serving.domain.change_words import asked_words, change_of
from exaserve_ops.serving.domain.lifecycle import ACTIVE, DEPLOYMENT
from exaserve_ops.serving.domain.trials import PRIVATE_PREFIX, is_private, refusal_of_change
from exaserve_ops.serving.models import Deployment, Model
from exaserve_ops.serving.services.options import (
    check_engine,
    check_memory,
    check_model,
    check_options,
    check_span,
    default_memory_bytes,
    default_start_seconds,
)
from exaserve_ops.serving.services.releases import first_release

MAX_REPLICAS = 100_000
MAX_SECONDS = 7 * 24 * 3600
BOUNDS = {
    "replicas": (0, MAX_REPLICAS),
    "standbys": (0, MAX_REPLICAS),
    "accelerators_per_replica": (1, 1024),
    "nodes_per_replica": (1, 64),
    "replica_memory_bytes": (0, 1 << 50),
    "drain_seconds": (0, MAX_SECONDS),
    "start_seconds": (0, MAX_SECONDS),
    "stall_seconds": (0, MAX_SECONDS),
    "balance_from_percent": (10, 500),
    "balance_gap_percent": (5, 100),
}
"""Lowest and highest value of each number of a deployment; zero memory or start: computed."""
_BALANCE = ("balance_sessions", "balance_from_percent", "balance_gap_percent")
_PLAIN = (
    *("replicas", "standbys", "standbys_sleep", "drain_seconds", "stall_seconds"),
    *("drain_slow", "requires_go", *_BALANCE),
)
_POOL = ("spill", "spill_reason")
_PLACES = ("accelerator", "slice_memory_bytes", *_POOL)
"""Where new replicas may go; those that run stay where they are."""
_ASKED = (*_PLACES, "mps_thread_percent", "mps_memory_bytes")
"""What is asked of accelerators, as `read_wish` takes it."""
CHANGEABLE = frozenset({*_PLAIN, *_PLACES, "start_seconds", "nodes"})


@dataclass(frozen=True, slots=True)
class DeploymentWish:
    """What somebody asks for. Zero memory or start time: computed from the model."""

    name: str
    model_id: UUID
    replicas: int
    engine: str
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    served_name: str = ""
    nodes: tuple[str, ...] = ()
    replica_memory_bytes: int = 0
    accelerators_per_replica: int = 1
    nodes_per_replica: int = 1
    """More than one: it runs on so many nodes at once, with the accelerators and memory above on each."""
    drain_seconds: int = 60
    start_seconds: int = 0
    stall_seconds: int = 60
    standbys: int = 0
    standbys_sleep: bool = False
    """Standbys give their accelerators' memory back until they are to serve."""
    drain_slow: bool = False
    requires_go: bool = False
    """A rollout needs a validation that ended with go."""
    balance_sessions: bool = True
    """Whether sessions leave replicas whose KV memory they overfill, for emptier ones."""
    balance_from_percent: int = 90
    """How full of active sessions a replica is for that; over 100 they do not fit together any more."""
    balance_gap_percent: int = 30
    """How many points emptier another one is for that; it goes on until a third of them is left."""
    accelerator: str = ANY
    """`any`, `whole`, `slice` or `slice:3g.40gb`."""
    slice_memory_bytes: int = 0
    """Least memory of a slice."""
    mps_thread_percent: int = 0
    mps_memory_bytes: int = 0
    """Of each accelerator; 0 with the one above: no MPS share."""
    spill: bool = False
    """Whole cards may be taken while no slice is free, for `spill_reason`."""
    spill_reason: str = ""
    is_trial: bool = False
    """It is made to try an engine, and its served name is no client's."""


@transaction.atomic
def create_deployment(wish: DeploymentWish, *, actor: str, now: datetime) -> Deployment:
    """Record a new deployment. Raises `InvalidInputError` or `ConflictError`."""
    model = Model.objects.filter(pk=wish.model_id).first()
    if model is None:
        raise InvalidInputError("model", "no such model is registered")
    for name in BOUNDS:
        _check_number(getattr(wish, name), name)
    check_engine(wish.engine)
    check_options(
        wish.engine, wish.engine_options, wish.accelerators_per_replica, nodes=wish.nodes_per_replica
    )
    check_model(wish.engine, wish.engine_options, model)
    check_memory(
        wish.replica_memory_bytes, model, wish.engine, wish.engine_options, nodes=wish.nodes_per_replica
    )
    _check_nodes(wish.nodes)
    if wish.standbys_sleep:
        _check_sleep(wish.engine, wish.engine_options, wish.nodes_per_replica)
    if not wish.is_trial:
        _check_served_name(wish.served_name or model.name, model)
    memory_bytes = wish.replica_memory_bytes or default_memory_bytes(
        model, wish.engine, nodes=wish.nodes_per_replica
    )
    asked = _asked_of(
        {name: getattr(wish, name) for name in _ASKED}, memory_bytes, wish.accelerators_per_replica
    )
    check_span(wish.nodes_per_replica, asked, wish.nodes)
    try:
        with transaction.atomic():
            deployment = Deployment.objects.create(
                name=wish.name,
                model=model,
                served_name=wish.served_name or model.name,
                replicas=wish.replicas,
                engine=wish.engine,
                engine_options=dict(wish.engine_options),
                replica_memory_bytes=memory_bytes,
                accelerators_per_replica=wish.accelerators_per_replica,
                nodes_per_replica=wish.nodes_per_replica,
                placement=asked | ({"nodes": list(wish.nodes)} if wish.nodes else {}),
                drain_seconds=wish.drain_seconds,
                start_seconds=wish.start_seconds or default_start_seconds(model),
                stall_seconds=wish.stall_seconds,
                standbys=wish.standbys,
                standbys_sleep=wish.standbys_sleep,
                drain_slow=wish.drain_slow,
                requires_go=wish.requires_go,
                balance_sessions=wish.balance_sessions,
                balance_from_percent=wish.balance_from_percent,
                balance_gap_percent=wish.balance_gap_percent,
                created_at=now,
                updated_at=now,
            )
            first_release(deployment, actor=actor, now=now)
    except IntegrityError as error:
        raise ConflictError(f"a deployment named '{wish.name}' exists") from error
    noun = "replica" if wish.replicas == 1 else "replicas"
    told = [f"{wish.replicas} {noun} of {model.name}", *asked_words(wish.nodes_per_replica, asked)]
    _record(deployment, "created", actor, now, ", ".join(told))
    return deployment


def _check_served_name(name: str, model: Model) -> None:
    """Refuse a name that already stands for other bytes: clients could not tell who answers."""
    if is_private(name):
        raise InvalidInputError(
            "served_name", f"no name may begin with '{PRIVATE_PREFIX}': no client reaches it"
        )
    others = Deployment.objects.filter(served_name=name, status=ACTIVE).exclude(model__digest=model.digest)
    other = others.select_related("model").first()
    if other is not None:
        raise InvalidInputError(
            "served_name",
            f"deployment '{other.name}' serves '{name}' already, from another model ({other.model.name}):"
            " requests would meet either by chance. Give another served name, or delete that one first",
        )


@transaction.atomic
def scale_deployment(
    deployment_id: UUID,
    *,
    replicas: int,
    actor: str,
    now: datetime,
    expected_generation: int | None = None,
    reason: str = "",
) -> Deployment:
    """Change how many replicas are wanted. The same number again is no change.

    Raises `InvalidInputError`, or `ConflictError` where it is being deleted or is a validation's, or
    `StaleError` where it is not at the generation that the caller had read.
    """
    _check_number(replicas, "replicas")
    deployment = _lock(deployment_id, expected_generation)
    if deployment.replicas == replicas:
        return deployment
    change = f"{deployment.replicas} to {replicas} replicas" + (f": {reason}" if reason else "")
    deployment.replicas = replicas
    _raise_generation(deployment, now, ["replicas"])
    _record(deployment, "scaled", actor, now, change)
    return deployment


@transaction.atomic
def update_deployment(
    deployment_id: UUID,
    changes: Mapping[str, Any],
    *,
    actor: str,
    now: datetime,
    expected_generation: int | None = None,
    reason: str = "",
    by_validation: bool = False,
) -> Deployment:
    """Change what `CHANGEABLE` names, in one step.

    Raises `InvalidInputError` for other fields (a new model or other engine options are another
    deployment) and `ConflictError` as `scale_deployment` does. `by_validation`: the one that made it asks.
    """
    for name in changes:
        if name not in CHANGEABLE:
            raise InvalidInputError(name, f"cannot be changed; what can: {', '.join(sorted(CHANGEABLE))}")
    for name in BOUNDS.keys() & changes.keys():
        _check_number(changes[name], name)
    deployment = _lock(deployment_id, expected_generation, by_validation=by_validation)
    if changes.get("standbys_sleep"):
        _check_sleep(deployment.engine, deployment.engine_options, deployment.nodes_per_replica)
    before = _wish_of(deployment)
    for name in _PLAIN:
        setattr(deployment, name, changes.get(name, getattr(deployment, name)))
    if "start_seconds" in changes:
        deployment.start_seconds = changes["start_seconds"] or default_start_seconds(deployment.model)
    deployment.placement = _changed_placement(deployment, changes)
    after = _wish_of(deployment)
    if after == before:
        return deployment
    _raise_generation(deployment, now, [*_PLAIN, "start_seconds", "placement"])
    event, words = change_of(before, after)
    _record(deployment, event, actor, now, ": ".join(filter(None, (words, reason))))
    return deployment


def _changed_placement(deployment: Deployment, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nodes and accelerators as they are asked for now. Raises `InvalidInputError`."""
    before = deployment.placement
    nodes = list(changes.get("nodes", before.get("nodes", ())))
    _check_nodes(set(nodes) - set(before.get("nodes", ())))
    asked = {name: changes.get(name, before.get(name)) for name in _ASKED}
    if changes.get("spill") is False:
        asked["spill_reason"] = changes.get("spill_reason", "")  # closed: why it was open is history
    asked = {name: value for name, value in asked.items() if value is not None}
    asked = _asked_of(asked, deployment.replica_memory_bytes, deployment.accelerators_per_replica)
    check_span(deployment.nodes_per_replica, asked, nodes)
    return asked | ({"nodes": nodes} if nodes else {})


def _asked_of(asked: Mapping[str, Any], memory_bytes: int, accelerators: int) -> dict[str, Any]:
    """What is asked of accelerators, checked; what is as usual is left out. Raises `InvalidInputError`."""
    try:
        wish = read_wish(**asked)
        check_size(wish, memory_bytes=memory_bytes, accelerators=accelerators)
    except WishError as error:
        raise InvalidInputError(error.field, str(error)) from error
    mps = wish.mps or MpsShare()
    recorded = {
        "accelerator": "" if wish.text == ANY else wish.text,
        "slice_memory_bytes": wish.slice_memory_bytes,
        "mps_thread_percent": mps.thread_percent,
        "mps_memory_bytes": mps.memory_bytes,
        "spill": bool(wish.spill_reason),
        "spill_reason": wish.spill_reason,
    }
    return {name: value for name, value in recorded.items() if value}


@transaction.atomic
def delete_deployment(
    deployment_id: UUID,
    *,
    actor: str,
    now: datetime,
    expected_generation: int | None = None,
    reason: str = "",
    by_validation: bool = False,
) -> Deployment:
    """Ask for the end of a deployment: its replicas are drained and stopped. Twice is harmless.

    Raises `ConflictError` for what a validation tries an engine in, unless `by_validation` itself.
    """
    deployment = Deployment.objects.select_for_update().get(pk=deployment_id)
    if deployment.status != ACTIVE:
        return deployment
    _check_trial(deployment, by_validation=by_validation)
    _check_generation(deployment, expected_generation)
    return advance_deployment(deployment_id, "delete", actor=actor, now=now, reason=reason)


@transaction.atomic
def advance_deployment(
    deployment_id: UUID, event: str, *, actor: str, now: datetime, reason: str = ""
) -> Deployment:
    """Move a deployment's status by an event. Raises `IllegalTransitionError`."""
    deployment = Deployment.objects.select_for_update().get(pk=deployment_id)
    before = deployment.status
    deployment.status = DEPLOYMENT.next(before, event)
    _raise_generation(deployment, now, ["status"])
    record_event(
        subject_of(deployment),
        event,
        actor=actor,
        now=now,
        moved=(before, deployment.status),
        reason=reason,
        generation=deployment.generation,
    )
    ring("deployment", deployment.pk)
    return deployment


def subject_of(deployment: Deployment) -> Subject:
    """Return the audit subject of a deployment."""
    return Subject("deployment", str(deployment.pk), deployment.name)


def _lock(deployment_id: UUID, expected_generation: int | None, *, by_validation: bool = False) -> Deployment:
    deployment = Deployment.objects.select_for_update().get(pk=deployment_id)
    if deployment.status != ACTIVE:
        raise ConflictError(f"deployment '{deployment.name}' is {deployment.status}")
    _check_trial(deployment, by_validation=by_validation)
    _check_generation(deployment, expected_generation)
    return deployment


def _check_trial(deployment: Deployment, *, by_validation: bool) -> None:
    """Refuse what would change a validation's figures under its hands."""
    why = refusal_of_change(deployment.name, deployment.served_name)
    if why and not by_validation:
        raise ConflictError(why)


def _check_sleep(engine: str, options: Mapping[str, Any], nodes: int) -> None:
    if why := sleep.refusal(engine, options, nodes=nodes):
        raise InvalidInputError("standbys_sleep", f"its standbys cannot sleep: {why}")


def _check_generation(deployment: Deployment, expected: int | None) -> None:
    if expected is not None and expected != deployment.generation:
        raise StaleError(
            f"deployment '{deployment.name}' is at generation {deployment.generation}, not {expected}: "
            "somebody changed it meanwhile; read it again, then decide"
        )


def _check_nodes(names: Collection[str]) -> None:
    """Refuse names that no node has: replicas would wait for ever for what was a slip of the hand."""
    known = set(Node.objects.filter(name__in=names).values_list("name", flat=True))
    unknown = sorted(set(names) - known)
    if unknown:
        raise InvalidInputError("nodes", f"no node is called {', '.join(map(repr, unknown))}: join it first")


def _check_number(value: object, name: str) -> None:
    lowest, highest = BOUNDS[name]
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not lowest <= value <= highest:  # type: ignore[operator]  # whole: an int
        raise InvalidInputError(name, f"give a whole number from {lowest} to {highest:,}")


def _raise_generation(deployment: Deployment, now: datetime, fields: list[str]) -> None:
    deployment.generation += 1
    deployment.updated_at = now
    deployment.save(update_fields=[*fields, "generation", "updated_at"])


def _record(deployment: Deployment, event: str, actor: str, now: datetime, reason: str) -> None:
    record_event(
        subject_of(deployment),
        event,
        actor=actor,
        now=now,
        reason=reason,
        generation=deployment.generation,
    )
    ring("deployment", deployment.pk)


def _wish_of(deployment: Deployment) -> dict[str, Any]:
    return {
        **{name: getattr(deployment, name) for name in _PLAIN},
        "start_seconds": deployment.start_seconds,
        "nodes": deployment.placement.get("nodes", []),
        **{name: deployment.placement.get(name) for name in _PLACES},
    }
