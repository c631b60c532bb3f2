"""Imports of models from hubs, servers and buckets."""

from __future__ import annotations

from typing import ClassVar

from rest_framework import serializers

from exaserve_ops.api.serializers.strict import StrictSerializer
from exaserve_ops.serving.domain.origins import (
    IMPORT_KINDS,
    MAX_PATTERN_CHARACTERS,
    MAX_PATTERNS,
    MAX_REVISION,
    MAX_SECRET_NAME,
)
from exaserve_ops.serving.models import ModelImport


class ModelImportSerializer(serializers.ModelSerializer[ModelImport]):
    """A model that a node fetches, hashes while it comes, and has registered."""

    node_name = serializers.CharField(source="node.name")
    files = serializers.ListField(
        child=serializers.CharField(),
        help_text="Names or patterns that were asked for; none: what is needed.",
    )
    why = serializers.CharField(help_text="Why it stands so, or what it is doing.")

    class Meta:
        model = ModelImport
        fields: ClassVar[list[str]] = [
            "id",
            "name",
            "status",
            "why",
            "node",
            "node_name",
            "kind",
            "location",
            "secret",
            "revision",
            "files",
            "fixed_location",
            "attempt",
            "file_count",
            "files_done",
            "total_bytes",
            "have_bytes",
            "bytes_per_second",
            "eta_seconds",
            "model",
            "reason",
            "asked_by",
            "created_at",
            "status_changed_at",
            "ended_at",
        ]


class ModelImportRequestSerializer(StrictSerializer):
    """Asks for a model from a place that nodes can reach."""

    name = serializers.CharField(max_length=120, help_text="Of the model; what clients send as `model`.")
    kind = serializers.ChoiceField(choices=IMPORT_KINDS)
    location = serializers.CharField(
        max_length=1000,
        help_text="`https://hub/owner/name`, `https://host/path` or `s3://bucket/prefix`.",
    )
    secret = serializers.CharField(
        max_length=MAX_SECRET_NAME,
        required=False,
        default="",
        allow_blank=True,
        help_text="Name of a file in `secrets/` of the agent's home; never the secret itself.",
    )
    revision = serializers.CharField(
        max_length=MAX_REVISION,
        required=False,
        default="",
        allow_blank=True,
        help_text="Of a hub: branch, tag or commit; empty: `main`. The commit is what stays recorded.",
    )
    files = serializers.ListField(
        child=serializers.CharField(max_length=MAX_PATTERN_CHARACTERS),
        required=False,
        default=list,
        max_length=MAX_PATTERNS,
        help_text="Names, or patterns with `*` where the place can be listed; empty: what an engine needs.",
    )
    node = serializers.UUIDField(
        required=False, allow_null=True, default=None, help_text="Which one fetches; null: with most room."
    )
    reason = serializers.CharField(max_length=500, help_text="Why; shown in the history.")
