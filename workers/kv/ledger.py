"""What is done to a pool's table inside one transaction, by whoever has it: replica or agent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from workers.kv import table as tables
from workers.kv.sharing import Member, decide, grant
from workers.kv.table import JOINED, LEFT, MAX_SLOTS, VACANT, Extent, Slot, Table

Scrub = Callable[[Sequence[int]], None]


class PoolJoinError(Exception):
    """A replica cannot join or change its limits; the text says what would be right."""


class Ledger:
    """Reads and changes a table. Every method must be called inside a transaction of the table."""

    def __init__(self, table: Table, scrub: Scrub, *, own_slot: int | None = None) -> None:
        """`own_slot` is the caller's, whose sign of life the kernel does not show to itself."""
        self._table = table
        self._scrub = scrub
        self._own_slot = own_slot

    def capacity(self, slots: Sequence[Slot]) -> int:
        """Extents that may be lent at all."""
        header = self._table.header
        brought = header.fixed_capacity or sum(slot.brought for slot in slots if slot.state != VACANT)
        damaged = self._table.owners().count(tables.DAMAGED)
        return max(0, min(brought, header.extents) - damaged)

    def members(self, slots: Sequence[Slot]) -> list[Member]:
        """The joined replicas as the rules see them."""
        owners = self._table.owners()
        return [
            Member(
                slot=index,
                minimum=slot.minimum,
                ceiling=slot.ceiling,
                leased=owners.count(index + 1),
                live=slot.live,
                needed=slot.needed,
            )
            for index, slot in enumerate(slots)
            if slot.state == JOINED
        ]

    def is_alive(self, index: int) -> bool:
        """Whether the process that joined in this slot still has the pool's memory."""
        return index == self._own_slot or self._table.is_claimed(index)

    def reclaim_dead(self) -> int:
        """Take back what dead replicas held, wiped; returns how many extents that were."""
        taken = 0
        slots = self._table.read_slots()
        for index, slot in enumerate(slots):
            if slot.state == JOINED and not self.is_alive(index):
                taken += self._reclaim(index)
                twice = any(
                    other.replica_id == slot.replica_id and other.state != VACANT
                    for at, other in enumerate(slots)
                    if at != index
                )
                self._table.write_slot(index, _ended(slot, VACANT if twice else LEFT))
        if taken:
            header = self._table.read_header()
            self._table.write_header(replace(header, reclaims=header.reclaims + taken))
        return taken

    def _reclaim(self, index: int) -> int:
        mark = index + 1
        owners = self._table.owners()
        held = [
            n for n, owner in enumerate(owners) if owner == mark and self._table.read_extent(n).owner == mark
        ]
        # Wiped before it is written down as free: a crash in between only repeats the wiping.
        self._scrub(held)
        for number in held:
            self.free_extent(number)
        return len(held)

    def check_records(self) -> int:
        """Mark damaged records, so that they are lent to nobody; returns how many there are.

        Whose they were is not known, so they are free again only when no replica is left at all.
        """
        damaged = [n for n in range(self._table.header.extents) if self._is_damaged(n)]
        nobody = not any(slot.state == JOINED for slot in self._table.read_slots())
        if nobody:
            self._scrub(damaged)
        for number in damaged:
            self._table.write_extent(number, Extent(tables.FREE if nobody else tables.DAMAGED))
        return 0 if nobody else len(damaged)

    def _is_damaged(self, number: int) -> bool:
        return self._table.read_extent(number).owner == tables.DAMAGED

    def free_extent(self, number: int) -> None:
        """Write an extent down as free, under a new generation."""
        before = self._table.read_extent(number)
        self._table.write_extent(number, Extent(tables.FREE, (before.generation + 1) & 0xFFFFFFFF))

    def take(self, index: int, asked: int) -> tuple[list[int], str]:
        """Lend up to `asked` extents to a slot by the rules; returns them and why not more."""
        slots = self._table.read_slots()
        allowed = grant(self.capacity(slots), self.members(slots), index, asked)
        numbers = self._find_free(allowed.extents)
        for number in numbers:
            before = self._table.read_extent(number)
            self._table.write_extent(number, Extent(index + 1, before.generation, slots[index].epoch))
        return numbers, allowed.reason

    def _find_free(self, count: int) -> list[int]:
        owners = self._table.owners()
        found: list[int] = []
        at = owners.find(tables.FREE)
        while at >= 0 and len(found) < count:
            # The stride showed owner bytes only: a damaged record is never lent.
            if self._table.read_extent(at).owner == tables.FREE:
                found.append(at)
            at = owners.find(tables.FREE, at + 1)
        return found

    def publish(self) -> None:
        """Work the rules out and write down who is to give back how much."""
        slots = self._table.read_slots()
        for verdict in decide(self.capacity(slots), self.members(slots)):
            slot = slots[verdict.slot]
            if (slot.give_back, slot.preempt) != (verdict.give_back, verdict.preempt):
                self._table.change_slot(verdict.slot, give_back=verdict.give_back, preempt=verdict.preempt)

    def choose_slot(self, replica_id: str) -> int:
        """Slot to join in: the replica's old one, else a vacant one. Raises `PoolJoinError`."""
        slots = self._table.read_slots()
        for index, slot in enumerate(slots):
            if slot.state == LEFT and slot.replica_id == replica_id:
                return index
        for index, slot in enumerate(slots):
            # A damaged row reads as vacant; a living process behind it still holds its lock.
            if slot.state == VACANT and not self._table.is_claimed(index):
                self._reclaim(index)
                return index
        raise PoolJoinError(f"all {MAX_SLOTS} places of the pool are taken")

    def check_limits(self, index: int, wanted: Slot) -> None:
        """Raise `PoolJoinError` unless a slot may have these limits beside all others."""
        slots = list(self._table.read_slots())
        slots[index] = wanted
        size = self._table.header.extent_blocks
        if wanted.minimum < wanted.longest:
            raise PoolJoinError(
                f"the longest request takes {wanted.longest * size} blocks,"
                f" {wanted.minimum * size} would be guaranteed"
            )
        if wanted.ceiling < wanted.minimum:
            raise PoolJoinError(
                f"a ceiling of {wanted.ceiling * size} blocks is below"
                f" the minimum of {wanted.minimum * size} blocks"
            )
        promised = sum(slot.minimum for slot in slots if slot.state != VACANT)
        capacity = self.capacity(slots)
        if promised > capacity:
            raise PoolJoinError(
                f"{promised * size} blocks would be guaranteed in all, and the pool has {capacity * size}"
            )


def _ended(slot: Slot, state: int) -> Slot:
    return replace(
        slot, state=state, pid=0, live=0, needed=0, give_back=0, preempt=0,
        live_blocks=0, cached_blocks=0, waiting=0,
    )  # fmt: skip
