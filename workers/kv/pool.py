"""A node's pools on disk: made when first joined, looked after by the agent, removed when unused.

One folder for each layout below the node's pool folder, which lies in memory (`/dev/shm`): `table`,
`owners`, `lock`, and `arena` unless the memory lies with an accelerator's holder. The folder's own `lock`
orders making, joining and removing.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from workers.kv.arena import ARENA_FILE, Arenas, FileScrubber
from workers.kv.hoards import AttemptKey, Debt
from workers.kv.layout import KvLayout
from workers.kv.ledger import Ledger
from workers.kv.marks import Marks
from workers.kv.picture import Picture, draw
from workers.kv.table import (
    DAMAGED,
    JOINED,
    LEFT,
    LOCK_SECONDS,
    VACANT,
    Header,
    Slot,
    Table,
    TableError,
    lock_within,
)
from workers.protocol.kv_pools import MapCell

_PRIVATE_FILE = 0o600
_PRIVATE_FOLDER = 0o700
_MOST_EXTENTS = 1 << 16
_SWEEP_LOCK_SECONDS = 0.25
"""The agent looks again soon, and has other things to do meanwhile."""
_ROOM_FACTOR = 256
"""How much more than its first replica brings a pool can come to hold; costs a few bytes for each extent."""


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One replica of a pool, for people. Blocks, not extents."""

    replica_id: str
    attempt: int
    alive: bool
    leased_blocks: int
    guaranteed_blocks: int
    ceiling_blocks: int
    brought_blocks: int
    borrowed_blocks: int
    """Leased beyond what it brought."""
    lent_blocks: int
    """Brought and not leased: others may use it."""
    live_blocks: int
    cached_blocks: int
    waiting_requests: int
    asked_back_blocks: int
    returned_extents: int
    preempted_requests: int
    short_blocks: int = 0
    """What its requests need beyond what it has leased."""
    cached_by_age_blocks: tuple[int, ...] = ()
    """As far as its extents are marked; in steps of `AGE_BOUNDS_SECONDS`."""


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """One pool, for people and for heartbeats."""

    pool_id: str
    block_bytes: int
    extent_blocks: int
    capacity_blocks: int
    free_blocks: int
    damaged_extents: int
    fragmentation_ratio: float
    """Part of the leased blocks that hold nothing, neither live nor cached."""
    reclaimed_extents: int
    members: tuple[MemberStatus, ...]
    cell_extents: int = 1
    cells: tuple[MapCell, ...] = ()
    """The extents in the order of memory, as far as they can be lent or are in use."""


def pools_folder(node_id: str, fallback: Path) -> Path:
    """Where a node's pools lie: in shared memory, or below the agent's home where there is none."""
    shared = Path("/dev/shm")  # noqa: S108 - a folder of our own below it, closed to others
    if shared.is_dir() and os.access(shared, os.W_OK | os.X_OK):
        return shared / f"exaserve-kv-{node_id}"
    return fallback / "kv"


@contextmanager
def folder_lock(folder: Path, *, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Keep others from making, joining or removing pools meanwhile. Raises `PoolBusyError`."""
    folder.mkdir(mode=_PRIVATE_FOLDER, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise TableError(f"{folder} belongs to another user")
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _PRIVATE_FILE)
    try:
        lock_within(descriptor, seconds)
        yield
    finally:
        os.close(descriptor)


def ensure_pool(
    folder: Path, layout: KvLayout, arenas: Arenas, *, brought: int, fixed_bytes: int = 0
) -> Path:
    """Make the pool of a layout unless it is there; returns its folder. Inside `folder_lock` only.

    `brought` is what the first replica brings, in extents; `fixed_bytes` makes the pool that large
    whatever its replicas bring.
    """
    home = folder / layout.pool_id
    if (home / "table").exists():
        return home
    fixed = fixed_bytes // layout.extent_bytes
    fits = max(brought, _machine_bytes() // layout.extent_bytes)
    most = max(fixed, min(_MOST_EXTENTS, _ROOM_FACTOR * brought, fits))
    header = Header(layout.digest, layout.block_bytes, layout.extent_blocks, most, fixed)
    home.mkdir(mode=_PRIVATE_FOLDER, exist_ok=True)
    arenas.create(home, header.extents, layout.extent_bytes)
    Table.create(home, header)  # last: a pool is there when its table is
    return home


class NodePools:
    """The agent's side: reclaims, removes, changes limits and tells how the pools are used."""

    def __init__(self, folder: Path) -> None:
        """Look after the pools below `folder`, if there are any."""
        self.folder = folder

    def sweep(self, wanted: Set[str], *, check_records: bool = False) -> int:
        """Reclaim what the dead held, forget replicas that are not wanted here, remove unused pools.

        `check_records` looks at every extent's checksum as well, which takes a while. Returns how many
        extents were reclaimed. Raises `OSError` or `TableError`.
        """
        if not self.folder.exists():
            return 0
        reclaimed = 0
        with folder_lock(self.folder, seconds=_SWEEP_LOCK_SECONDS):
            for home in self._homes():
                taken, in_use = self._sweep_one(home, wanted, check_records=check_records)
                reclaimed += taken
                if not in_use:
                    shutil.rmtree(home)
        return reclaimed

    def _sweep_one(self, home: Path, wanted: Set[str], *, check_records: bool) -> tuple[int, bool]:
        with _opened(home) as (table, ledger), table.transaction(seconds=_SWEEP_LOCK_SECONDS):
            taken = ledger.reclaim_dead()
            for index, slot in enumerate(table.read_slots()):
                if slot.state == LEFT and slot.replica_id not in wanted:
                    table.write_slot(index, Slot(epoch=slot.epoch))
            if check_records:
                ledger.check_records()
            ledger.publish()
            slots = table.read_slots()
            return taken, any(slot.state != VACANT for slot in slots)

    def remove_all(self) -> None:
        """Remove every pool, and the folder: for a node that is taken down for good."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def set_limits(self, replica_id: str, minimum_blocks: int, ceiling_blocks: int) -> None:
        """Change what a replica is guaranteed and may have at most, from now on, while it runs.

        Rounded up to whole extents. Raises `PoolJoinError` if that cannot be promised, `LookupError`
        if the replica is in no pool.
        """
        for home in self._homes():
            with _opened(home) as (table, ledger), table.transaction():
                for index, slot in enumerate(table.read_slots()):
                    if slot.replica_id == replica_id and slot.state != VACANT:
                        size = table.header.extent_blocks
                        changed = replace(
                            slot, minimum=-(-minimum_blocks // size), ceiling=-(-ceiling_blocks // size)
                        )
                        ledger.check_limits(index, changed)
                        table.write_slot(index, changed)
                        ledger.publish()
                        return
        raise LookupError(f"replica {replica_id} is in no pool of this node")

    def status(self) -> tuple[PoolStatus, ...]:
        """Return how every pool is used now."""
        return tuple(pool_status(home) for home in self._homes())

    def debts(self) -> dict[AttemptKey, Debt]:
        """Return what each replica holds, and what of it others are guaranteed and wait for."""
        found: dict[AttemptKey, Debt] = {}
        for home in self._homes():
            with _opened(home) as (table, ledger):
                slots = table.read_slots()
                members = ledger.members(slots)
                waits = any(member.leased < member.floor for member in members)
                for member in members:
                    slot = slots[member.slot]
                    overdue = slot.give_back if waits else 0
                    found[slot.replica_id, slot.attempt] = Debt(member.leased, overdue)
        return found

    def _homes(self) -> list[Path]:
        if not self.folder.exists():
            return []
        return sorted(table.parent for table in self.folder.glob("*/table"))


def pool_status(home: Path) -> PoolStatus:
    """Read how one pool is used. No lock is taken: a figure may be a moment older than its neighbour."""
    with _opened(home) as (table, ledger):
        header, slots, owners = table.read_header(), table.read_slots(), table.owners()
        size = header.extent_blocks
        capacity = ledger.capacity(slots) * size
        shown = [(index, slot) for index, slot in enumerate(slots) if slot.state != VACANT]
        picture = _picture(home, owners, [index + 1 for index, _ in shown], capacity // size, size)
        rows = tuple(
            replace(
                _member_status(
                    slot, owners.count(index + 1) * size, size, capacity, alive=ledger.is_alive(index)
                ),
                cached_by_age_blocks=picture.cached_by_age.get(index + 1, ()),
            )
            for index, slot in shown
        )
        leased = sum(row.leased_blocks for row in rows)
        filled = sum(row.live_blocks + row.cached_blocks for row in rows)
        return PoolStatus(
            pool_id=home.name,
            block_bytes=header.block_bytes,
            extent_blocks=size,
            capacity_blocks=capacity,
            free_blocks=max(0, capacity - leased),
            damaged_extents=owners.count(DAMAGED),
            fragmentation_ratio=max(0.0, 1 - filled / leased) if leased else 0.0,
            reclaimed_extents=header.reclaims,
            members=rows,
            cell_extents=picture.cell_extents,
            cells=picture.cells,
        )


def _picture(home: Path, owners: bytes, shown: Sequence[int], capacity: int, size: int) -> Picture:
    """Draw what can be lent, and beyond it what is in use although the pool has become smaller."""
    used = len(owners.rstrip(b"\0"))
    owners = owners[: max(capacity, used)]
    places = {owner: place for place, owner in enumerate(shown, 1)}
    marks = Marks(home)
    try:
        return draw(owners, marks.read(len(owners)), places, extent_blocks=size, now=time.monotonic())
    finally:
        marks.close()


def _member_status(slot: Slot, leased: int, size: int, capacity: int, *, alive: bool) -> MemberStatus:
    brought = slot.brought * size
    return MemberStatus(
        replica_id=slot.replica_id,
        attempt=slot.attempt,
        alive=alive and slot.state == JOINED,
        leased_blocks=leased,
        guaranteed_blocks=slot.minimum * size,
        ceiling_blocks=min(slot.ceiling * size, capacity),
        brought_blocks=brought,
        borrowed_blocks=max(0, leased - brought),
        lent_blocks=max(0, brought - leased),
        live_blocks=slot.live_blocks,
        cached_blocks=slot.cached_blocks,
        waiting_requests=slot.waiting,
        asked_back_blocks=slot.give_back * size,
        returned_extents=slot.returned_total,
        preempted_requests=slot.preempted_total,
        short_blocks=max(0, slot.needed * size - leased) if slot.state == JOINED else 0,
    )


@contextmanager
def _opened(home: Path) -> Iterator[tuple[Table, Ledger]]:
    table = Table(home)
    try:
        if (home / ARENA_FILE).exists():
            scrubber = FileScrubber(home / ARENA_FILE, table.header.block_bytes * table.header.extent_blocks)
            try:
                yield table, Ledger(table, scrubber.scrub)
            finally:
                scrubber.close()
        else:
            # A holder has the memory: it reads in the table what is nobody's, and wipes that itself.
            yield table, Ledger(table, lambda _extents: None)
    finally:
        table.close()


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
