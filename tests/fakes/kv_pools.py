"""What agents say of pools of KV blocks, made up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from exaserve_ops.adapters.reports import describe_kv
from workers.protocol import v1
from workers.protocol.kv_pools import KvPool, KvPoolMember, MapCell, pack_map
from workers.protocol.observed import (
    AgentLiveness,
    KvSwaps,
    KvTier,
    ObservedState,
    ReplicaObserved,
    ReplicaTelemetry,
)

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


Loads = Mapping[str, ReplicaTelemetry]


def beat_with(*pools: KvPool, loads: Loads | None = None, sequence: int = 1) -> bytes:
    """A heartbeat as its agent encoded it; `loads` by replica id."""
    beat = v1.Heartbeat(
        node_id="n", boot_id="b", lease_epoch=1, sequence=sequence, sent_at_seconds=0.0, applied_revision=1,
        liveness=AgentLiveness(),
        replicas=tuple(
            ReplicaObserved(
                replica_id=name, generation=1, state=ObservedState.READY, telemetry=load
            )
            for name, load in (loads or {}).items()
        ),
        kv_pools=pools,
    )  # fmt: skip
    return msgspec.msgpack.encode(beat)


def told_by(*pools: KvPool, loads: Loads | None = None) -> dict[str, Any]:
    """The same as pages and REST read it."""
    return {"received_at": 9.0, "sequence": 1, **describe_kv(beat_with(*pools, loads=loads))}


def load_of(**facts: Any) -> ReplicaTelemetry:
    """What an engine with tiers says."""
    fields: dict[str, Any] = {
        "window_seconds": 10.0,
        "kv_total_blocks": 64,
        "kv_used_ratio": 0.5,
        "kv_block_tokens": 16,
        "prefix_hit_ratio": 0.75,
        "prefix_query_tokens_total": 1000.0,
        "prefix_hit_tokens_total": 600.0,
        "prefix_miss_tokens_total": {
            "no_shared_prefix": 250.0, "shorter_than_a_block": 50.0, "evicted": 100.0
        },
        "kv_tiers": (
            KvTier(name="accelerator", used_blocks=24, capacity_blocks=64),
            KvTier(name="host", used_blocks=96, capacity_blocks=128),
            KvTier(name="disk", used_blocks=0, capacity_blocks=0, off_reason="the disk is full"),
        ),
        "kv_swaps": KvSwaps(blocks_in=12, blocks_out=34, fetch_waits=5, checksum_failures=1),
    }  # fmt: skip
    return ReplicaTelemetry(**(fields | facts))


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
