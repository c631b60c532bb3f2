"""A simulated node's pool of KV blocks: the engine models' own figures, put the way an agent puts them. Pure.

The models share no memory, so nothing is borrowed, and keep no places, so the map shows each replica's
blocks side by side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

from workers.protocol.digests import KV_BLOCK_TOKENS
from workers.protocol.kv_pools import (
    AGE_STEPS,
    FREE_CELL,
    MAP_CELLS,
    KvPool,
    KvPoolMember,
    MapCell,
    pack_runs,
)
from workers.protocol.v1 import SetKvLimits
from workers.protocol.wish import WantedState
from workers.simulation.engine import KV_EXTENT_BLOCKS, EngineShape
from workers.simulation.replica import SimulatedReplica

_AGES = range(1, AGE_STEPS + 1)
NO_BLOCK_BYTES = 0
"""The model knows no bytes: 0 says that nobody told."""


def describe_pool(
    replicas: Mapping[str, SimulatedReplica], shape: EngineShape, now: float
) -> tuple[KvPool, ...]:
    """The pool of the node's replicas; none where nobody has a place in it."""
    members = tuple(_member(replica, shape, now) for replica in replicas.values() if _has_a_place(replica))
    if not members:
        return ()
    capacity = sum(member.brought_blocks for member in members)
    leased = sum(member.leased_blocks for member in members)
    filled = sum(member.live_blocks + member.cached_blocks for member in members)
    step = max(1, -(-capacity // KV_EXTENT_BLOCKS // MAP_CELLS))
    return (
        KvPool(
            pool_id=hashlib.blake2b(repr(shape).encode(), digest_size=16).hexdigest(),
            block_tokens=KV_BLOCK_TOKENS,
            block_bytes=NO_BLOCK_BYTES,
            extent_blocks=KV_EXTENT_BLOCKS,
            capacity_blocks=capacity,
            free_blocks=max(0, capacity - leased),
            damaged_blocks=0,
            fragmentation_ratio=round(max(0.0, 1 - filled / leased), 4) if leased else 0.0,
            reclaimed_extents=sum(replica.reclaimed_extents for replica in replicas.values()),
            members=members,
            cell_extents=step,
            map=pack_runs(_runs(members, step * KV_EXTENT_BLOCKS)),
        ),
    )


def take_limits(replicas: Mapping[str, SimulatedReplica], shape: EngineShape, command: SetKvLimits) -> str:
    """Change a replica's limits until its engine ends; returns why not, or nothing. The real pool's rules."""
    replica = replicas.get(command.replica_id)
    minimum, ceiling = whole_extents(command.minimum_blocks), whole_extents(command.ceiling_blocks)
    longest = -(-shape.context_tokens // KV_BLOCK_TOKENS)
    if replica is None or replica.engine is None:
        return f"replica {command.replica_id} is in no pool of this node"
    if minimum < longest:
        return f"the longest request takes {longest} blocks, {minimum} would be guaranteed"
    if ceiling < minimum:
        return f"a ceiling of {ceiling} blocks is below the minimum of {minimum} blocks"
    here = [other for other in replicas.values() if _has_a_place(other)]
    promised = sum(minimum if other is replica else other.limits_of(shape)[0] for other in here)
    if promised > (capacity := shape.kv_blocks * len(here)):
        return f"{promised} blocks would be guaranteed in all, and the pool has {capacity}"
    replica.limit(minimum, min(ceiling, shape.kv_blocks))
    return ""


def whole_extents(blocks: int) -> int:
    """Blocks rounded up to whole extents."""
    return -(-blocks // KV_EXTENT_BLOCKS) * KV_EXTENT_BLOCKS


def _has_a_place(replica: SimulatedReplica) -> bool:
    """One that serves, or one that did and is to be here again."""
    wanted = replica.spec is not None and replica.spec.wanted is WantedState.RUN
    return replica.engine is not None or (wanted and replica.has_served)


def _member(replica: SimulatedReplica, shape: EngineShape, now: float) -> KvPoolMember:
    use = replica.engine.kv_use(now) if replica.engine is not None else None
    minimum, ceiling = replica.limits_of(shape)
    live = use.live_blocks if use is not None else 0
    cached = sum(use.cached_by_age_blocks) if use is not None else 0
    return KvPoolMember(
        replica_id=replica.replica_id,
        attempt=replica.attempt,
        alive=replica.engine is not None,
        leased_blocks=whole_extents(live + cached),
        guaranteed_blocks=minimum,
        ceiling_blocks=ceiling,
        brought_blocks=shape.kv_blocks,
        live_blocks=live,
        cached_blocks=cached,
        asked_back_blocks=0,
        waiting_requests=use.waiting_requests if use is not None else 0,
        short_blocks=use.short_blocks if use is not None else 0,
        preempted_requests=0,
        returned_extents=0,
        cached_by_age_blocks=use.cached_by_age_blocks if use is not None else (),
    )


def _runs(members: Sequence[KvPoolMember], cell_blocks: int) -> Iterator[tuple[int, MapCell]]:
    """Each replica's blocks in cells: live ones, cached ones by age, and what it could have besides."""
    for place, member in enumerate(members, 1):
        left = member.brought_blocks // cell_blocks
        for blocks, age in ((member.live_blocks, 0), *zip(member.cached_by_age_blocks, _AGES, strict=False)):
            count = min(left, -(-blocks // cell_blocks))
            if count:  # most are none, and this is done for each node each second
                yield count, MapCell(place, float(not age), float(age > 0), age or 1)
                left -= count
        yield left, MapCell(FREE_CELL)
