"""Importing models: asked for by people, fetched by a node, registered when what it found has arrived."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from django.conf import settings
from django.db import IntegrityError, transaction

from exaserve_ops.audit.services import Subject, record_event
from exaserve_ops.inventory.models import Node
from exaserve_ops.lib.errors import ConflictError, InvalidInputError
from exaserve_ops.lib.lifecycle import IllegalTransitionError
from exaserve_ops.serving.domain.model_import import FAILED, MODEL_IMPORT, ImportStep, choose_node
from exaserve_ops.serving.domain.origins import check_place
from exaserve_ops.serving.domain.reports import FindingsPart
from exaserve_ops.serving.models import FoundPart, Model, ModelImport
from exaserve_ops.serving.selectors.imports import import_places
from exaserve_ops.serving.services.models import ModelFacts, register_model
from exaserve_ops.weights import services as weights
from exaserve_ops.weights.domain.held import ImportSight
from exaserve_ops.weights.domain.wanted import PERSON, Origin

MAX_PARTS = 1024
MAX_PART_BYTES = 160 * 1024
_WHY_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class ImportWish:
    """What somebody asks for."""

    name: str
    origin: Origin
    revision: str = ""
    files: tuple[str, ...] = ()
    node_id: UUID | None = None
    """`None`: the node that has most room."""


@transaction.atomic
def begin_import(wish: ImportWish, *, actor: str, now: datetime, reason: str) -> ModelImport:
    """Have a node fetch a model and register it when it is whole.

    Raises `InvalidInputError` for a place that nobody should ask, `ConflictError` where the name is taken or
    no node can take it in.
    """
    check_place(
        wish.origin,
        revision=wish.revision,
        files=wish.files,
        allow_local=settings.ENV.allow_local_addresses,
    )
    if Model.objects.filter(name=wish.name).exists():
        raise ConflictError(f"'{wish.name}' is registered already; import it under another name")
    node = _node_for(wish.node_id)
    try:
        with transaction.atomic():
            row = ModelImport.objects.create(
                name=wish.name,
                node=node,
                kind=wish.origin.kind,
                location=wish.origin.location,
                secret=wish.origin.secret,
                revision=wish.revision,
                files=list(wish.files),
                reason=reason[:500],
                asked_by=actor[:120],
                why="its node is being told",
                created_at=now,
                status_changed_at=now,
            )
    except IntegrityError as error:
        raise ConflictError(f"'{wish.name}' is being imported already") from error
    told = f"{wish.origin.kind} {wish.origin.location}, by {node.name}"
    record_event(_subject(row), "import_asked", actor=actor, now=now, reason=f"{told}: {reason}")
    return row


@transaction.atomic
def cancel_import(import_id: UUID, *, actor: str, now: datetime, reason: str) -> ModelImport:
    """Give an import up. Raises `ConflictError` for one that is over."""
    return _act(import_id, "import_cancelled", actor=actor, now=now, reason=reason)


@transaction.atomic
def retry_import(import_id: UUID, *, actor: str, now: datetime, reason: str) -> ModelImport:
    """Have a failed import tried again, going on with what is there. Raises `ConflictError` for another."""
    row = _act(import_id, "import_tried_again", actor=actor, now=now, reason=reason)
    row.attempt += 1
    row.save(update_fields=["attempt"])
    FoundPart.objects.filter(model_import=row).delete()
    return row


@transaction.atomic
def record_import(
    import_id: UUID, step: ImportStep, sight: ImportSight | None, *, actor: str, now: datetime
) -> None:
    """Record how an import goes. Raises `IllegalTransitionError` where it was overtaken."""
    row = _locked(import_id)
    if step.event:
        advance_import(row, step.event, why=step.reason, actor=actor, now=now)
    elif row.status in MODEL_IMPORT.final or row.status == FAILED:
        return
    row.why = step.reason[:_WHY_CHARACTERS]
    if sight is not None and sight.attempt == row.attempt:
        row.fixed_location = sight.location or row.fixed_location
        row.file_count, row.files_done = sight.files, sight.files_done
        row.total_bytes, row.have_bytes = sight.total_bytes, sight.have_bytes
    live = sight if sight is not None and row.status not in (FAILED, *MODEL_IMPORT.final) else None
    row.bytes_per_second = live.bytes_per_second if live else 0.0
    row.eta_seconds = live.eta_seconds if live else None
    row.save()


def advance_import(row: ModelImport, event: str, *, why: str, actor: str, now: datetime) -> None:
    """Move on by one event; the row is locked and saved by the caller. Raises `IllegalTransitionError`."""
    before, row.status = row.status, MODEL_IMPORT.next(row.status, event)
    row.why, row.status_changed_at = why[:_WHY_CHARACTERS], now
    if row.status in MODEL_IMPORT.final:
        row.ended_at = now
    record_event(_subject(row), event, actor=actor, now=now, moved=(before, row.status), reason=why)


def take_findings_part(part: FindingsPart) -> None:
    """Keep a part of what a node found, if it was asked to find it. Others are dropped."""
    try:
        import_id, node_id = UUID(part.import_id), UUID(part.node_id)
    except ValueError:
        return
    good = 0 <= part.index < part.count <= MAX_PARTS and len(part.data) <= MAX_PART_BYTES
    if not good or len(part.digest) != 64:  # noqa: PLR2004 - hex digits of a SHA-256
        return
    with transaction.atomic():
        row = ModelImport.objects.select_for_update().filter(pk=import_id, node=node_id).first()
        if row is None or row.status in MODEL_IMPORT.final or row.status == FAILED:
            return
        # Parts of another finding are of an earlier try.
        FoundPart.objects.filter(model_import=row).exclude(digest=part.digest, count=part.count).delete()
        FoundPart.objects.get_or_create(
            model_import=row,
            index=part.index,
            defaults={"digest": part.digest, "count": part.count, "data": part.data},
        )


def fail_import(import_id: UUID, why: str, *, actor: str, now: datetime) -> None:
    """Record that what was found cannot be registered. An import that is over stays as it is."""
    try:
        record_import(import_id, ImportStep("import_failed", why), None, actor=actor, now=now)
    except IllegalTransitionError:
        return


@transaction.atomic
def register_import(import_id: UUID, facts: ModelFacts, *, actor: str, now: datetime) -> Model:
    """Register what was found; the node that found it keeps it, as the first that others fetch from.

    Raises `ConflictError` where the name was taken meanwhile, `IllegalTransitionError` where it was
    overtaken.
    """
    row = _locked(import_id)
    place = Origin(row.kind, facts.source, row.secret)
    model = register_model(name=row.name, facts=facts, actor=row.asked_by, now=now, fetched_from=(place,))
    weights.claim_weights(model.digest, [row.node_id], owner=PERSON, actor=row.asked_by, now=now)
    advance_import(row, "import_registered", why=f"registered as {model.digest[:19]}", actor=actor, now=now)
    row.model, row.fixed_location = model, facts.source
    row.bytes_per_second, row.eta_seconds = 0.0, None
    row.files_done = row.file_count = len(facts.files)
    row.have_bytes = row.total_bytes = sum(file.size_bytes for file in facts.files)
    row.save()
    FoundPart.objects.filter(model_import=row).delete()
    return model


def _node_for(node_id: UUID | None) -> Node:
    places = import_places()
    if node_id is None:
        chosen = choose_node(places)
        if chosen is None:
            raise ConflictError(
                "no node can take a model in: none is alive, in use, and able to store weights"
            )
        return Node.objects.get(pk=chosen.node_id)
    named = [place for place in places if place.node_id == str(node_id)]
    if not named:
        raise InvalidInputError("node", "no such node is in service")
    if not named[0].accepts:
        raise ConflictError(
            f"'{named[0].name}' cannot take a model in: it must be alive, in use, and able to store weights"
        )
    return Node.objects.get(pk=node_id)


def _act(import_id: UUID, event: str, *, actor: str, now: datetime, reason: str) -> ModelImport:
    row = _locked(import_id)
    try:
        advance_import(row, event, why=reason, actor=actor, now=now)
    except IllegalTransitionError as error:
        raise ConflictError(f"the import of '{row.name}' is {row.get_status_display()}") from error
    row.bytes_per_second, row.eta_seconds = 0.0, None
    row.save()
    return row


def _locked(import_id: UUID) -> ModelImport:
    return ModelImport.objects.select_for_update().get(pk=import_id)


def _subject(row: ModelImport) -> Subject:
    return Subject("model_import", str(row.pk), row.name)
