"""A replica's side of the pool: joining, taking, giving back, and knowing when it has been fenced."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from workers.kv.arena import Arenas, FileArenas, SharedArena, runs
from workers.kv.layout import KvLayout
from workers.kv.ledger import Ledger, PoolJoinError
from workers.kv.marks import Mark, Marks
from workers.kv.pool import ensure_pool, folder_lock
from workers.kv.table import JOINED, LEFT, PoolBusyError, Slot, Table

_FILE_ARENAS = FileArenas()
_STEP_LOCK_SECONDS = 0.05
"""A step waits no longer for the table: a holder that is stopped must not stop the others."""


class LeaseLostError(RuntimeError):
    """Extents of this replica have another owner or generation: nothing in them may be used."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a replica brings and wants, in blocks. They are rounded to whole extents."""

    brought_blocks: int
    """Memory that was set aside for it: the pool grows by that."""
    minimum_blocks: int | None = None
    """Guaranteed; `None`: all that it brings."""
    ceiling_blocks: int | None = None
    """`None`: as much as the pool can lend."""
    longest_blocks: int = 0
    """What one request of the longest kind takes."""

    def minimum_extents(self, layout: KvLayout) -> int:
        """Guaranteed extents."""
        size = layout.extent_blocks
        if self.minimum_blocks is None:
            minimum = self.brought_extents(layout)
        else:
            minimum = -(-self.minimum_blocks // size)
        ceiling = self.ceiling_extents(layout)
        return minimum if ceiling is None else min(minimum, ceiling)

    def ceiling_extents(self, layout: KvLayout) -> int | None:
        """Most extents; `None`: no bound."""
        return None if self.ceiling_blocks is None else max(1, self.ceiling_blocks // layout.extent_blocks)

    def brought_extents(self, layout: KvLayout) -> int:
        """Extents that the pool grows by."""
        return max(1, self.brought_blocks // layout.extent_blocks)

    def guaranteed_blocks(self, layout: KvLayout) -> int:
        """Blocks that the replica can always have."""
        return self.minimum_extents(layout) * layout.extent_blocks


@dataclass(frozen=True, slots=True)
class Use:
    """What a replica tells of itself, in blocks."""

    live: int = 0
    cached: int = 0
    needed: int = 0
    """Live ones and those that its waiting requests would fill."""
    waiting: int = 0
    """Requests."""
    preempted: int = 0
    """Requests set back for others since the last telling."""


@dataclass(frozen=True, slots=True)
class Recall:
    """What a replica is asked to give back, in extents."""

    give_back: int = 0
    preempt: int = 0


class PoolMember:
    """One replica in a pool. For one thread; its end, however it comes, is seen by all others."""

    def __init__(self, table: Table, arena: SharedArena, slot: int, marks: Marks) -> None:
        """Use `join` instead."""
        self._table = table
        self._marks = marks
        self._marked: dict[int, Mark] = {}
        self.arena = arena
        self.slot = slot
        self._ledger = Ledger(table, arena.scrub, own_slot=slot)
        self._held: set[int] = set()
        self._expected: list[tuple[int, int, bytes]] = []
        """(first, count, records) of neighbouring extents as they were lent."""
        self.refusal = ""
        """Why the last asking brought less than was asked for."""

    @property
    def extent_blocks(self) -> int:
        """Blocks of an extent."""
        return self._table.header.extent_blocks

    @property
    def extents(self) -> frozenset[int]:
        """Extents held now."""
        return frozenset(self._held)

    @property
    def guaranteed_blocks(self) -> int:
        """What this replica can always have, whatever the others do."""
        return self._table.read_slot(self.slot).minimum * self.extent_blocks

    def check(self) -> None:
        """Raise `LeaseLostError` unless every extent is still lent to this replica.

        Cheap: one comparison of memory for each run of neighbouring extents.
        """
        for first, count, records in self._expected:
            if self._table.extent_range(first, count) != records:
                raise LeaseLostError(f"extents {first} to {first + count - 1} were given to somebody else")

    def recall(self) -> Recall:
        """Read what is asked back, without a lock."""
        slot = self._table.read_slot(self.slot)
        return Recall(slot.give_back, slot.preempt)

    def take(self, asked: int, use: Use) -> list[int]:
        """Ask for extents; returns what was lent, wiped and open for use, perhaps none.

        The dead are reclaimed first if what is free does not do.
        """
        if asked < 1:
            return []
        try:
            with self._table.transaction(seconds=_STEP_LOCK_SECONDS):
                self._write_use(use)
                numbers, self.refusal = self._ledger.take(self.slot, asked)
                if len(numbers) < asked and self._ledger.reclaim_dead():
                    more, self.refusal = self._ledger.take(self.slot, asked - len(numbers))
                    numbers += more
                numbers = self._open(numbers)
                self._ledger.publish()
        except PoolBusyError as error:
            self.refusal = str(error)
            return []
        self._held.update(numbers)
        self._remember()
        return numbers

    def give(self, extents: Iterable[int], use: Use) -> None:
        """Return extents, wiped. Raises `PoolBusyError`: then they are still this replica's, but empty."""
        numbers = sorted(extents)
        if not self._held.issuperset(numbers):
            raise ValueError("only extents that are held can be given back")
        with self._table.transaction():
            self.arena.close_extents(numbers)
            for number in numbers:
                self._ledger.free_extent(number)
            slot = self._table.read_slot(self.slot)
            self._table.change_slot(self.slot, returned_total=slot.returned_total + len(numbers))
            self._held.difference_update(numbers)
            self._write_use(use)
            self._ledger.publish()
        self._remember()

    def tell(self, use: Use) -> None:
        """Say what is used and needed; a table that is busy is told the next time."""
        try:
            with self._table.transaction(seconds=_STEP_LOCK_SECONDS):
                self._write_use(use)
                self._ledger.publish()
        except PoolBusyError as error:
            self.refusal = str(error)

    def mark(self, extents: Mapping[int, tuple[int, int, float]]) -> None:
        """Say what each extent holds: (live blocks, cached blocks, last use on the monotonic clock).

        For people alone: no lock is taken, and nothing is decided by it.
        """
        marks = {n: Mark(self.slot + 1, *facts) for n, facts in extents.items() if n in self._held}
        try:
            self._marks.write({n: mark for n, mark in marks.items() if self._marked.get(n) != mark})
        except OSError as error:  # no room for a few bytes is no reason to stop serving
            self.refusal = f"the map of the pool was not brought up to date: {error}"
        else:
            self._marked = marks

    def reach_blocks(self) -> int:
        """Blocks that could be had beside those that are held, as far as an unlocked look can say."""
        slots = self._table.read_slots()
        members = self._ledger.members(slots)
        free = self._ledger.capacity(slots) - sum(member.leased for member in members)
        own = slots[self.slot]
        guaranteed = own.minimum - len(self._held)  # a right, even while others have it
        return max(0, min(max(free, guaranteed), own.ceiling - len(self._held))) * self.extent_blocks

    def leave(self) -> None:
        """Give everything back and go; the arena must not be touched any more."""
        self.give(self._held, Use())
        with self._table.transaction():
            self._table.change_slot(self.slot, state=LEFT, pid=0)
            self._ledger.publish()
        self.close()

    def close(self) -> None:
        """Drop the sign of life as a death would: what is held is reclaimed by whoever needs it."""
        self.arena.close()
        self._marks.close()
        self._table.close()

    def _open(self, numbers: list[int]) -> list[int]:
        """Open what was lent; where the machine has no memory for it, it is returned."""
        try:
            self.arena.open_extents(numbers)
        except OSError as error:
            self.refusal = f"the machine has no memory for {len(numbers)} extents: {error}"
            self.arena.close_extents(numbers)
            for number in numbers:
                self._ledger.free_extent(number)
            return []
        return numbers

    def _write_use(self, use: Use) -> None:
        size = self.extent_blocks
        slot = self._table.read_slot(self.slot)
        self._table.change_slot(
            self.slot,
            live=-(-use.live // size),
            needed=-(-use.needed // size),
            live_blocks=use.live,
            cached_blocks=use.cached,
            waiting=use.waiting,
            preempted_total=slot.preempted_total + use.preempted,
        )

    def _remember(self) -> None:
        self._expected = [
            (first, count, bytes(self._table.extent_range(first, count))) for first, count in runs(self._held)
        ]
        owners = {self._table.read_extent(number).owner for number in self._held}
        if owners - {self.slot + 1}:
            raise LeaseLostError("extents were given to somebody else as they were taken")


def join(
    folder: Path,
    layout: KvLayout,
    replica_id: str,
    attempt: int,
    terms: Terms,
    *,
    fixed_bytes: int = 0,
    arenas: Arenas = _FILE_ARENAS,
) -> PoolMember:
    """Join the node's pool of a layout, which is made if need be. Raises `PoolJoinError`, `OSError`.

    `arenas` is where the memory of pools of this layout's kind lies. The replica holds no extent yet;
    what an earlier attempt of it held is reclaimed.
    """
    row = Slot(state=JOINED, replica_id=replica_id, attempt=attempt, pid=os.getpid())
    with ExitStack() as undo, folder_lock(folder):
        home = ensure_pool(
            folder, layout, arenas, brought=terms.brought_extents(layout), fixed_bytes=fixed_bytes
        )
        table = Table(home)
        undo.callback(table.close)
        if table.header.layout != layout.digest:
            raise PoolJoinError("the pool is of another layout")
        arena = arenas.open(home, table.header.extents, layout.extent_bytes)
        undo.callback(arena.close)
        marks = Marks(home)
        undo.callback(marks.close)
        with table.transaction():
            ledger = Ledger(table, arena.scrub)
            ledger.reclaim_dead()
            index = ledger.choose_slot(replica_id)
            row = _with_terms(row, table.read_slots()[index], terms, layout, table.header.extents)
            ledger.check_limits(index, row)
            table.claim(index)  # before the row: a row without a living owner would be reclaimed
            table.write_slot(index, row)
        undo.pop_all()
    return PoolMember(table, arena, index, marks)


def _with_terms(row: Slot, before: Slot, terms: Terms, layout: KvLayout, most: int) -> Slot:
    return replace(
        row,
        epoch=(before.epoch + 1) & 0xFFFFFFFF,
        minimum=terms.minimum_extents(layout),
        ceiling=terms.ceiling_extents(layout) or most,
        brought=terms.brought_extents(layout),
        longest=-(-terms.longest_blocks // layout.extent_blocks),
        returned_total=before.returned_total,
        preempted_total=before.preempted_total,
    )
