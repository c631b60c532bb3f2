"""A holder's extents of KV blocks: memory for what a pool's table says is lent, wiped before and after."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from workers.kv.memory import Piece, SharedMemory
from workers.kv.table import JOINED, Table, TableError

log = logging.getLogger(__name__)

_NAME_DIGITS = frozenset("0123456789abcdef")


class LendRefusedError(OSError):
    """The table does not lend it to who asks."""

    def __init__(self, reason: str) -> None:
        """Refuse, as the system refuses what is not permitted."""
        super().__init__(errno.EACCES, reason)


@dataclass(slots=True)
class _Lent:
    """Memory that was handed over, and the extent's record as it was then."""

    piece: Piece
    record: bytes


@dataclass(slots=True)
class _Pool:
    home: Path
    table: Table
    inode: int
    held: dict[int, _Lent] = field(default_factory=dict)

    @property
    def extent_bytes(self) -> int:
        header = self.table.header
        return header.block_bytes * header.extent_blocks


class ExtentShelf:
    """Extents by pool. The tables say what is whose; nothing else is believed.

    Each lending takes new memory, so who was fenced and still maps what it had sees nothing of the next
    owner, and harms nobody by writing into it.
    """

    def __init__(
        self,
        memory: SharedMemory,
        new_piece: Callable[[int], Piece],
        wipe: Callable[[Piece], None],
        folder: Path,
    ) -> None:
        """Lend for the pools below `folder`; `new_piece` returns wiped memory."""
        self._memory = memory
        self._new_piece = new_piece
        self._wipe = wipe
        self._folder = folder
        self._pools: dict[str, _Pool] = {}

    @property
    def lent_extents(self) -> int:
        """Extents that are handed over."""
        return sum(len(pool.held) for pool in self._pools.values())

    @property
    def lent_bytes(self) -> int:
        """Their memory."""
        return sum(lent.piece.size_bytes for pool in self._pools.values() for lent in pool.held.values())

    def lend(self, pool_id: str, extents: Iterable[int], pid: int) -> list[Piece]:
        """Return memory for extents of process `pid`. Raises `LendRefusedError`, `OSError`."""
        pool = self._pool(pool_id)
        numbers = list(extents)
        _check_owner(pool.table, numbers, pid)
        pieces: list[Piece] = []
        try:
            for number in numbers:
                self._drop(pool, number)
                record = pool.table.extent_record(number)
                pieces.append(self._new_piece(pool.extent_bytes))
                pool.held[number] = _Lent(pieces[-1], record)
        except OSError:
            for number in numbers[: len(pieces)]:
                self._drop(pool, number)
            raise
        return pieces

    def give_back(self, pool_id: str, extents: Iterable[int], pid: int) -> None:
        """Wipe and free extents of process `pid`. Raises `LendRefusedError`, `OSError`."""
        pool = self._pool(pool_id)
        numbers = list(extents)
        _check_owner(pool.table, numbers, pid)
        for number in numbers:
            self._drop(pool, number)

    def tend(self) -> bool:
        """Wipe and free what the tables lend to others by now, or to nobody; true if that was anything."""
        before = self.lent_extents
        for pool_id, pool in tuple(self._pools.items()):
            if _inode(pool.home) != pool.inode:
                self._forget(pool_id)
                continue
            for number in [n for n, lent in pool.held.items() if pool.table.extent_record(n) != lent.record]:
                self._drop(pool, number)
        return self.lent_extents < before

    def _pool(self, pool_id: str) -> _Pool:
        if not pool_id or not _NAME_DIGITS.issuperset(pool_id):
            raise LendRefusedError("a pool is named by hexadecimal digits")
        home = self._folder / pool_id
        known = self._pools.get(pool_id)
        if known is not None and _inode(home) == known.inode:
            return known
        self._forget(pool_id)
        try:
            pool = _Pool(home, Table(home), _inode(home))
        except TableError as error:
            raise LendRefusedError(f"pool {pool_id}: {error}") from error
        if pool.extent_bytes % self._memory.page_bytes:
            pool.table.close()
            raise LendRefusedError(
                f"extents of {pool.extent_bytes} bytes are not whole pages of {self._memory.page_bytes}"
            )
        self._pools[pool_id] = pool
        return pool

    def _forget(self, pool_id: str) -> None:
        """Let go of a pool that was removed, or made anew."""
        pool = self._pools.pop(pool_id, None)
        if pool is not None:
            for number in tuple(pool.held):
                self._drop(pool, number)
            pool.table.close()

    def _drop(self, pool: _Pool, number: int) -> None:
        lent = pool.held.pop(number, None)
        if lent is None:
            return
        try:
            self._wipe(lent.piece)
        except OSError:
            # It is wiped before it is lent again in any case; this only does it sooner.
            log.exception("extent %d was not wiped as it was freed", number)
        self._memory.release(lent.piece)


def _check_owner(table: Table, numbers: list[int], pid: int) -> None:
    slots = table.read_slots()
    own = {
        (index + 1, slot.epoch)
        for index, slot in enumerate(slots)
        if slot.state == JOINED and slot.pid == pid
    }
    for number in numbers:
        if not 0 <= number < table.header.extents:
            raise LendRefusedError(f"the pool has no extent {number}")
        extent = table.read_extent(number)
        if (extent.owner, extent.epoch) not in own:
            raise LendRefusedError(f"extent {number} is not lent to process {pid}")


def _inode(home: Path) -> int:
    try:
        return (home / "table").stat().st_ino
    except FileNotFoundError:
        return -1
