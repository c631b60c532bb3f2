"""Validations of models, and what their checks found."""

from __future__ import annotations

from typing import ClassVar

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from exaserve_ops.api.serializers.strict import StrictSerializer
from exaserve_ops.serving.services.deployments import BOUNDS
from exaserve_ops.validation.domain.catalogue import BY_NAME
from exaserve_ops.validation.models import Validation, ValidationCheck
from exaserve_ops.validation.services import (
    LEAST_LIMIT_SECONDS,
    MOST_AT_ONCE,
    MOST_LAUNCHES,
    MOST_LIMIT_SECONDS,
)


class ValidationCheckSerializer(serializers.ModelSerializer[ValidationCheck]):
    """One check; `engine` is empty for what is asked of the model."""

    title = serializers.SerializerMethodField()
    asks = serializers.SerializerMethodField(help_text="The question.")
    details = serializers.SerializerMethodField(help_text="Curves, tokens and texts, by the kind of check.")

    class Meta:
        model = ValidationCheck
        fields: ClassVar[list[str]] = [
            "position",
            "name",
            "title",
            "asks",
            "engine",
            "status",
            "figure",
            "limit",
            "why",
            "details",
            "began_at",
            "ended_at",
        ]

    def get_title(self, check: ValidationCheck) -> str:
        """What people call it."""
        return BY_NAME[check.name].title

    def get_asks(self, check: ValidationCheck) -> str:
        """What it wants to know."""
        return BY_NAME[check.name].asks

    @extend_schema_field(serializers.DictField())
    def get_details(self, check: ValidationCheck) -> dict[str, object]:
        """As they were found."""
        details: dict[str, object] = check.details
        return details


class ValidationSerializer(serializers.ModelSerializer[Validation]):
    """One run of all checks of a model."""

    model_name = serializers.CharField(source="model.name")

    class Meta:
        model = Validation
        fields: ClassVar[list[str]] = [
            "id",
            "model",
            "model_name",
            "engines",
            "engine_options",
            "replica_memory_bytes",
            "accelerators_per_replica",
            "nodes_per_replica",
            "nodes",
            "idle_seconds",
            "most_at_once",
            "most_launches",
            "ttft_limit_seconds",
            "itl_limit_seconds",
            "reason",
            "asked_by",
            "status",
            "why",
            "waits_for",
            "created_at",
            "started_at",
            "status_changed_at",
            "ended_at",
        ]


class ValidationReportSerializer(ValidationSerializer):
    """A validation with its checks: the report."""

    checks = ValidationCheckSerializer(many=True)

    class Meta(ValidationSerializer.Meta):
        fields: ClassVar[list[str]] = [*ValidationSerializer.Meta.fields, "checks"]


class ValidationRequestSerializer(StrictSerializer):
    """What is to be validated, and on what."""

    model = serializers.UUIDField()
    engines = serializers.ListField(
        child=serializers.CharField(max_length=32),
        min_length=1,
        max_length=4,
        help_text="In this order.",
    )
    engine_options = serializers.DictField(
        child=serializers.DictField(), required=False, default=dict, help_text="By engine."
    )
    replica_memory_bytes = serializers.IntegerField(
        min_value=0, max_value=1 << 50, required=False, default=0, help_text="0: computed."
    )
    accelerators_per_replica = serializers.IntegerField(
        min_value=1, max_value=1024, required=False, default=1
    )
    nodes_per_replica = serializers.IntegerField(
        min_value=1,
        max_value=BOUNDS["nodes_per_replica"][1],
        required=False,
        default=1,
        help_text="More than 1: each trial runs on so many nodes of one supernode at once, with the "
        "memory and the accelerators above on each. All engines of the run are tried so.",
    )
    nodes = serializers.ListField(
        child=serializers.CharField(max_length=64), required=False, default=list, help_text="Empty: any."
    )
    idle_seconds = serializers.IntegerField(min_value=0, max_value=3600, required=False, default=30)
    most_at_once = serializers.IntegerField(min_value=1, max_value=MOST_AT_ONCE, required=False, default=32)
    most_launches = serializers.IntegerField(
        min_value=0,
        max_value=MOST_LAUNCHES,
        required=False,
        default=6,
        help_text="In the search for the best settings: what runs is measured, and replicas with others are"
        " launched and measured; 0: none is made.",
    )
    ttft_limit_seconds = serializers.FloatField(
        min_value=LEAST_LIMIT_SECONDS,
        max_value=MOST_LIMIT_SECONDS,
        required=False,
        default=2.0,
        help_text="What 19 in 20 first tokens may take, for a setting to be a good one.",
    )
    itl_limit_seconds = serializers.FloatField(
        min_value=LEAST_LIMIT_SECONDS,
        max_value=MOST_LIMIT_SECONDS,
        required=False,
        default=0.1,
        help_text="The same between two tokens.",
    )
    reason = serializers.CharField(max_length=500, help_text="Why; shown in the history.")
