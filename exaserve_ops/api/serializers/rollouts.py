"""Releases and their rollouts."""

from __future__ import annotations

from typing import ClassVar

from rest_framework import serializers

from exaserve_ops.api.serializers.strict import StrictSerializer
from exaserve_ops.rollouts.domain.preflight import RolloutPlan
from exaserve_ops.rollouts.models import Rollout, Wave
from exaserve_ops.serving.models import Release


class ReleaseSerializer(serializers.ModelSerializer[Release]):
    """What replicas of a deployment run: weights, engine and options. Never changed."""

    model_name = serializers.CharField(source="model.name")
    deployment_name = serializers.CharField(source="deployment.name")
    is_current = serializers.SerializerMethodField(help_text="New replicas of the deployment run it.")

    class Meta:
        model = Release
        fields: ClassVar[list[str]] = [
            "id",
            "deployment",
            "deployment_name",
            "number",
            "is_current",
            "model",
            "model_name",
            "engine",
            "engine_options",
            "replica_memory_bytes",
            "created_at",
            "created_by",
        ]

    def get_is_current(self, release: Release) -> bool:
        """Whether it is its deployment's."""
        return release.number == release.deployment.release_number


class GateSerializer(serializers.Serializer[dict[str, str]]):
    """One question to a wave, and its answer."""

    name = serializers.CharField()
    state = serializers.CharField(help_text="`open`, `closed` or `no data`.")
    figure = serializers.CharField(help_text="What was seen.")
    limit = serializers.CharField(help_text="What may be.")
    why = serializers.CharField()


class WaveSerializer(serializers.ModelSerializer[Wave]):
    """Replicas of one failure domain that make way before the next wave begins."""

    gates = GateSerializer(many=True)

    class Meta:
        model = Wave
        fields: ClassVar[list[str]] = [
            "number",
            "status",
            "why",
            "domain",
            "planned",
            "sessions",
            "mode",
            "needs_approval",
            "soak_seconds",
            "gates",
            "since",
            "opened_at",
            "passed_at",
        ]


class RolloutSerializer(serializers.ModelSerializer[Rollout]):
    """A deployment's way from one release to another."""

    deployment_name = serializers.CharField(source="deployment.name")
    from_number = serializers.IntegerField(source="from_release.number")
    to_number = serializers.IntegerField(source="to_release.number")

    class Meta:
        model = Rollout
        fields: ClassVar[list[str]] = [
            "id",
            "deployment",
            "deployment_name",
            "from_release",
            "from_number",
            "to_release",
            "to_number",
            "policy",
            "surge",
            "unavailable",
            "reason",
            "asked_by",
            "approved_by",
            "warnings",
            "estimate",
            "status",
            "why",
            "waits_for",
            "created_at",
            "started_at",
            "status_changed_at",
            "ended_at",
        ]


class RolloutDetailSerializer(RolloutSerializer):
    """A rollout with its waves."""

    waves = WaveSerializer(many=True)

    class Meta(RolloutSerializer.Meta):
        fields: ClassVar[list[str]] = [*RolloutSerializer.Meta.fields, "waves"]


class RolloutPlanRequestSerializer(StrictSerializer):
    """What a deployment is to run, and how it is to get there."""

    deployment = serializers.UUIDField()
    model = serializers.UUIDField(
        required=False, allow_null=True, default=None, help_text="The present one where left out."
    )
    engine = serializers.CharField(max_length=32, required=False, default="", allow_blank=True)
    engine_options = serializers.DictField(
        required=False, allow_null=True, default=None, help_text="All of them; the present ones if left out."
    )
    replica_memory_bytes = serializers.IntegerField(
        min_value=0, max_value=1 << 50, required=False, default=0, help_text="0: as now, or computed."
    )
    policy = serializers.DictField(
        required=False,
        default=dict,
        help_text=(
            "`max_surge`, `max_unavailable`, `canary` (counts or shares such as `25%`), `growth` (list "
            "of sizes), `approve_waves`, `canary_soak_seconds`, `soak_seconds`, `min_requests`, "
            "`warm_up_seconds`, `data_deadline_seconds`, "
            "`max_error_ratio`, `max_ttft_ratio`, `max_itl_ratio`, `max_restarts`, `max_out_of_blocks`, "
            "`on_failure` (`roll_back` or `halt`), `move_sessions`, `sessions_wait_seconds`, "
            "`prewarm_seconds`, `second_approver`."
        ),
    )


class RolloutRequestSerializer(RolloutPlanRequestSerializer):
    """Asks for a rollout whose plan was read."""

    reason = serializers.CharField(max_length=500, help_text="Why; shown in the history.")
    plan = serializers.CharField(
        max_length=64, help_text="`digest` of the plan that you read; another plan by now: 409."
    )


class ReleaseContentSerializer(serializers.Serializer[dict[str, object]]):
    """What a release runs; one that is planned has its number only once it is asked for."""

    number = serializers.IntegerField()
    model_id = serializers.UUIDField()
    model_name = serializers.CharField()
    engine = serializers.CharField()
    engine_options = serializers.DictField()
    replica_memory_bytes = serializers.IntegerField()


class PlannedWaveSerializer(serializers.Serializer[dict[str, object]]):
    """A wave as planned."""

    number = serializers.IntegerField()
    domain = serializers.CharField()
    replica_ids = serializers.ListField(child=serializers.UUIDField())
    nodes = serializers.ListField(child=serializers.CharField())
    sessions = serializers.IntegerField(help_text="Active ones that go to other replicas.")
    soak_seconds = serializers.IntegerField()
    needs_approval = serializers.BooleanField()
    why = serializers.CharField()


class RolloutEstimateSerializer(serializers.Serializer[dict[str, object]]):
    """What it costs, roughly."""

    seconds = serializers.FloatField()
    bytes_to_bring = serializers.IntegerField(help_text="Weights, over all nodes together.")
    replicas = serializers.IntegerField()
    sessions = serializers.IntegerField(help_text="That move, and are computed again.")


class RolloutPlanSerializer(serializers.Serializer[RolloutPlan]):
    """What a rollout would do. Nothing is changed by asking."""

    digest = serializers.CharField(help_text="Send it with the request: it says which plan you agree to.")
    old = ReleaseContentSerializer()
    new = ReleaseContentSerializer()
    mode = serializers.CharField(help_text="`surge`: successors start first; `in_place`: in the freed place.")
    surge = serializers.IntegerField()
    unavailable = serializers.IntegerField()
    waves = PlannedWaveSerializer(many=True)
    estimate = RolloutEstimateSerializer()
    warnings = serializers.ListField(child=serializers.CharField())
    refusals = serializers.ListField(child=serializers.CharField(), help_text="Why it cannot begin.")
