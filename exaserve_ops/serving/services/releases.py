"""Writing of releases: what replicas run, who makes way for whom, and which one a deployment has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Max, Q

from exaserve_ops.audit.services import Subject, record_event
from exaserve_ops.lib.errors import ConflictError, InvalidInputError
from exaserve_ops.lib.hints import ring, ring_all
from exaserve_ops.serving.domain.accelerator_wish import MOST_BYTES
from exaserve_ops.serving.models import Deployment, Model, Release, Replica
from exaserve_ops.serving.services.options import (
    check_engine,
    check_memory,
    check_model,
    check_options,
    default_memory_bytes,
)
from exaserve_ops.serving.services.replicas import create_replicas, let_go_replica, subject_of


@dataclass(frozen=True, slots=True)
class ReleaseWish:
    """What somebody wants replicas to run. What is left out stays as the deployment has it."""

    model_id: UUID | None = None
    engine: str = ""
    engine_options: Mapping[str, Any] | None = None
    replica_memory_bytes: int = 0


def first_release(deployment: Deployment, *, actor: str, now: datetime) -> Release:
    """The release of a deployment that was made just now."""
    return _create(deployment, 1, _Content.of(deployment), actor=actor, now=now)


@dataclass(frozen=True, slots=True)
class _Content:
    model_id: UUID
    engine: str
    replica_memory_bytes: int
    engine_options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Deployment | Release) -> _Content:
        options: dict[str, Any] = dict(row.engine_options)
        return cls(row.model_id, row.engine, row.replica_memory_bytes, options)


@transaction.atomic
def find_or_create_release(deployment_id: UUID, wish: ReleaseWish, *, actor: str, now: datetime) -> Release:
    """The deployment's release with this content: one that it had before, or a new one.

    Raises `InvalidInputError`.
    """
    deployment = Deployment.objects.select_for_update().get(pk=deployment_id)
    content = _content_of(deployment, wish)
    known = [row for row in deployment.releases.order_by("-number") if _Content.of(row) == content]
    if known:
        return known[0]
    newest = deployment.releases.aggregate(newest=Max("number"))["newest"] or 0
    return _create(deployment, newest + 1, content, actor=actor, now=now)


def _content_of(deployment: Deployment, wish: ReleaseWish) -> _Content:
    model = deployment.model
    if wish.model_id is not None and wish.model_id != model.pk:
        found = Model.objects.filter(pk=wish.model_id).first()
        if found is None:
            raise InvalidInputError("model", "no such model is registered")
        model = found
    engine = wish.engine or deployment.engine
    check_engine(engine)
    options = dict(deployment.engine_options if wish.engine_options is None else wish.engine_options)
    nodes = deployment.nodes_per_replica
    check_options(engine, options, deployment.accelerators_per_replica, nodes=nodes)
    check_model(engine, options, model)
    if not 0 <= wish.replica_memory_bytes <= MOST_BYTES:
        raise InvalidInputError("replica_memory_bytes", f"give a whole number from 0 to {MOST_BYTES:,}")
    check_memory(wish.replica_memory_bytes, model, engine, options, nodes=nodes)
    memory_bytes = wish.replica_memory_bytes or deployment.replica_memory_bytes
    if not wish.replica_memory_bytes and model.pk != deployment.model_id:
        # Enough for the old one may be too little for the new one, and the other way round is no harm.
        memory_bytes = max(
            memory_bytes, default_memory_bytes(model, engine, nodes=nodes) if memory_bytes else 0
        )
    return _Content(model.pk, engine, memory_bytes, options)


def _create(deployment: Deployment, number: int, content: _Content, *, actor: str, now: datetime) -> Release:
    return Release.objects.create(
        deployment=deployment,
        number=number,
        model_id=content.model_id,
        engine=content.engine,
        engine_options=content.engine_options,
        replica_memory_bytes=content.replica_memory_bytes,
        created_at=now,
        created_by=actor[:120],
    )


@transaction.atomic
def adopt_release(release_id: UUID, *, actor: str, now: datetime, reason: str) -> Deployment:
    """Have a deployment's new replicas run a release from now on. Those that run are not touched."""
    release = Release.objects.get(pk=release_id)
    deployment = Deployment.objects.select_for_update().get(pk=release.deployment_id)
    if deployment.release_number == release.number:
        return deployment
    deployment.release_number = release.number
    deployment.model_id = release.model_id
    deployment.engine = release.engine
    deployment.engine_options = release.engine_options
    deployment.replica_memory_bytes = release.replica_memory_bytes
    deployment.generation += 1
    deployment.updated_at = now
    deployment.save()
    subject = Subject("deployment", str(deployment.pk), deployment.name)
    told = f"release {release.number}: {reason}"
    record_event(subject, "released", actor=actor, now=now, reason=told, generation=deployment.generation)
    ring("deployment", deployment.pk)
    return deployment


@transaction.atomic
def give_way(replica_id: UUID, event: str, *, why: str, actor: str, now: datetime) -> Replica:
    """Let a replica go, and make the one of the release that it rolls to, which waits for its place.

    Both or neither, so that no leader's death comes between. Raises `ConflictError` where it rolls to
    nothing any more, or is let go already.
    """
    old = Replica.objects.select_for_update().get(pk=replica_id)
    if old.rolls_to_id is None or old.wanted != Replica.Wanted.RUN:
        raise ConflictError(f"replica {old.name} makes way for nobody now")
    let_go_replica(replica_id, event, why=why, actor=actor, now=now)
    [made] = create_replicas(
        old.deployment_id,
        1,
        why=f"takes the place of {old.name}",
        actor=actor,
        now=now,
        role=old.role,
        release_id=old.rolls_to_id,
    )
    made.replaces, made.made_for = old, "rollout"
    made.save(update_fields=["replaces", "made_for"])
    record_event(subject_of(old), "replaced", actor=actor, now=now, reason=f"rollout: by {made.name}")
    return made


@transaction.atomic
def roll_replicas(replica_ids: Collection[UUID], release_id: UUID | None, *, in_place: bool) -> int:
    """Have replicas make way for those of a release, or with none stay after all; says how many changed.

    What is let go already is left alone.
    """
    rows = Replica.objects.filter(pk__in=replica_ids, wanted=Replica.Wanted.RUN)
    same = Q(rolls_to=release_id) & Q(rolls_in_place=in_place)
    changed = list(rows.exclude(same).select_for_update().order_by("pk").values_list("pk", "deployment"))
    Replica.objects.filter(pk__in=[pk for pk, _ in changed]).update(
        rolls_to=release_id, rolls_in_place=in_place and release_id is not None
    )
    ring_all(("deployment", deployment) for _, deployment in changed)
    return len(changed)
