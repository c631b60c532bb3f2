"""Starts in turns."""

from __future__ import annotations

from typing import ClassVar

from rest_framework import serializers

from exaserve_ops.api.serializers.strict import StrictSerializer
from exaserve_ops.serving.domain.starts import StartLimits
from exaserve_ops.serving.models import StagedStart
from exaserve_ops.serving.selectors.start_outlook import StartOutlook
from exaserve_ops.serving.services.starts import MOST_AT_ONCE


class StagedStartSerializer(serializers.ModelSerializer[StagedStart]):
    """A time in which more replicas were to start than could at once."""

    class Meta:
        model = StagedStart
        fields: ClassVar[list[str]] = ["id", "began_at", "ended_at", "replicas", "waves", "most_waiting"]


class StartLimitsSerializer(serializers.Serializer[StartLimits]):
    """How much may start at once. 0: any number."""

    per_node = serializers.IntegerField(help_text="Replicas of one node.")
    per_fleet = serializers.IntegerField(help_text="Replicas of the fleet.")
    from_origins = serializers.IntegerField(
        help_text="Copies of weights that leave their origins; nodes that pass them on count as one."
    )
    in_place = serializers.IntegerField(help_text="Nodes that read weights where their source lies.")
    per_rack = serializers.IntegerField(help_text="Nodes of one rack that fetch weights.")


class StartLimitsRequestSerializer(StrictSerializer):
    """Sets limits of what starts at once; those that are left out stay. 0: any number."""

    per_node = serializers.IntegerField(min_value=0, max_value=MOST_AT_ONCE, required=False)
    per_fleet = serializers.IntegerField(min_value=0, max_value=MOST_AT_ONCE, required=False)
    from_origins = serializers.IntegerField(min_value=0, max_value=MOST_AT_ONCE, required=False)
    in_place = serializers.IntegerField(min_value=0, max_value=MOST_AT_ONCE, required=False)
    per_rack = serializers.IntegerField(min_value=0, max_value=MOST_AT_ONCE, required=False)
    reason = serializers.CharField(max_length=500, help_text="Why; shown in the history.")


class StartCauseSerializer(serializers.Serializer[dict[str, object]]):
    """One thing that replicas wait for."""

    words = serializers.CharField()
    replicas = serializers.IntegerField()
    example = serializers.CharField(help_text="What is told of one of them.")


class StartWaveSerializer(serializers.Serializer[dict[str, object]]):
    """Replicas that were let go in the same moment."""

    at = serializers.DateTimeField()
    let_go = serializers.IntegerField()
    ready = serializers.IntegerField(help_text="Of these, by now.")


class StartOutlookSerializer(serializers.Serializer[StartOutlook]):
    """Who starts and who waits for what, in the fleet or of one deployment."""

    starting = serializers.IntegerField(help_text="Replicas that may start and are not ready.")
    waiting = serializers.IntegerField(help_text="Replicas that wait for their turn.")
    simulated = serializers.IntegerField(help_text="Of these two, the ones on simulated nodes.")
    ready = serializers.IntegerField(help_text="Of those that were let go since `since`.")
    since = serializers.DateTimeField(
        allow_null=True, help_text="When the staged start began; null: nobody has to wait."
    )
    causes = StartCauseSerializer(many=True)
    waves = StartWaveSerializer(many=True)
    ready_per_second = serializers.FloatField(
        allow_null=True, help_text="Over the last minute; null: too few became ready to tell."
    )
    eta_seconds = serializers.FloatField(allow_null=True, help_text="Until all are ready, at that pace.")
    limits = StartLimitsSerializer()
