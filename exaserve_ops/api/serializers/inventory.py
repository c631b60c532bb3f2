"""Nodes, accelerators and join tokens."""

from __future__ import annotations

from typing import ClassVar

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from exaserve_ops.api.serializers.strict import StrictSerializer
from exaserve_ops.inventory.models import Accelerator, JoinToken, Node, NodeHardware
from exaserve_ops.inventory.selectors import rack_of
from exaserve_ops.inventory.services.joining import MAX_TOKEN_USES
from exaserve_ops.serving.selectors.rooms import use_of_accelerators

MAX_DRAIN_SECONDS = 7 * 24 * 3600
DRAIN_SECONDS = 900
MAX_TOKEN_SECONDS = 7 * 24 * 3600


class AcceleratorSerializer(serializers.ModelSerializer[Accelerator]):
    """One accelerator."""

    class Meta:
        model = Accelerator
        fields: ClassVar[list[str]] = [
            "uuid",
            "node",
            "kind",
            "name",
            "memory_bytes",
            "ordinal",
            "split",
            "parent_uuid",
            "profile",
            "pci_bus_id",
            "numa_node",
            "pcie_generation_max",
            "pcie_width_max",
            "pcie_generation_now",
            "pcie_width_now",
            "unreadable",
            "shares_memory",
            "quarantined_at",
            "quarantine_reason",
        ]


class NodeSerializer(serializers.ModelSerializer[Node]):
    """One node: what is wanted of it, what was seen of it, and its liveness."""

    rack = serializers.SerializerMethodField()
    failure_domain = serializers.CharField(source="failure_domain.name")
    accelerators = AcceleratorSerializer(many=True)

    class Meta:
        model = Node
        fields: ClassVar[list[str]] = [
            "id",
            "name",
            "failure_domain",
            "rack",
            "cordoned",
            "cordon_reason",
            "drain_status",
            "drain_reason",
            "drain_deadline_at",
            "drain_changed_at",
            "hostname",
            "address",
            "address_problem",
            "agent_version",
            "protocol_minor",
            "boot_id",
            "cpu_count",
            "memory_bytes",
            "engines",
            "engine_versions",
            "labels",
            "simulated",
            "mps_ready",
            "mps_note",
            "last_report_at",
            "clock_skew_seconds",
            "commands_stale_since",
            "reconcile_stale_since",
            "degraded_reason",
            "unknown_processes",
            "liveness",
            "liveness_reason",
            "liveness_changed_at",
            "created_at",
            "accelerators",
        ]

    def get_rack(self, node: Node) -> str:
        """Name of the rack; empty where none is known."""
        return rack_of(node)


class EndpointSerializer(serializers.Serializer[dict[str, object]]):
    """One end of links."""

    name = serializers.CharField(help_text="UUID of an accelerator, or device name of a network adapter.")
    accelerator = serializers.BooleanField()
    numa_node = serializers.IntegerField(allow_null=True)
    cpus = serializers.CharField(allow_blank=True, help_text="Cores next to it, such as 0-31,64-95.")


class LinkSerializer(serializers.Serializer[dict[str, object]]):
    """The way between two endpoints, by their places in the list."""

    a = serializers.IntegerField()
    b = serializers.IntegerField()
    kind = serializers.CharField(help_text="NV# (# bonded NVLinks), PIX, PXB, PHB, NODE or SYS.")
    rank = serializers.IntegerField(help_text="For comparing: a smaller rank is a shorter way.")


class TopologySerializer(serializers.Serializer[dict[str, object]]):
    """How near accelerators and network adapters of one node are to one another."""

    endpoints = EndpointSerializer(many=True)
    links = LinkSerializer(many=True)


class UserSerializer(serializers.Serializer[dict[str, object]]):
    """A replica on an accelerator."""

    id = serializers.UUIDField()
    name = serializers.CharField()


class AcceleratorUseSerializer(serializers.Serializer[dict[str, object]]):
    """Who uses an accelerator or a slice, and what is promised of it."""

    uuid = serializers.CharField()
    reserved_bytes = serializers.IntegerField(help_text="Weights that replicas share count once.")
    margin_bytes = serializers.IntegerField(help_text="Never planned with.")
    mps_percent = serializers.IntegerField(
        help_text="Of its threads, promised to replicas with an MPS share."
    )
    replicas = UserSerializer(many=True)


class NodeDetailSerializer(NodeSerializer):
    """One node, with how its parts are linked and what its probes could not find out."""

    topology = TopologySerializer(
        source="hardware.topology",
        allow_null=True,
        default=None,
        help_text="Null where no vendor's tool told.",
    )
    probe_notes = serializers.SerializerMethodField()
    use = serializers.SerializerMethodField()

    class Meta(NodeSerializer.Meta):
        fields: ClassVar[list[str]] = [*NodeSerializer.Meta.fields, "topology", "probe_notes", "use"]

    @extend_schema_field(AcceleratorUseSerializer(many=True))
    def get_use(self, node: Node) -> list[dict[str, object]]:
        """Who uses its accelerators and slices."""
        return [
            {
                "uuid": uuid,
                "reserved_bytes": use.reserved_bytes,
                "margin_bytes": use.margin_bytes,
                "mps_percent": use.mps_percent,
                "replicas": [{"id": pk, "name": name} for pk, name in use.replicas],
            }
            for uuid, use in use_of_accelerators(node.accelerators.all()).items()
        ]

    def get_probe_notes(self, node: Node) -> list[str]:
        """What the probes could not find out, for people."""
        hardware = NodeHardware.objects.filter(pk=node.pk).first()
        return list(hardware.probe_notes) if hardware is not None else []


class EndProcessRequestSerializer(StrictSerializer):
    """Asks for a left-over process to be ended, as `unknown_processes` names it."""

    pid = serializers.IntegerField(min_value=1)
    start_ticks = serializers.IntegerField(min_value=1, help_text="As reported: a pid alone may be reused.")
    reason = serializers.CharField(max_length=500, help_text="Why; shown in the history.")


class DrainRequestSerializer(StrictSerializer):
    """Asks for a node to be emptied."""

    reason = serializers.CharField(max_length=500, help_text="Why; shown in the history.")
    deadline_seconds = serializers.IntegerField(
        min_value=0,
        max_value=MAX_DRAIN_SECONDS,
        required=False,
        default=DRAIN_SECONDS,
        help_text="What still runs then is stopped, open requests or not.",
    )


class JoinTokenSerializer(serializers.ModelSerializer[JoinToken]):
    """A join token, without its text."""

    class Meta:
        model = JoinToken
        fields: ClassVar[list[str]] = [
            "id",
            "note",
            "created_by",
            "created_at",
            "expires_at",
            "max_uses",
            "uses",
            "used_at",
            "used_by",
        ]


class JoinTokenRequestSerializer(StrictSerializer):
    """Asks for a join token."""

    note = serializers.CharField(max_length=200, required=False, default="", allow_blank=True)
    lifetime_seconds = serializers.IntegerField(
        min_value=60, max_value=MAX_TOKEN_SECONDS, required=False, default=3600
    )
    uses = serializers.IntegerField(
        min_value=1,
        max_value=MAX_TOKEN_USES,
        required=False,
        default=1,
        help_text="So many nodes may join with it: a whole allocation at once.",
    )


class NewJoinTokenSerializer(JoinTokenSerializer):
    """A join token with its text, this once."""

    token = serializers.CharField(read_only=True, help_text="Shown this once.")

    class Meta(JoinTokenSerializer.Meta):
        fields: ClassVar[list[str]] = [*JoinTokenSerializer.Meta.fields, "token"]


class JoinRequestSerializer(StrictSerializer):
    """An agent asks to join."""

    token = serializers.CharField(max_length=200, write_only=True)
    node_id = serializers.UUIDField()
    name = serializers.RegexField(
        r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=120,
        error_messages={"invalid": "Use letters, digits, dots, dashes and underscores."},
    )
    name_suffix = serializers.BooleanField(
        required=False, default=False, help_text="Where the name is taken, add a number instead of refusing."
    )
    hostname = serializers.CharField(max_length=253, required=False, default="", allow_blank=True)
    address = serializers.CharField(max_length=255, required=False, default="", allow_blank=True)
    agent_version = serializers.CharField(max_length=32, required=False, default="", allow_blank=True)
    major = serializers.IntegerField(min_value=0, max_value=1000, help_text="Protocol the agent speaks.")
    minor = serializers.IntegerField(min_value=0, max_value=100_000)

    def to_internal_value(self, data: object) -> object:
        """Drop fields of a newer agent: an older control plane goes on taking it in."""
        known = {k: v for k, v in data.items() if k in self.fields} if isinstance(data, dict) else data
        return super().to_internal_value(known)


class JoinAnswerSerializer(serializers.Serializer[dict[str, object]]):
    """What a node is given once."""

    node_id = serializers.UUIDField()
    name = serializers.CharField()
    node_key = serializers.CharField(help_text="Hexadecimal; the agent keeps it private.")
    key_epoch = serializers.IntegerField()
    redis_url = serializers.CharField()
