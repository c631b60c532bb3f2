"""Having models' weights on nodes' disks: by hand, by policy, for a rollout.

For whoever is about to need a model somewhere, such as a rollout, there are three calls::

    want_weights(model_id, node_ids, owner=f"rollout:{rollout_id}", actor=..., now=..., reason=...)
    model_weights_on(model_id, node_ids)   # of selectors.weights: node -> state, `ready`, reason, bytes
    release_weights(model_id, owner=f"rollout:{rollout_id}", actor=..., now=..., reason=...)

`want_weights` says what is to be, and returns at once: controllers tell the nodes, which fetch, verify and
report. What is wanted is not evicted until its last owner releases it; owners do not see one another's
claims. Each call may be made again. Models that are used in place need no claim: `want_weights` makes none
for them, and `model_weights_on` says that they are ready everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime
from uuid import UUID

from django.conf import settings
from django.db import transaction

from exaserve_ops.audit.services import Subject, record_event
from exaserve_ops.inventory.selectors import nodes_in_service
from exaserve_ops.lib.errors import ConflictError, InvalidInputError
from exaserve_ops.serving.domain.lifecycle import STOPPED
from exaserve_ops.serving.domain.origins import check_origin, lies_in_folder
from exaserve_ops.serving.models import Model, ModelManifest, Replica
from exaserve_ops.weights import services as weights
from exaserve_ops.weights.domain.prewarm import PrewarmRules
from exaserve_ops.weights.domain.wanted import Origin
from exaserve_ops.weights.models import PrewarmPolicy


@transaction.atomic
def want_weights(
    model_id: UUID,
    node_ids: Collection[UUID],
    *,
    owner: str,
    actor: str,
    now: datetime,
    reason: str = "",
    bytes_per_second: int = 0,
) -> int:
    """Have a model fetched to nodes, and kept there for this owner. Returns how many nodes are new.

    Raises `ConflictError` for a model that has no manifest (it is registered again then), and for nodes
    that are retired.
    """
    model = Model.objects.get(pk=model_id)
    if model.storage == Model.Storage.IN_PLACE and owner.startswith("rollout:"):
        return 0
    if not ModelManifest.objects.filter(model=model).exists():
        raise ConflictError(f"'{model.name}' has no manifest of its files: register its folder again")
    found = nodes_in_service().filter(pk__in=node_ids).count()
    if found != len(set(node_ids)):
        raise ConflictError(f"{len(set(node_ids)) - found} of these nodes are not in service")
    added = weights.claim_weights(
        model.digest, node_ids, owner=owner, actor=actor, now=now, bytes_per_second=bytes_per_second
    )
    if added:
        told = f"on {added} more nodes, for {owner}"
        _record(model, "weights_claimed", told, reason, actor=actor, now=now)
    return added


@transaction.atomic
def release_weights(
    model_id: UUID,
    *,
    owner: str,
    actor: str,
    now: datetime,
    node_ids: Collection[UUID] | None = None,
    reason: str = "",
) -> int:
    """Take an owner's claims on a model back, on all nodes or some. Returns how many there were."""
    model = Model.objects.get(pk=model_id)
    count = weights.release_weights(owner, revision=model.digest, node_ids=node_ids)
    if count:
        _record(model, "weights_released", f"on {count} nodes, by {owner}", reason, actor=actor, now=now)
    return count


@transaction.atomic
def pause_weights(
    model_id: UUID,
    *,
    owner: str,
    paused: bool,
    actor: str,
    now: datetime,
    node_ids: Collection[UUID] | None = None,
    reason: str = "",
) -> int:
    """Stop fetching for an owner, keeping what is there, or go on. Returns how many nodes it concerns."""
    model = Model.objects.get(pk=model_id)
    count = weights.pause_weights(owner, model.digest, paused=paused, node_ids=node_ids)
    if count:
        event = "weights_paused" if paused else "weights_resumed"
        _record(model, event, f"on {count} nodes, for {owner}", reason, actor=actor, now=now)
    return count


@transaction.atomic
def change_storage(
    model_id: UUID,
    *,
    storage: str,
    origins: Sequence[Origin] | None = None,
    actor: str,
    now: datetime,
    reason: str = "",
) -> Model:
    """Say what replicas of a model start from, and where nodes fetch it. `origins` of `None`: unchanged.

    Raises `ConflictError` while replicas of it live, since those would be started anew, and for a model
    without a manifest; `InvalidInputError` for an origin that no node could use.
    """
    model = Model.objects.select_for_update().get(pk=model_id)
    for place in origins or ():
        check_origin(place, allow_local=settings.ENV.allow_local_addresses)
    if storage not in Model.Storage.values:
        raise InvalidInputError("storage", f"'{storage}' is none of {', '.join(Model.Storage.values)}")
    if storage != model.storage:
        _check_storage_change(model, storage)
    if origins is not None and not origins and not lies_in_folder(model.source):
        raise InvalidInputError("origins", "it was imported, not registered from a folder: name a place")
    if origins is not None:
        model.origins = [
            {"kind": place.kind, "location": place.location, "secret": place.secret} for place in origins
        ]
    model.storage = storage
    model.save(update_fields=["storage", "origins"])
    told = f"{model.get_storage_display()}; {len(model.origins) or 1} origins"
    _record(model, "storage_changed", told, reason, actor=actor, now=now)
    return model


@transaction.atomic
def set_prewarm(model_id: UUID, rules: PrewarmRules, *, actor: str, now: datetime, reason: str = "") -> None:
    """Fetch a model ahead of being needed, by these rules; their revision is the model's.

    Raises `ConflictError` for a model without a manifest, `InvalidInputError` for rules that make no sense
    or name nodes that do not exist.
    """
    model = Model.objects.get(pk=model_id)
    if not ModelManifest.objects.filter(model=model).exists():
        raise ConflictError(f"'{model.name}' has no manifest of its files: register its folder again")
    known = set(nodes_in_service().filter(name__in=rules.node_names).values_list("name", flat=True))
    unknown = sorted(set(rules.node_names) - known)
    if unknown:
        raise InvalidInputError("nodes", f"no node in service is named {', '.join(unknown[:5])}")
    weights.save_prewarm_policy(replace(rules, revision=model.digest), now=now)
    where = f"{len(known)} nodes" if rules.node_names else "every node"
    _record(model, "prewarm_changed", f"on {where}, {rules.at_once} at once", reason, actor=actor, now=now)


@transaction.atomic
def pause_prewarm(model_id: UUID, *, paused: bool, actor: str, now: datetime, reason: str = "") -> bool:
    """Stop fetching a model ahead, keeping what is there and the rules; or go on. Returns whether it was new.

    Raises `ConflictError` for a model that is not fetched ahead.
    """
    model = Model.objects.get(pk=model_id)
    if not PrewarmPolicy.objects.filter(revision=model.digest).exists():
        raise ConflictError(f"'{model.name}' is not fetched ahead")
    changed = weights.pause_prewarm_policy(model.digest, paused=paused)
    if changed:
        event = "prewarm_paused" if paused else "prewarm_resumed"
        told = "what is there stays, and so do the rules" if paused else "by its rules"
        _record(model, event, told, reason, actor=actor, now=now)
    return changed


@transaction.atomic
def end_prewarm(model_id: UUID, *, actor: str, now: datetime, reason: str = "") -> bool:
    """Fetch a model ahead no more. What is on disks stays while there is room. Returns whether it was."""
    model = Model.objects.get(pk=model_id)
    ended = weights.delete_prewarm_policy(model.digest)
    if ended:
        _record(
            model, "prewarm_ended", "what is there stays while there is room", reason, actor=actor, now=now
        )
    return ended


def _check_storage_change(model: Model, storage: str) -> None:
    if storage == Model.Storage.NODE and not ModelManifest.objects.filter(model=model).exists():
        raise ConflictError(f"'{model.name}' has no manifest of its files: register its folder again")
    if storage == Model.Storage.IN_PLACE and not lies_in_folder(model.source):
        raise ConflictError(f"'{model.name}' lies in no folder: it was imported from {model.source}")
    living = Replica.objects.filter(release__model=model).exclude(status=STOPPED).count()
    if living:
        raise ConflictError(
            f"{living} replicas of '{model.name}' live: stop them before it is stored elsewhere, or register "
            "its folder under another name, have that one stored there, and roll its deployments out to it"
        )


def _record(model: Model, event: str, told: str, reason: str, *, actor: str, now: datetime) -> None:
    subject = Subject("model", str(model.pk), model.name)
    record_event(subject, event, actor=actor, now=now, reason=f"{told}: {reason}" if reason else told)
