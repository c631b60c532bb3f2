"""Parts of replicas that run on several nodes."""

from __future__ import annotations

from typing import ClassVar

from rest_framework import serializers

from exaserve_ops.serving.models import ReplicaMember


class ReplicaMemberSerializer(serializers.ModelSerializer[ReplicaMember]):
    """One part of a replica that runs on several nodes."""

    node_name = serializers.CharField(source="node.name")
    accelerators = serializers.ListField(
        child=serializers.CharField(), source="accelerator_uuids", help_text="UUIDs."
    )

    class Meta:
        model = ReplicaMember
        fields: ClassVar[list[str]] = [
            "number",
            "node",
            "node_name",
            "accelerators",
            "adapters",
            "reserved_bytes",
            "state",
            "reason",
            "epoch",
            "attempt",
            "pid",
            "rendezvous",
            "exit_text",
            "ended_at",
        ]
