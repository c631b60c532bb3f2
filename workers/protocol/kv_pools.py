"""What a heartbeat says of a node's pools of KV blocks. Since 1.4.

Each second of each node has all of it, so structs travel as tuples without field names, and the map
is packed: a fifth of what the replicas' own telemetry takes. Fields are only ever added at the end.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

AGE_BOUNDS_SECONDS = (10, 60, 600, 3600)
"""Ages of what lies in cache are told in these steps; the last step has no end."""
AGE_STEPS = len(AGE_BOUNDS_SECONDS) + 1
MAP_CELLS = 384
"""Most cells of one map: a larger pool has several extents in a cell."""
FREE_CELL = 0
DAMAGED_CELL = 255
NO_AGE = 0
_FULL = 15
_MAP_BYTES = 3 * MAP_CELLS


class KvPoolMember(msgspec.Struct, frozen=True, array_like=True):
    """One replica in a pool. Blocks unless a name says otherwise."""

    replica_id: str
    attempt: int
    alive: bool
    """Whether its process still holds its place."""
    leased_blocks: int
    guaranteed_blocks: int
    ceiling_blocks: int
    brought_blocks: int
    live_blocks: int
    """Held by running requests."""
    cached_blocks: int
    """Kept for prefixes that may come again."""
    asked_back_blocks: int
    waiting_requests: int
    short_blocks: int
    """What its requests need beyond what it has leased."""
    preempted_requests: int
    """Set back for others since it joined, as is `returned_extents`."""
    returned_extents: int
    cached_by_age_blocks: tuple[int, ...] = ()
    """Cached blocks by when their extent was last used, in steps of `AGE_BOUNDS_SECONDS`."""

    @property
    def borrowed_blocks(self) -> int:
        """Leased beyond what it brought."""
        return max(0, self.leased_blocks - self.brought_blocks)

    @property
    def lent_blocks(self) -> int:
        """Brought and not leased: others may use it."""
        return max(0, self.brought_blocks - self.leased_blocks)


class KvPool(msgspec.Struct, frozen=True, array_like=True):
    """One pool of a node: all replicas whose blocks have one shape."""

    pool_id: str
    """Names the layout: 32 hex digits."""
    block_tokens: int
    block_bytes: int
    extent_blocks: int
    """Blocks that are lent together."""
    capacity_blocks: int
    free_blocks: int
    damaged_blocks: int
    fragmentation_ratio: float
    """Part of the leased blocks that hold nothing, neither live nor cached."""
    reclaimed_extents: int
    """Taken from replicas whose process ended, since the pool was made."""
    members: tuple[KvPoolMember, ...] = ()
    cell_extents: int = 1
    """Extents in each cell of the map."""
    map: bytes = b""
    """As `pack_map` makes it; empty where it was left out."""


class MapCell(NamedTuple):
    """Neighbouring extents, by what most of them are."""

    owner: int
    """`FREE_CELL`, `DAMAGED_CELL`, or a member's place in the list, counted from 1."""
    live_ratio: float = 0.0
    """Of the cell's blocks, as is `cached_ratio`."""
    cached_ratio: float = 0.0
    age: int = NO_AGE
    """Step of age of the newest use, counted from 1; `NO_AGE` where nothing is known."""


def age_step(seconds: float) -> int:
    """Step of an age, counted from 1."""
    return 1 + bisect_right(AGE_BOUNDS_SECONDS, seconds)


def pack_map(cells: Sequence[MapCell]) -> bytes:
    """Pack up to `MAP_CELLS` cells: owners, fillings and ages, each together, and then compressed."""
    owners = bytes(cell.owner for cell in cells)
    fills = bytes(_sixteenth(cell.live_ratio) << 4 | _sixteenth(cell.cached_ratio) for cell in cells)
    return zlib.compress(owners + fills + bytes(cell.age for cell in cells), 1)


def pack_runs(runs: Iterable[tuple[int, MapCell]]) -> bytes:
    """Pack as many cells of a kind as each run says, without making them one by one."""
    owners, fills, ages = bytearray(), bytearray(), bytearray()
    for count, cell in runs:
        owners += bytes([cell.owner]) * count
        fills += bytes([_sixteenth(cell.live_ratio) << 4 | _sixteenth(cell.cached_ratio)]) * count
        ages += bytes([cell.age]) * count
    return zlib.compress(owners + fills + ages, 1)


def unpack_map(data: bytes) -> list[MapCell]:
    """Read a map. Raises `ValueError` for other bytes: they come from another machine."""
    if not data:
        return []
    reader = zlib.decompressobj()
    try:
        raw = reader.decompress(data, _MAP_BYTES + 1)
    except zlib.error as error:
        raise ValueError(f"no map of a pool: {error}") from error
    if not reader.eof or len(raw) % 3 or len(raw) > _MAP_BYTES:
        raise ValueError(f"no map of a pool: {len(raw)} bytes")
    count = len(raw) // 3
    return [
        MapCell(
            raw[at], (raw[count + at] >> 4) / _FULL, (raw[count + at] & _FULL) / _FULL, raw[2 * count + at]
        )
        for at in range(count)
    ]


def _sixteenth(ratio: float) -> int:
    """A ratio in four bits: only nothing is 0, only all is 15."""
    if ratio <= 0:
        return 0
    return _FULL if ratio >= 1 else max(1, min(_FULL - 1, round(ratio * _FULL)))
