"""Input that says what it does not know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rest_framework import serializers


class StrictSerializer(serializers.Serializer[Any]):
    """Refuses fields it does not have: a misspelt wish must not be taken for no wish."""

    refusals: ClassVar[Mapping[str, str]] = {}
    """Why fields that people may expect here are not, and what to do instead."""

    def to_internal_value(self, data: Any) -> Any:  # noqa: ANN401 - the base class's signature
        """Return the validated values. Raises `ValidationError` for unknown fields too."""
        if isinstance(data, dict):
            unknown = {
                name: [self.refusals.get(name, "There is no such field.")]
                for name in data
                if name not in self.fields
            }
            if unknown:
                raise serializers.ValidationError(unknown)
        return super().to_internal_value(data)


class NoBodySerializer(StrictSerializer):
    """A request that needs no body: `{}` or nothing."""


class ReasonSerializer(StrictSerializer):
    """A request that says why."""

    reason = serializers.CharField(max_length=500, help_text="Why; shown in the history.")


class OptionalReasonSerializer(StrictSerializer):
    """A request that may say why."""

    reason = serializers.CharField(max_length=500, required=False, default="", allow_blank=True)
