"""How a model's weights go from node to node."""

from __future__ import annotations

from rest_framework import serializers


class StripeSerializer(serializers.Serializer[dict[str, object]]):
    """One stripe on its way to a node."""

    stripe = serializers.IntegerField()
    parent_node = serializers.CharField(
        source="parent", help_text="Id of the node that gives it, `origin`, or empty."
    )
    stage = serializers.CharField(help_text="waiting, connecting, starved, flowing, done or failed")
    bytes_per_second = serializers.FloatField()
    starved_ratio = serializers.FloatField(
        help_text="Share of the last seconds without news from the parent."
    )
    bottleneck = serializers.CharField(help_text="parent, network, check, disk or cap; empty: not known yet")
    why = serializers.CharField(help_text="What last went wrong.")


class SwarmMemberSerializer(serializers.Serializer[dict[str, object]]):
    """One node of a swarm."""

    node_id = serializers.CharField()
    state = serializers.CharField(help_text="waiting, fetching, paused, ready or failed")
    have_ratio = serializers.FloatField()
    bytes_per_second = serializers.FloatField()
    gives_bytes_per_second = serializers.FloatField()
    peer_bytes = serializers.IntegerField(help_text="Verified bytes that came from other nodes.")
    origin_bytes = serializers.IntegerField()
    damaged_pieces = serializers.IntegerField()
    stripes = StripeSerializer(many=True)
    reason = serializers.CharField()


class SwarmSerializer(serializers.Serializer[dict[str, object]]):
    """All nodes that want a model's weights."""

    nodes = serializers.IntegerField()
    whole_nodes = serializers.IntegerField()
    bytes_per_second = serializers.FloatField(help_text="That nodes take in, all together.")
    origin_bytes = serializers.IntegerField()
    origin_copies = serializers.FloatField(help_text="Of all weights, that left the origin so far.")
    peer_bytes = serializers.IntegerField()
    members = SwarmMemberSerializer(many=True)
