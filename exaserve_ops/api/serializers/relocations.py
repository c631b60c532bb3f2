"""Moves of conversations between replicas."""

from __future__ import annotations

from typing import ClassVar

from rest_framework import serializers

from exaserve_ops.api.serializers.strict import StrictSerializer
from exaserve_ops.sessions.domain.relocation import TRIGGERS
from exaserve_ops.sessions.models import Relocation


class RelocationSerializer(serializers.ModelSerializer[Relocation]):
    """A move, from the decision to its end."""

    session_id = serializers.CharField(source="session.session_id", help_text="As the client named it.")
    session = serializers.IntegerField(source="session_id", help_text="Its id here.")

    class Meta:
        model = Relocation
        fields: ClassVar[list[str]] = [
            "id",
            "session",
            "session_id",
            "source",
            "target",
            "status",
            "why",
            "trigger",
            "asked_by",
            "reason",
            "way",
            "carrier",
            "sent_bytes",
            "target_tokens",
            "send_seconds",
            "created_at",
            "status_changed_at",
            "ended_at",
        ]


class MoveRequestSerializer(StrictSerializer):
    """Asks for a conversation to be moved before its next turn."""

    target = serializers.UUIDField(
        required=False,
        allow_null=True,
        default=None,
        help_text="Replica of the same deployment; the emptiest where left out.",
    )
    reason = serializers.CharField(max_length=500, help_text="Why; shown in the history.")


class PlannedMoveSerializer(serializers.Serializer[dict[str, object]]):
    """A conversation that would move now."""

    session = serializers.IntegerField()
    replica = serializers.UUIDField(help_text="Where it is.")
    target = serializers.UUIDField()
    way = serializers.CharField(help_text="`transfer`, `prefill` or `recompute`.")
    context_tokens = serializers.IntegerField()
    kv_bytes = serializers.IntegerField()
    estimate = serializers.CharField(help_text="How the two ways compare.")
    why = serializers.CharField()
    trigger = serializers.ChoiceField(choices=TRIGGERS)


class StayingSerializer(serializers.Serializer[dict[str, object]]):
    """A conversation that is to move and does not yet."""

    session = serializers.IntegerField()
    replica = serializers.UUIDField()
    why = serializers.CharField()


class MoveLimitsSerializer(serializers.Serializer[dict[str, object]]):
    """How much may move at once, and how fast."""

    moves_per_node = serializers.IntegerField(help_text="At once, as source or target.")
    moves_per_fleet = serializers.IntegerField()
    bytes_per_second = serializers.IntegerField(help_text="Of one move.")
    fleet_bytes_per_second = serializers.IntegerField(help_text="Of all moves together, on average.")


class PlannedDeploymentSerializer(serializers.Serializer[dict[str, object]]):
    """What a deployment's moves are judged by. Null: not measured yet."""

    deployment = serializers.UUIDField()
    balances = serializers.BooleanField(help_text="Whether its sessions are balanced where they need it.")
    balancing = serializers.CharField(allow_null=True, help_text="What is being levelled; null: nothing.")
    prefill_tokens_per_second = serializers.FloatField(allow_null=True)
    same_node_bytes_per_second = serializers.FloatField(allow_null=True)
    same_node_talk_seconds = serializers.FloatField(
        help_text="Of a move whatever its size, beside its bytes."
    )
    across_bytes_per_second = serializers.FloatField(allow_null=True)
    across_talk_seconds = serializers.FloatField(help_text="Of a move whatever its size, beside its bytes.")
    kv_bytes_per_token = serializers.IntegerField(allow_null=True)


class ReplicaPressureSerializer(serializers.Serializer[dict[str, object]]):
    """How full of active conversations a replica is."""

    replica = serializers.UUIDField()
    pressure = serializers.FloatField(help_text="Tokens of conversations that came back, over its KV memory.")


class RelocationPlanSerializer(serializers.Serializer[dict[str, object]]):
    """What would begin now, and what waits, out of the newest 5,000 conversations that are to move."""

    limits = MoveLimitsSerializer()
    underway = serializers.IntegerField(help_text="Moves that have begun and not ended.")
    deployments = PlannedDeploymentSerializer(many=True)
    replicas = ReplicaPressureSerializer(many=True)

    moves = PlannedMoveSerializer(many=True)
    stays = StayingSerializer(many=True)
