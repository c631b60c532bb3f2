"""What agents say of pools of KV blocks, made up."""

from __future__ import annotations

from typing import Any

from workers.protocol.kv_pools import KvPool, KvPoolMember, MapCell, pack_map

_POOL_FIELDS = ("damaged_blocks", "reclaimed_extents", "free_blocks", "fragmentation_ratio", "map")


def pool_of(replica_id: str, **facts: Any) -> KvPool:
    """A pool of four extents with one replica, which has borrowed one; `facts` of pool or replica."""
    pool = {name: facts.pop(name) for name in _POOL_FIELDS if name in facts}
    fields: dict[str, Any] = {
        "pool_id": "ab" * 16,
        "block_tokens": 16,
        "block_bytes": 4096,
        "extent_blocks": 16,
        "capacity_blocks": 64,
        "free_blocks": 32,
        "damaged_blocks": 0,
        "fragmentation_ratio": 0.25,
        "reclaimed_extents": 0,
        "members": (member_of(replica_id, **facts),),
        "map": pack_map([MapCell(1, 1.0, 0.0, 1), MapCell(1, 0.25, 0.25, 2), MapCell(0), MapCell(0)]),
    }
    return KvPool(**(fields | pool))


def member_of(replica_id: str, **facts: Any) -> KvPoolMember:
    """A replica that holds 32 blocks, 16 of them borrowed."""
    fields: dict[str, Any] = {
        "replica_id": replica_id,
        "attempt": 1,
        "alive": True,
        "leased_blocks": 32,
        "guaranteed_blocks": 16,
        "ceiling_blocks": 64,
        "brought_blocks": 16,
        "live_blocks": 20,
        "cached_blocks": 4,
        "asked_back_blocks": 0,
        "waiting_requests": 0,
        "short_blocks": 0,
        "preempted_requests": 0,
        "returned_extents": 0,
        "cached_by_age_blocks": (0, 4, 0, 0, 0),
    }
    return KvPoolMember(**(fields | facts))
