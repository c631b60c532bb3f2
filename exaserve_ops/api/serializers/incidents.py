"""Incidents."""

from __future__ import annotations

from typing import ClassVar

from rest_framework import serializers

from exaserve_ops.health.models import Incident


class IncidentSerializer(serializers.ModelSerializer[Incident]):
    """One time that the control plane doubted itself."""

    summary = serializers.CharField(source="__str__", read_only=True, help_text="Kind and scope in words.")

    class Meta:
        model = Incident
        fields: ClassVar[list[str]] = [
            "id",
            "summary",
            "kind",
            "scope",
            "node_ids",
            "freezes_healing",
            "evidence",
            "opened_at",
            "status",
            "resolved_at",
            "resolved_by",
            "resolution",
            "applied_at",
        ]
