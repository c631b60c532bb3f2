"""Installations over SSH and pinned host keys."""

from __future__ import annotations

from typing import ClassVar

from rest_framework import serializers

from exaserve_ops.api.serializers.strict import StrictSerializer
from exaserve_ops.inventory.domain.installation import STEPS
from exaserve_ops.inventory.models import InstallationStep, NodeInstallation, SshHostKey

MAX_KEY_CHARACTERS = 20_000


class InstallationStepSerializer(serializers.ModelSerializer[InstallationStep]):
    """One step of a run, with its log."""

    class Meta:
        model = InstallationStep
        fields: ClassVar[list[str]] = [
            "run",
            "name",
            "outcome",
            "summary",
            "log",
            "started_at",
            "finished_at",
        ]


class InstallationSerializer(serializers.ModelSerializer[NodeInstallation]):
    """An installation: what is wanted, how far it is, and the host key that was shown."""

    class Meta:
        model = NodeInstallation
        fields: ClassVar[list[str]] = [
            "id",
            "host",
            "port",
            "user",
            "auth",
            "node_name",
            "address",
            "folder",
            "python",
            "allow_http",
            "restart_when_dead",
            "action",
            "action_reason",
            "asked_by",
            "node",
            "facts",
            "offered_key_type",
            "offered_fingerprint",
            "run",
            "status",
            "status_reason",
            "status_changed_at",
            "created_at",
        ]


class InstallationDetailSerializer(InstallationSerializer):
    """The same with the steps of the newest runs."""

    steps = InstallationStepSerializer(many=True)

    class Meta(InstallationSerializer.Meta):
        fields: ClassVar[list[str]] = [*InstallationSerializer.Meta.fields, "steps"]


class CredentialsSerializer(StrictSerializer):
    """How to sign in; never stored in the database, and shown nowhere."""

    password = serializers.CharField(
        max_length=1000, required=False, default="", allow_blank=True, write_only=True, trim_whitespace=False
    )
    private_key = serializers.CharField(
        max_length=MAX_KEY_CHARACTERS,
        required=False,
        default="",
        allow_blank=True,
        write_only=True,
        trim_whitespace=False,
    )
    passphrase = serializers.CharField(
        max_length=1000, required=False, default="", allow_blank=True, write_only=True, trim_whitespace=False
    )


class InstallationRequestSerializer(CredentialsSerializer):
    """Asks for an agent on a machine."""

    host = serializers.CharField(max_length=253)
    port = serializers.IntegerField(min_value=1, max_value=65_535, required=False, default=22)
    user = serializers.CharField(max_length=64)
    auth = serializers.ChoiceField(NodeInstallation.Auth.choices)
    node_name = serializers.CharField(
        max_length=120, required=False, default="", allow_blank=True, help_text="Empty: the host's name."
    )
    address = serializers.CharField(
        max_length=255, required=False, default="", allow_blank=True, help_text="Empty: the host."
    )
    folder = serializers.CharField(max_length=500, required=False, default="exaserve-agent")
    python = serializers.CharField(max_length=500, required=False, default="", allow_blank=True)
    allow_http = serializers.BooleanField(required=False, default=False)
    restart_when_dead = serializers.BooleanField(required=False, default=False)


class ConfirmationSerializer(StrictSerializer):
    """Says that a person compared the host key."""

    fingerprint = serializers.CharField(max_length=64, help_text="As shown: SHA256:…")


class InstallationActionSerializer(CredentialsSerializer):
    """Asks for an action on what is installed, or for the same one again."""

    action = serializers.ChoiceField([(name, name.replace("_", " ")) for name in STEPS])
    reason = serializers.CharField(max_length=500, required=False, default="", allow_blank=True)


class HealingSettingSerializer(StrictSerializer):
    """Says whether a dead agent may be restarted over SSH."""

    restart_when_dead = serializers.BooleanField()


class SshHostKeySerializer(serializers.ModelSerializer[SshHostKey]):
    """A pinned host key."""

    class Meta:
        model = SshHostKey
        fields: ClassVar[list[str]] = [
            "id",
            "host",
            "port",
            "key_type",
            "blob",
            "fingerprint",
            "confirmed_by",
            "confirmed_at",
        ]
