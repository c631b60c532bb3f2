"""Weights of models on nodes' disks."""

from __future__ import annotations

from typing import Any, ClassVar

from rest_framework import serializers

from exaserve_ops.api.serializers.strict import StrictSerializer
from exaserve_ops.serving.domain.origins import MAX_ORIGINS, MAX_SECRET_NAME, SCHEMES
from exaserve_ops.serving.models import Model
from exaserve_ops.weights.domain.held import ABSENT, STATES
from exaserve_ops.weights.domain.prewarm import FASTEST_BYTES_PER_SECOND, MINUTES_OF_A_DAY, MOST_AT_ONCE
from exaserve_ops.weights.models import PrewarmPolicy

MAX_NODES = 4096
ACTIONS = ("want", "release", "pause", "resume")


class WeightsOnNodeSerializer(serializers.Serializer[Any]):
    """A model's weights on one node."""

    node = serializers.UUIDField(source="node_id")
    name = serializers.CharField()
    state = serializers.ChoiceField(choices=(ABSENT, *STATES))
    reason = serializers.CharField(help_text="Why it is not ready; empty where it is, or nobody wants it.")
    have_bytes = serializers.IntegerField(help_text="Verified and on disk.")
    total_bytes = serializers.IntegerField()
    bytes_per_second = serializers.FloatField(help_text="Now.")
    eta_seconds = serializers.FloatField(allow_null=True)
    in_use = serializers.BooleanField(help_text="A replica there runs or starts from it.")
    damaged_pieces = serializers.IntegerField()
    spoilt = serializers.BooleanField(
        help_text="Not to be had by its own fault: other bytes than registered, or none that load."
    )
    owners = serializers.ListField(child=serializers.CharField(), help_text="Who wants it there.")
    paused = serializers.BooleanField(help_text="By all of them.")
    sources = serializers.DictField(
        child=serializers.IntegerField(), help_text="Verified bytes by where they came from."
    )
    since = serializers.DateTimeField(allow_null=True, help_text="In this state.")


class PrewarmPolicySerializer(serializers.ModelSerializer[PrewarmPolicy]):
    """When and where a model is fetched ahead of being needed."""

    class Meta:
        model = PrewarmPolicy
        fields: ClassVar[list[str]] = [
            "enabled",
            "node_names",
            "busiest_ratio",
            "from_minute",
            "until_minute",
            "bytes_per_second",
            "at_once",
            "note",
            "changed_at",
        ]


class OriginSerializer(StrictSerializer):
    """One place that nodes fetch a model from."""

    kind = serializers.ChoiceField(choices=sorted(SCHEMES))
    location = serializers.CharField(max_length=1000)
    secret = serializers.CharField(
        max_length=MAX_SECRET_NAME,
        required=False,
        default="",
        allow_blank=True,
        help_text="Name of a file in `secrets/` of each agent's home; never the secret itself.",
    )


class ModelWeightsSerializer(serializers.Serializer[Any]):
    """A model's weights on all nodes in service."""

    model = serializers.UUIDField()
    revision = serializers.CharField()
    manifest_digest = serializers.CharField(allow_blank=True, help_text="Empty: only ever used in place.")
    storage = serializers.ChoiceField(choices=Model.Storage.choices)
    origins = OriginSerializer(many=True)
    policy = PrewarmPolicySerializer(allow_null=True)
    nodes = WeightsOnNodeSerializer(many=True)


def _speed() -> serializers.IntegerField:
    return serializers.IntegerField(
        min_value=0,
        max_value=FASTEST_BYTES_PER_SECOND,
        required=False,
        default=0,
        help_text="0: as fast as it goes.",
    )


class WeightsRequestSerializer(StrictSerializer):
    """Asks for a model on nodes' disks by hand, or takes that back."""

    action = serializers.ChoiceField(choices=ACTIONS)
    nodes = serializers.ListField(child=serializers.UUIDField(), min_length=1, max_length=MAX_NODES)
    bytes_per_second = _speed()
    reason = serializers.CharField(max_length=500, help_text="Why; shown in the history.")


class PrewarmRequestSerializer(StrictSerializer):
    """Rules for fetching a model ahead of being needed."""

    nodes = serializers.ListField(
        child=serializers.CharField(max_length=120),
        required=False,
        default=list,
        max_length=MAX_NODES,
        help_text="Names; empty: every node in service.",
    )
    busiest_ratio = serializers.FloatField(min_value=0, max_value=1, required=False, default=0.5)
    from_minute = serializers.IntegerField(
        min_value=0, max_value=MINUTES_OF_A_DAY - 1, required=False, default=0
    )
    until_minute = serializers.IntegerField(
        min_value=0,
        max_value=MINUTES_OF_A_DAY,
        required=False,
        default=MINUTES_OF_A_DAY,
        help_text="Of the day, in UTC; before `from_minute`: past midnight.",
    )
    bytes_per_second = _speed()
    at_once = serializers.IntegerField(min_value=1, max_value=MOST_AT_ONCE, required=False, default=8)
    reason = serializers.CharField(max_length=500)


class PrewarmPauseSerializer(StrictSerializer):
    """Stops fetching ahead, or lets it go on."""

    paused = serializers.BooleanField(help_text="What is on disks stays, and so do the rules.")
    reason = serializers.CharField(max_length=500)


class StorageRequestSerializer(StrictSerializer):
    """Says what replicas of a model start from, and where nodes fetch it."""

    storage = serializers.ChoiceField(choices=Model.Storage.choices)
    origins = serializers.ListField(child=OriginSerializer(), required=False, max_length=MAX_ORIGINS)
    reason = serializers.CharField(max_length=500)
