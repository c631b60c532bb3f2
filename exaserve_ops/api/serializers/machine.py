"""What a node says of its machine, now and over time."""

from __future__ import annotations

from rest_framework import serializers

_EACH_WAY = "Each way; null: not told."


def _ratio(text: str = "") -> serializers.FloatField:
    return serializers.FloatField(allow_null=True, help_text=text)


def _bytes(text: str = "") -> serializers.IntegerField:
    return serializers.IntegerField(allow_null=True, help_text=text)


def _number(text: str = "") -> serializers.FloatField:
    return serializers.FloatField(allow_null=True, help_text=text)


class LinkRateSerializer(serializers.Serializer[dict[str, object]]):
    """What goes through one interface or port."""

    receive_bytes_per_second = serializers.FloatField()
    send_bytes_per_second = serializers.FloatField()
    link_bytes_per_second = _number(_EACH_WAY)


class HostLoadSerializer(serializers.Serializer[dict[str, object]]):
    """The machine itself, since the heartbeat before; null: not told."""

    cpu_used_ratio = _ratio("Of all cores.")
    cpu_busiest_ratio = _ratio("Of the one core that was busiest.")
    cpu_stalled_ratio = _ratio("Share of ten seconds in which some task waited for one; so the others.")
    memory_used_bytes = _bytes()
    memory_total_bytes = _bytes()
    memory_stalled_ratio = _ratio()
    disk_free_bytes = _bytes("Of the agent's home.")
    disk_read_bytes_per_second = _number()
    disk_write_bytes_per_second = _number()
    io_stalled_ratio = _ratio()
    load1 = _number()
    network_receive_bytes_per_second = _number()
    network_send_bytes_per_second = _number()
    interfaces = serializers.DictField(child=LinkRateSerializer(), help_text="By name, the sixteen busiest.")
    rdma = serializers.DictField(
        child=LinkRateSerializer(), help_text="By adapter and port; these bytes pass the host's network by."
    )


class AcceleratorLoadSerializer(serializers.Serializer[dict[str, object]]):
    """One card; null: nobody told."""

    uuid = serializers.CharField()
    ordinal = serializers.IntegerField()
    sources = serializers.ListField(child=serializers.CharField(), help_text="Who told, by precedence.")
    age_seconds = serializers.FloatField(help_text="Of the oldest of it when it was reported.")
    used_ratio = _ratio("Share of the time in which anything ran on it.")
    memory_used_bytes = _bytes()
    memory_total_bytes = _bytes()
    pcie_receive_bytes_per_second = _number("Into the card.")
    pcie_send_bytes_per_second = _number()
    pcie_link_bytes_per_second = _number(_EACH_WAY)
    pcie_replays = _bytes("Packets sent anew since the driver was loaded.")
    nvlinks = _bytes("0: the card has none.")
    nvlinks_up = _bytes()
    nvlink_receive_bytes_per_second = _number("Over all links.")
    nvlink_send_bytes_per_second = _number()
    nvlink_both_bytes_per_second = _number("Where directions are not told apart.")
    nvlink_link_bytes_per_second = _number("What all links that are up carry each way.")
    nvlink_errors = _bytes("Since the driver was loaded.")
    power_watts = _number()
    power_limit_watts = _number()
    temperature_celsius = _number()
    held_back_by = serializers.ListField(
        child=serializers.CharField(), allow_null=True, help_text="Why its clocks are low under load."
    )
    ecc_uncorrected = _bytes("Since the driver was loaded.")
    last_xid = _bytes("Number of the driver's last error on the card; 0: none was seen.")
    notes = serializers.ListField(child=serializers.CharField(), help_text="What could not be read, and why.")


class NodeMachineSerializer(serializers.Serializer[dict[str, object]]):
    """A node's machine as last reported."""

    received_at = serializers.FloatField(allow_null=True, help_text="Unix seconds; null: never reported.")
    simulated = serializers.BooleanField()
    host = HostLoadSerializer(allow_null=True)
    accelerators = AcceleratorLoadSerializer(many=True, help_text="Whole cards, not slices of them.")


class NodeLineSerializer(serializers.Serializer[dict[str, object]]):
    """One measure over time."""

    name = serializers.CharField(help_text="Such as card_pcie_ratio.")
    unit = serializers.ChoiceField(
        ["ratio", "bytes_per_second", "seconds", "requests", "watts", "celsius"], help_text="Of its values."
    )
    kind = serializers.ChoiceField(["mean", "most"], help_text="What a value is of the samples of its step.")
    accelerator = serializers.IntegerField(allow_null=True, help_text="Ordinal of the card; null: no card's.")
    values = serializers.ListField(
        child=serializers.FloatField(allow_null=True), help_text="One for each of `at`; null: not told."
    )


class NodeHistorySerializer(serializers.Serializer[dict[str, object]]):
    """A node's machine, and what its replicas did meanwhile, by the minute or longer steps."""

    step_minutes = serializers.IntegerField()
    at = serializers.ListField(child=serializers.DateTimeField(), help_text="Where each step begins.")
    lines = NodeLineSerializer(many=True, help_text="Without what nobody told in this time.")


class NodeHistoryQuerySerializer(serializers.Serializer[dict[str, object]]):
    """Which history is asked for."""

    since = serializers.DateTimeField(required=False, help_text="An hour ago unless given.")
    until = serializers.DateTimeField(required=False, help_text="Now unless given.")
    step_minutes = serializers.IntegerField(
        required=False, default=1, min_value=1, max_value=1440, help_text="Minutes in each point."
    )
