"""What engines compiled for a model."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from exaserve_ops.api.serializers.strict import StrictSerializer
from exaserve_ops.api.serializers.weights import OriginSerializer
from exaserve_ops.serving.domain.origins import MAX_ORIGINS


class CompiledSetSerializer(serializers.Serializer[Any]):
    """One set of compiled files, and how far nodes are with it."""

    id = serializers.UUIDField()
    engine = serializers.CharField()
    hardware = serializers.CharField(allow_blank=True, help_text="Empty: any.")
    digest = serializers.CharField()
    total_bytes = serializers.IntegerField()
    file_count = serializers.IntegerField()
    origins = OriginSerializer(many=True)
    registered_by = serializers.CharField()
    created_at = serializers.DateTimeField()
    nodes = serializers.IntegerField(help_text="That told of it.")
    ready_nodes = serializers.IntegerField(help_text="That have all of it, verified.")
    failed_nodes = serializers.IntegerField()


class CompiledSetsSerializer(serializers.Serializer[Any]):
    """All sets of a model."""

    model = serializers.UUIDField()
    sets = CompiledSetSerializer(many=True)


class CompiledRemovedSerializer(CompiledSetsSerializer):
    """What is left after a set was removed."""

    note = serializers.CharField(help_text="What becomes of the copies on nodes.")


class CompiledRequestSerializer(StrictSerializer):
    """Registers a folder of what an engine compiled."""

    engine = serializers.CharField(max_length=32)
    hardware = serializers.CharField(
        max_length=120,
        required=False,
        default="",
        allow_blank=True,
        help_text="Name or kind of an accelerator, as nodes show it; empty: any.",
    )
    folder = serializers.CharField(
        max_length=1000,
        help_text="Laid out as `engine-cache/<engine>` of an agent; below one of EXAOPS_COMPILED_FOLDERS.",
    )
    origins = serializers.ListField(
        child=OriginSerializer(),
        required=False,
        default=list,
        max_length=MAX_ORIGINS,
        help_text="Where nodes fetch it, nearest first; empty: that folder.",
    )
    reason = serializers.CharField(max_length=500)
