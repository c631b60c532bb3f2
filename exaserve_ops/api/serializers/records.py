"""Sessions, events and API keys."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from exaserve_ops.access.domain.limits import (
    INTERACTIVE,
    MOST_CONCURRENT,
    MOST_TOKENS_PER_MINUTE,
    TRAFFIC_CLASSES,
    KeyLimits,
)
from exaserve_ops.access.models import ApiKey, Scope
from exaserve_ops.api.serializers.strict import StrictSerializer
from exaserve_ops.audit.models import Event
from exaserve_ops.lib import clock
from exaserve_ops.sessions.domain.timeline import read_stays, read_turns
from exaserve_ops.sessions.models import InferenceSession


class SessionSerializer(serializers.ModelSerializer[InferenceSession]):
    """A conversation. Counts and times only: nothing that was said."""

    class Meta:
        model = InferenceSession
        fields: ClassVar[list[str]] = [
            "id",
            "session_id",
            "model_name",
            "replica",
            "node_name",
            "turns",
            "failed_turns",
            "replica_changes",
            "prompt_tokens",
            "cached_tokens",
            "completion_tokens",
            "context_tokens",
            "last_ttft_seconds",
            "last_outcome",
            "last_why",
            "first_turn_at",
            "last_turn_at",
        ]


class TurnMarkSerializer(StrictSerializer):
    """One turn of a conversation; `null` is what the engine did not say."""

    at = serializers.DateTimeField()
    duration_seconds = serializers.FloatField()
    ttft_seconds = serializers.FloatField(allow_null=True)
    replica_id = serializers.CharField(help_text="Empty where no replica was reached.")
    why = serializers.CharField(help_text="Why it went there.")
    outcome = serializers.CharField()
    prompt_tokens = serializers.IntegerField(allow_null=True)
    cached_tokens = serializers.IntegerField(allow_null=True)
    completion_tokens = serializers.IntegerField(allow_null=True)
    attempts = serializers.IntegerField()
    continued_from = serializers.ListField(
        child=serializers.CharField(),
        help_text="Replicas that broke off in the middle of the answer, in order; this one gave the rest.",
    )


class StaySerializer(StrictSerializer):
    """Turns in a row at one replica."""

    replica_id = serializers.CharField()
    node_name = serializers.CharField()
    first_at = serializers.DateTimeField()
    last_at = serializers.DateTimeField()
    turns = serializers.IntegerField()
    why = serializers.CharField(help_text="Why the first of them went there.")


class SessionDetailSerializer(SessionSerializer):
    """A conversation with its course: the latest 40 turns and 20 stays, oldest first."""

    latest_turns = serializers.SerializerMethodField()
    stays = serializers.SerializerMethodField()

    class Meta(SessionSerializer.Meta):
        fields: ClassVar[list[str]] = [*SessionSerializer.Meta.fields, "latest_turns", "stays"]

    @extend_schema_field(TurnMarkSerializer(many=True))
    def get_latest_turns(self, session: InferenceSession) -> list[dict[str, Any]]:
        """Return the kept turns."""
        turns = read_turns(session.latest_turns)
        return [{"at": _moment(turn.at_seconds), **_without(turn._asdict(), "at_seconds")} for turn in turns]

    @extend_schema_field(StaySerializer(many=True))
    def get_stays(self, session: InferenceSession) -> list[dict[str, Any]]:
        """Return the kept stays."""
        return [
            {
                "first_at": _moment(stay.first_seconds),
                "last_at": _moment(stay.last_seconds),
                **_without(stay._asdict(), "first_seconds", "last_seconds"),
            }
            for stay in read_stays(session.stays)
        ]


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, tz=UTC)


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


class EventSerializer(serializers.ModelSerializer[Event]):
    """One thing that happened."""

    class Meta:
        model = Event
        fields: ClassVar[list[str]] = [
            "id",
            "at",
            "actor",
            "subject_kind",
            "subject_id",
            "subject_name",
            "event",
            "from_status",
            "to_status",
            "reason",
            "generation",
        ]


class ApiKeySerializer(serializers.ModelSerializer[ApiKey]):
    """A key, without its text."""

    user = serializers.CharField(source="user.get_username")

    class Meta:
        model = ApiKey
        fields: ClassVar[list[str]] = [
            "id",
            "name",
            "user",
            "prefix",
            "scopes",
            "created_at",
            "expires_at",
            "revoked_at",
            "max_concurrent_requests",
            "tokens_per_minute",
            "traffic_class",
        ]


class KeyLimitsSerializer(StrictSerializer):
    """What a key may use over all gateways together; `null` is no bound."""

    max_concurrent_requests = serializers.IntegerField(
        required=False, allow_null=True, default=None, min_value=1, max_value=MOST_CONCURRENT
    )
    tokens_per_minute = serializers.IntegerField(
        required=False,
        allow_null=True,
        default=None,
        min_value=1,
        max_value=MOST_TOKENS_PER_MINUTE,
        help_text="Prompt and completion together.",
    )
    traffic_class = serializers.ChoiceField(
        choices=TRAFFIC_CLASSES,
        required=False,
        default=INTERACTIVE,
        help_text="`batch` waits behind the rest.",
    )


class KeyLimitsRequestSerializer(KeyLimitsSerializer):
    """Asks for other limits; what is left out is no bound, and `interactive`."""

    reason = serializers.CharField(max_length=500)


class ApiKeyRequestSerializer(KeyLimitsSerializer):
    """Asks for a key."""

    name = serializers.CharField(max_length=100)
    scopes = serializers.ListField(
        child=serializers.ChoiceField(choices=Scope.choices), min_length=1, max_length=len(Scope)
    )
    expires_at = serializers.DateTimeField(required=False, allow_null=True, default=None)
    user = serializers.CharField(
        max_length=150, required=False, help_text="Whose rights it has; yours where left out."
    )

    def validate_expires_at(self, moment: datetime | None) -> datetime | None:
        """Refuse a key that would open nothing."""
        if moment is not None and moment <= clock.now():
            raise serializers.ValidationError("This moment has passed.")
        return moment


def limits_of(body: dict[str, Any]) -> KeyLimits:
    """Limits out of a checked body."""
    return KeyLimits(body["max_concurrent_requests"], body["tokens_per_minute"], body["traffic_class"])


class NewApiKeySerializer(ApiKeySerializer):
    """A key with its text, this once."""

    key = serializers.CharField(read_only=True, help_text="Shown this once.")

    class Meta(ApiKeySerializer.Meta):
        fields: ClassVar[list[str]] = [*ApiKeySerializer.Meta.fields, "key"]


class GatewayReportSerializer(serializers.Serializer[Any]):
    """How one gateway process does."""

    gateway = serializers.CharField(help_text="Host and port, and the process where there are several.")
    sticky_ratio = serializers.FloatField(
        allow_null=True, help_text="Returning turns that reached their session's replica; null without any."
    )
    sticky_turns = serializers.IntegerField()
    returning_turns = serializers.IntegerField(help_text="Of sessions that had a replica before.")
    window_seconds = serializers.FloatField(help_text="The turns were counted over so long.")
    open_requests = serializers.IntegerField()
    waiting_requests = serializers.IntegerField()
    route_table_age_seconds = serializers.FloatField(allow_null=True)
    is_route_table_stale = serializers.BooleanField()
    session_table_failures = serializers.IntegerField(help_text="Turns routed without the session table.")
