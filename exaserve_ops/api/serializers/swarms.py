"""How a model's weights go from node to node."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from exaserve_ops.weights.domain.swarms import LIVE, NO_SWARM, OVER


class StripeSerializer(serializers.Serializer[Any]):
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
    bottleneck = serializers.CharField(
        help_text="parent, network, parent_cap, check, disk or cap; empty: not known yet"
    )
    why = serializers.CharField(help_text="What last went wrong.")


class SwarmMemberSerializer(serializers.Serializer[Any]):
    """One node of a swarm."""

    node_id = serializers.CharField()
    name = serializers.CharField()
    rack = serializers.CharField(allow_blank=True)
    state = serializers.CharField(help_text="waiting, fetching, paused, ready or failed")
    have_ratio = serializers.FloatField()
    bytes_per_second = serializers.FloatField()
    eta_seconds = serializers.FloatField(
        allow_null=True, help_text="By what is measured; null while nothing comes."
    )
    gives_bytes_per_second = serializers.FloatField()
    gives_to = serializers.IntegerField(help_text="Streams that it gives.")
    peer_bytes = serializers.IntegerField(help_text="Verified bytes that came from other nodes.")
    origin_bytes = serializers.IntegerField()
    damaged_pieces = serializers.IntegerField()
    stripes = StripeSerializer(many=True)
    reason = serializers.CharField()


class SwarmFeedSerializer(serializers.Serializer[Any]):
    """Where one node gets one stripe."""

    node_id = serializers.CharField(source="child")
    stripe = serializers.IntegerField()
    parent_node = serializers.CharField(source="parent", help_text="Id of a node, or `origin`.")
    why = serializers.CharField(help_text="Why the plan has it so; empty where the node chose by itself.")


class SwarmTroubleSerializer(serializers.Serializer[Any]):
    """One node that is not as it should be."""

    node_id = serializers.CharField()
    name = serializers.CharField()
    kind = serializers.CharField(help_text="barred, slow, unreachable, failed or waiting")
    why = serializers.CharField()


class SwarmPointSerializer(serializers.Serializer[Any]):
    """One moment of a swarm."""

    at_seconds = serializers.FloatField(help_text="Since 1970.")
    origin_bytes = serializers.IntegerField(help_text="That left the origin since the swarm began.")
    peer_bytes = serializers.IntegerField()
    whole_nodes = serializers.IntegerField()
    bytes_per_second = serializers.FloatField()


class SwarmSerializer(serializers.Serializer[Any]):
    """All nodes that want a model's weights, and how they come to them."""

    state = serializers.ChoiceField(choices=(NO_SWARM, LIVE, OVER))
    nodes = serializers.IntegerField()
    whole_nodes = serializers.IntegerField()
    total_bytes = serializers.IntegerField(help_text="Of one copy.")
    stripes = serializers.IntegerField(help_text="That the pieces are cut into; 0: not known.")
    pieces = serializers.IntegerField(help_text="That all nodes need together; 0: not known.")
    whole_pieces = serializers.IntegerField()
    coming_pieces = serializers.IntegerField(help_text="On their way now.")
    bytes_per_second = serializers.FloatField(help_text="That nodes take in, all together.")
    eta_seconds = serializers.FloatField(
        allow_null=True, help_text="Until the last node is whole; null while one of them gets nothing."
    )
    origin_bytes = serializers.IntegerField()
    origin_copies = serializers.FloatField(help_text="Of all weights, that left the origin so far.")
    peer_bytes = serializers.IntegerField()
    began_at_seconds = serializers.FloatField(allow_null=True, help_text="Since 1970, as the next.")
    ended_at_seconds = serializers.FloatField(allow_null=True)
    members = SwarmMemberSerializer(many=True)
    feeds = SwarmFeedSerializer(many=True)
    troubles = SwarmTroubleSerializer(many=True)
    points = SwarmPointSerializer(many=True, help_text="What the origin gave over time.")
