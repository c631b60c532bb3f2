"""Registering what engines compiled for a model, so that other nodes need not compile it again."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Protocol
from uuid import UUID

from django.conf import settings
from django.db import transaction

from exaserve_ops.audit.services import Subject, record_event
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.serving.domain.compiled import CompiledFacts, check_target
from exaserve_ops.serving.domain.origins import check_origin
from exaserve_ops.serving.models import CompiledSet, Model
from exaserve_ops.weights.domain.wanted import Origin

COPIES_STAY = (
    "Nodes are told of these files no more; copies in engines' caches on nodes stay, and engines go on using "
    "them. Delete engine-cache/<engine> in an agent's home to be rid of them."
)


class CompiledFolderReader(Protocol):
    """Reads a folder of compiled files on the control plane's machine."""

    def read(self, folder: str, /) -> CompiledFacts:
        """Files with digests. Raises `InvalidInputError` (field `folder`) naming what is wrong with it."""
        ...


@transaction.atomic
def register_compiled(
    model_id: UUID,
    facts: CompiledFacts,
    *,
    engine: str,
    hardware: str = "",
    origins: Sequence[Origin] = (),
    actor: str,
    now: datetime,
    reason: str = "",
) -> CompiledSet:
    """Have these files in the caches of this engine wherever the model is. Replaces the set before.

    Raises `InvalidInputError` for names and origins that no node could use, `ConflictError` for files that
    are registered for another engine or are a model's.
    """
    check_target(engine, hardware)
    for place in origins:
        check_origin(place, allow_local=settings.ENV.allow_local_addresses)
    model = Model.objects.select_for_update().get(pk=model_id)
    if CompiledSet.objects.filter(digest=facts.revision).exclude(engine=engine).exists():
        raise ConflictError("these very files are registered for another engine")
    if Model.objects.filter(digest=facts.revision).exists():
        raise ConflictError("these very files are registered as a model")
    made, _ = CompiledSet.objects.update_or_create(
        model=model,
        engine=engine,
        hardware=hardware,
        defaults={
            "digest": facts.revision,
            "source": facts.source,
            "origins": [
                {"kind": place.kind, "location": place.location, "secret": place.secret} for place in origins
            ],
            "total_bytes": facts.total_bytes,
            "file_count": facts.file_count,
            "manifest_digest": facts.manifest.digest,
            "manifest_body": facts.manifest.body,
            "registered_by": actor[:120],
            "created_at": now,
        },
    )
    files = f"{made.file_count} file{'' if made.file_count == 1 else 's'}"
    told = f"{files} for {engine} on {hardware or 'any hardware'}, {made.digest[:19]}"
    _record(model, "compiled_registered", told, reason, actor=actor, now=now)
    return made


@transaction.atomic
def remove_compiled(
    model_id: UUID, compiled_id: UUID, *, actor: str, now: datetime, reason: str = ""
) -> None:
    """Put these files into no more caches. What is there stays: tell `COPIES_STAY`.

    Raises `CompiledSet.DoesNotExist`.
    """
    found = CompiledSet.objects.select_related("model").get(pk=compiled_id, model=model_id)
    model, told = found.model, f"for {found.engine} on {found.hardware or 'any hardware'}"
    found.delete()
    _record(model, "compiled_removed", told, reason, actor=actor, now=now)


def _record(model: Model, event: str, told: str, reason: str, *, actor: str, now: datetime) -> None:
    subject = Subject("model", str(model.pk), model.name)
    record_event(subject, event, actor=actor, now=now, reason=f"{told}: {reason}" if reason else told)
