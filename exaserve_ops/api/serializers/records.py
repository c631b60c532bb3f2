"""Sessions, events and API keys."""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar

from rest_framework import serializers

from exaserve_ops.access.models import ApiKey, Scope
from exaserve_ops.api.serializers.strict import StrictSerializer
from exaserve_ops.audit.models import Event
from exaserve_ops.lib import clock
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
        ]


class ApiKeyRequestSerializer(StrictSerializer):
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


class NewApiKeySerializer(ApiKeySerializer):
    """A key with its text, this once."""

    key = serializers.CharField(read_only=True, help_text="Shown this once.")

    class Meta(ApiKeySerializer.Meta):
        fields: ClassVar[list[str]] = [*ApiKeySerializer.Meta.fields, "key"]
