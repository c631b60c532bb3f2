"""Models: their files and manifests, how they come in, and what engines compile for them."""

from __future__ import annotations

import uuid
from typing import Any, ClassVar

from django.db import models
from django.db.models.functions import Now

from exaserve_ops.inventory.models import Node
from exaserve_ops.serving.domain.architecture import described_config
from exaserve_ops.serving.domain.model_import import MODEL_IMPORT


class Model(models.Model):
    """Weights and tokenizer, named by digest. Immutable: other bytes are another model."""

    class Storage(models.TextChoices):
        """What replicas start from."""

        IN_PLACE = "in_place", "where its source lies"
        NODE = "node", "a copy on each node's own disk"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(
        max_length=120, unique=True, help_text="What clients send as `model` unless overridden."
    )
    digest = models.CharField(max_length=80, help_text="`sha256:` of the list of files.")
    source = models.CharField(max_length=1000, help_text="`file:///folder` that nodes can read.")
    storage = models.CharField(
        max_length=8,
        choices=Storage.choices,
        default=Storage.IN_PLACE,
        help_text="Whether replicas start from the source itself, or from a copy on their node's disk.",
    )
    origins = models.JSONField(
        default=list,
        blank=True,
        help_text="Where nodes fetch it, nearest first: kind, location, secret. Empty: its source.",
    )
    architecture = models.JSONField(
        default=dict, blank=True, help_text="Facts from config.json: family, layers, heads, limits."
    )
    config = models.JSONField(
        default=dict, blank=True, help_text="config.json as it was read: what memory is planned with."
    )
    parameter_count = models.BigIntegerField(null=True, blank=True)
    weights_bytes = models.BigIntegerField(default=0)
    kv_bytes_per_token = models.BigIntegerField(
        null=True, blank=True, help_text="What each further token takes; null: the layout is not known."
    )
    max_context_tokens = models.PositiveIntegerField(null=True, blank=True)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        ordering: ClassVar[list[str]] = ["name"]

    def __str__(self) -> str:
        """Return the name."""
        return self.name

    @property
    def planning_config(self) -> dict[str, Any]:
        """config.json, or one that says the same as the facts, for a model registered without."""
        known: dict[str, Any] = dict(self.config)
        return known or described_config(self.architecture, self.max_context_tokens or 0)


class ModelFile(models.Model):
    """One file of a model."""

    model = models.ForeignKey(Model, on_delete=models.CASCADE, related_name="files")
    path = models.CharField(max_length=500)
    size_bytes = models.BigIntegerField()
    sha256 = models.CharField(max_length=64)

    class Meta:
        ordering: ClassVar[list[str]] = ["path"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["model", "path"], name="model_file_once"),
        ]

    def __str__(self) -> str:
        """Return the path."""
        return self.path


class ModelManifest(models.Model):
    """Sizes and digests of a model's files and of their pieces: what nodes fetch and check it by.

    Of its own, since it may be megabytes and only the controllers read it.
    """

    model = models.OneToOneField(Model, on_delete=models.CASCADE, primary_key=True, related_name="manifest")
    digest = models.CharField(max_length=80, db_index=True, help_text="`sha256:` of the bytes; names it.")
    body = models.BinaryField()

    def __str__(self) -> str:
        """Return the digest."""
        return self.digest


class ModelImport(models.Model):
    """A model that a node fetches from a hub, a server or a bucket, until it is registered."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=120, help_text="Of the model, once it is registered.")
    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="model_imports")
    # Desired
    kind = models.CharField(max_length=8, help_text="`hub`, `http` or `s3`.")
    location = models.CharField(max_length=1000)
    secret = models.CharField(max_length=64, blank=True, help_text="Name of a secret on the node.")
    revision = models.CharField(
        max_length=200, blank=True, help_text="Of a hub: branch, tag or commit; empty: main."
    )
    files = models.JSONField(default=list, blank=True, help_text="Names or patterns; empty: what is needed.")
    attempt = models.PositiveIntegerField(default=1)
    reason = models.CharField(max_length=500, help_text="Why; shown in the history.")
    asked_by = models.CharField(max_length=120)
    # Status
    status = models.CharField(max_length=16, choices=MODEL_IMPORT.choices, default=MODEL_IMPORT.initial)
    why = models.CharField(max_length=1000, blank=True, help_text="Why it stands so, or what it is doing.")
    fixed_location = models.CharField(
        max_length=1000, blank=True, help_text="The place as it stays: of a hub with the commit."
    )
    file_count = models.PositiveIntegerField(default=0)
    files_done = models.PositiveIntegerField(default=0)
    total_bytes = models.BigIntegerField(default=0)
    have_bytes = models.BigIntegerField(default=0)
    bytes_per_second = models.FloatField(default=0.0)
    eta_seconds = models.FloatField(null=True, blank=True)
    model = models.ForeignKey(Model, on_delete=models.SET_NULL, null=True, blank=True, related_name="imports")
    created_at = models.DateTimeField(db_index=True)
    status_changed_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering: ClassVar[list[str]] = ["-created_at"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(
                fields=["name"],
                condition=models.Q(status__in=MODEL_IMPORT.live),
                name="model_import_one_of_a_name",
            ),
            models.CheckConstraint(
                condition=models.Q(status__in=MODEL_IMPORT.statuses), name="model_import_status_known"
            ),
        ]

    def __str__(self) -> str:
        """Return the name and where it comes from."""
        return f"{self.name} from {self.location}"


class FoundPart(models.Model):
    """A part of what a node found for an import; gone when the model is registered."""

    model_import = models.ForeignKey(ModelImport, on_delete=models.CASCADE, related_name="parts")
    digest = models.CharField(max_length=64, help_text="Of all parts together.")
    index = models.PositiveIntegerField()
    count = models.PositiveIntegerField()
    data = models.BinaryField()

    class Meta:
        ordering: ClassVar[list[str]] = ["model_import", "index"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["model_import", "index"], name="found_part_once"),
        ]

    def __str__(self) -> str:
        """Return which part of how many it is."""
        return f"{self.index + 1} of {self.count}"


class CompiledSet(models.Model):
    """What an engine compiled for a model on one kind of hardware: put into engines' caches on nodes.

    Compiled code is code: who registers it lets it run on nodes. It is fetched and verified as weights are.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    model = models.ForeignKey(Model, on_delete=models.CASCADE, related_name="compiled_sets")
    engine = models.CharField(max_length=32)
    hardware = models.CharField(
        max_length=120, blank=True, help_text="Name or kind of an accelerator, as nodes show it. Empty: any."
    )
    digest = models.CharField(max_length=80, help_text="`sha256:` of the list of files.")
    source = models.CharField(max_length=1000)
    origins = models.JSONField(default=list, blank=True, help_text="As of a model.")
    total_bytes = models.BigIntegerField()
    file_count = models.PositiveIntegerField()
    manifest_digest = models.CharField(max_length=80, db_index=True)
    manifest_body = models.BinaryField()
    registered_by = models.CharField(max_length=120)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        ordering: ClassVar[list[str]] = ["model", "engine", "hardware"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["model", "engine", "hardware"], name="compiled_set_once"),
        ]

    def __str__(self) -> str:
        """Return what it is for."""
        return f"{self.model} for {self.engine} on {self.hardware or 'any hardware'}"
