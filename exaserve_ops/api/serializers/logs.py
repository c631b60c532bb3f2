"""Logs of replicas: how the last attempt ended, and what is written now."""

from __future__ import annotations

from rest_framework import serializers

from exaserve_ops.serving.models import Replica, ReplicaMember

ALL = "0"
"""Position before all that is kept."""


class ExitLogQuerySerializer(serializers.Serializer[dict[str, object]]):
    """Whose log is asked for."""

    member = serializers.CharField(
        required=False,
        default="",
        help_text="Of a replica over several nodes: the number, from 0, the head; the head unless given.",
    )


class ReplicaLogQuerySerializer(ExitLogQuerySerializer):
    """Which lines are asked for."""

    after = serializers.RegexField(
        r"^\d{1,20}(-\d{1,20})?$",
        required=False,
        default=ALL,
        help_text="`position` of the answer before; all that is kept unless given.",
        error_messages={"invalid": "Give the position of the answer before, as it stands there."},
    )


class ExitLogSerializer(serializers.Serializer[Replica | ReplicaMember]):
    """How the last attempt that ended did so. All null where none has."""

    attempt = serializers.IntegerField(source="exit_attempt", allow_null=True)
    code = serializers.IntegerField(source="exit_code", allow_null=True)
    signal = serializers.IntegerField(source="exit_signal", allow_null=True)
    after_seconds = serializers.FloatField(source="exit_after_seconds", allow_null=True)
    log_tail = serializers.ListField(source="exit_log_tail", child=serializers.CharField())


class LogLineSerializer(serializers.Serializer[dict[str, object]]):
    """One line, as the engine wrote it, secrets masked."""

    attempt = serializers.IntegerField()
    text = serializers.CharField()


class ReplicaLogSerializer(serializers.Serializer[dict[str, object]]):
    """Lines of one log, oldest first."""

    member = serializers.IntegerField(help_text="0: the head, or the whole of a replica on one node.")
    node_name = serializers.CharField(help_text="Where it is written; empty: it has no place yet.")
    position = serializers.CharField(help_text="Give it as `after` to read on.")
    lines = LogLineSerializer(many=True)
    dropped = serializers.IntegerField(help_text="Lines among these that came too fast to be passed on.")
