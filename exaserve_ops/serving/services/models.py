"""Registering of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Protocol

from django.db import transaction

from exaserve_ops.audit.services import Subject, record_event
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.serving.domain.architecture import Architecture
from exaserve_ops.serving.domain.kv_bytes import KvBytes, kv_bytes_of
from exaserve_ops.serving.domain.manifest import EncodedManifest, FileEntry, revision_of
from exaserve_ops.serving.domain.weights_size import WeightsSize, weights_of_files
from exaserve_ops.serving.models import Model, ModelFile, ModelManifest
from exaserve_ops.weights.domain.wanted import Origin


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's files and what its config.json says, as read from its folder."""

    source: str
    files: tuple[FileEntry, ...]
    architecture: Architecture
    parameter_count: int
    config: Mapping[str, Any] = field(default_factory=dict)
    """config.json; empty for a model that is only described."""
    weights_bytes: int | None = None
    """As the index of its shards says; `None`: by the files alone."""
    manifest: EncodedManifest | None = None
    """What nodes fetch it by; `None`: it is only ever used where it lies."""


@dataclass(frozen=True, slots=True)
class FolderReading:
    """How far the reading of a folder is that takes longer than a request may."""

    read_bytes: int
    total_bytes: int

    @property
    def read_ratio(self) -> float:
        """Part that is read."""
        return min(1.0, self.read_bytes / self.total_bytes) if self.total_bytes else 0.0


class ModelFolderReader(Protocol):
    """Reads a model's folder on the control plane's machine."""

    def read(self, folder: str) -> ModelFacts | FolderReading:
        """Files with digests, and what config.json says; how far it is where that takes long: ask again.

        Raises `InvalidInputError` (field `folder`) where it holds no model that can be served.
        """
        ...


@transaction.atomic
def register_model(
    *, name: str, facts: ModelFacts, actor: str, now: datetime, fetched_from: Sequence[Origin] = ()
) -> Model:
    """Record a model. The same bytes under the same name again are no change.

    A model that was recorded without a manifest gets one so. `fetched_from`: it lies in no folder, so nodes
    have copies of their own, from there.
    Raises `ConflictError` where the name stands for other bytes.
    """
    digest = revision_of(facts.files)
    known = Model.objects.filter(name=name).first()
    if known is not None:
        if known.digest == digest:
            _keep_manifest(known, facts.manifest)
            return known
        raise ConflictError(f"'{name}' names other bytes ({known.digest}); register another name")
    architecture = facts.architecture
    config = dict(facts.config) or architecture.as_config()
    kv = kv_bytes_of(config)
    model = Model.objects.create(
        name=name,
        digest=digest,
        source=facts.source,
        storage=Model.Storage.NODE if fetched_from else Model.Storage.IN_PLACE,
        origins=[asdict(place) for place in fetched_from],
        architecture={
            "family": architecture.family,
            "layers": architecture.layers,
            "hidden": architecture.hidden,
            "heads": architecture.heads,
            "kv_heads": architecture.kv_heads,
            "head_dim": architecture.head_dim,
            "vocabulary": architecture.vocabulary,
            "dtype": architecture.dtype,
        },
        parameter_count=facts.parameter_count,
        config=config,
        weights_bytes=_weights_bytes(facts),
        kv_bytes_per_token=kv.growth_bytes_per_token if isinstance(kv, KvBytes) else None,
        max_context_tokens=architecture.max_context_tokens or None,
        created_at=now,
    )
    ModelFile.objects.bulk_create(
        ModelFile(model=model, path=f.path, size_bytes=f.size_bytes, sha256=f.sha256) for f in facts.files
    )
    _keep_manifest(model, facts.manifest)
    subject = Subject("model", str(model.pk), model.name)
    record_event(subject, "registered", actor=actor, now=now, reason=digest)
    return model


def _keep_manifest(model: Model, manifest: EncodedManifest | None) -> None:
    if manifest is not None:
        # The first one stays: nodes may be fetching by it.
        ModelManifest.objects.get_or_create(
            model=model, defaults={"digest": manifest.digest, "body": manifest.body}
        )


def _weights_bytes(facts: ModelFacts) -> int:
    """Size by the files, never by a name; 0 where it is not known, which nothing is placed with."""
    if facts.weights_bytes is not None:
        return facts.weights_bytes
    size = weights_of_files(facts.files)
    return size.bytes if isinstance(size, WeightsSize) else 0
