"""KV memory of a node: pools, what engines say of it, and other limits for a replica."""

from __future__ import annotations

from rest_framework import serializers

from exaserve_ops.api.serializers.strict import StrictSerializer

_MOST_BLOCKS = 10**9
_AGES = "under 10 s, 1 min, 10 min, 1 h, and longer ago"


class KvPoolMemberSerializer(serializers.Serializer[dict[str, object]]):
    """One replica in a pool. Blocks unless a name says otherwise."""

    replica_id = serializers.CharField()
    attempt = serializers.IntegerField()
    alive = serializers.BooleanField(help_text="False: its process is gone, its place is kept.")
    leased_blocks = serializers.IntegerField()
    guaranteed_blocks = serializers.IntegerField()
    ceiling_blocks = serializers.IntegerField()
    brought_blocks = serializers.IntegerField(help_text="The pool grew by that when it joined.")
    borrowed_blocks = serializers.IntegerField(help_text="Leased beyond what it brought.")
    lent_blocks = serializers.IntegerField(help_text="Brought and not leased: others may use it.")
    live_blocks = serializers.IntegerField(help_text="Held by running requests.")
    cached_blocks = serializers.IntegerField(help_text="Kept for prefixes that may come again.")
    cached_by_age_blocks = serializers.ListField(
        child=serializers.IntegerField(), help_text=f"Cached blocks by last use of their extent: {_AGES}."
    )
    asked_back_blocks = serializers.IntegerField()
    waiting_requests = serializers.IntegerField()
    short_blocks = serializers.IntegerField(help_text="What its requests need beyond what it has leased.")
    preempted_requests = serializers.IntegerField()
    returned_extents = serializers.IntegerField()


class KvCellSerializer(serializers.Serializer[dict[str, object]]):
    """One cell of a pool's map: neighbouring extents, by what most of them are."""

    owner = serializers.IntegerField(help_text="0: free; 255: damaged; else a member's place, from 1.")
    live_ratio = serializers.FloatField()
    cached_ratio = serializers.FloatField()
    age = serializers.IntegerField(help_text=f"Step of the last use, from 1: {_AGES}; 0: not known.")


class KvPoolSerializer(serializers.Serializer[dict[str, object]]):
    """One pool: all replicas of the node whose blocks have one shape."""

    pool_id = serializers.CharField(help_text="Names the layout: 32 hex digits.")
    block_tokens = serializers.IntegerField(help_text="Only whole blocks are found again in cache.")
    block_bytes = serializers.IntegerField(help_text="0 where nobody told, as in a simulation.")
    extent_blocks = serializers.IntegerField(help_text="Blocks that are lent together.")
    capacity_blocks = serializers.IntegerField()
    free_blocks = serializers.IntegerField()
    damaged_blocks = serializers.IntegerField(help_text="Lent to nobody until the pool stands empty.")
    fragmentation_ratio = serializers.FloatField(help_text="Of the leased blocks, those that hold nothing.")
    reclaimed_extents = serializers.IntegerField(
        help_text="Of replicas whose process ended, in order or not."
    )
    members = KvPoolMemberSerializer(many=True)
    cell_extents = serializers.IntegerField(help_text="Extents in each cell of the map.")
    cells = KvCellSerializer(many=True, help_text="The map, in the order of memory.")


class KvTierSerializer(serializers.Serializer[dict[str, object]]):
    """One tier of a replica's blocks."""

    name = serializers.CharField(help_text="accelerator (where it computes), host or disk.")
    used_blocks = serializers.IntegerField()
    capacity_blocks = serializers.IntegerField()
    off_reason = serializers.CharField(allow_blank=True)


class KvReplicaSerializer(serializers.Serializer[dict[str, object]]):
    """What a replica's engine says of its KV memory, in a pool or of its own."""

    replica_id = serializers.CharField()
    total_blocks = serializers.IntegerField(allow_null=True)
    used_ratio = serializers.FloatField(allow_null=True)
    block_tokens = serializers.IntegerField(allow_null=True)
    hit_ratio = serializers.FloatField(allow_null=True, help_text="Of the last seconds.")
    query_tokens_total = serializers.FloatField(allow_null=True, help_text="Since the engine started.")
    hit_tokens_total = serializers.FloatField(allow_null=True)
    miss_tokens_total = serializers.DictField(
        child=serializers.FloatField(),
        help_text="By reason: no_shared_prefix, shorter_than_a_block, evicted.",
    )
    tiers = KvTierSerializer(many=True)
    swaps = serializers.DictField(
        child=serializers.IntegerField(), allow_null=True, help_text="Null where the engine has no tiers."
    )
    thrash_reason = serializers.CharField(allow_blank=True, help_text="Why nothing is swapped now.")
    capacity_tokens = serializers.IntegerField(allow_null=True, help_text="As the engine says itself.")
    connector_totals = serializers.DictField(
        child=serializers.FloatField(), help_text="What went through a KV connector since the start."
    )
    external_hit_tokens_total = serializers.FloatField(
        allow_null=True, help_text="Prompt tokens found in a cache beyond the engine's own."
    )


class NodeKvSerializer(serializers.Serializer[dict[str, object]]):
    """KV memory of a node as it was last reported."""

    received_at = serializers.FloatField(allow_null=True, help_text="Unix seconds; null: never reported.")
    simulated = serializers.BooleanField()
    pools = KvPoolSerializer(many=True)
    replicas = KvReplicaSerializer(many=True)


class KvLimitsRequestSerializer(StrictSerializer):
    """Asks for other limits of a replica in its node's pool; rounded up to whole extents."""

    replica = serializers.UUIDField()
    minimum_blocks = serializers.IntegerField(min_value=1, max_value=_MOST_BLOCKS, help_text="Guaranteed.")
    ceiling_blocks = serializers.IntegerField(min_value=1, max_value=_MOST_BLOCKS)
    reason = serializers.CharField(max_length=500, help_text="Why; shown in the history.")
