"""The table beside a pool's memory: which extent is lent to whom, and what each replica needs.

One file of fixed records, each with a checksum, each written whole by one `pwrite`: whoever is
killed at any moment leaves every record as it was before or as it is after. Nobody maps the file
for writing, so no stray pointer reaches it; replicas map it for reading. Transactions hold a kernel
lock that dies with its holder. That a replica lives is another kernel lock, on a byte of its own:
the kernel drops it only after the last thread of the process has left its memory, so a free lock
is proof that nobody writes into the replica's extents any more.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

MAX_SLOTS = 64
FREE = 0
"""Owner byte of a free extent; the owner in slot n has n + 1."""
DAMAGED = 255
"""Owner byte as shown for a record whose checksum does not fit: lent to nobody until a fresh start."""

_MAGIC = b"EXAKV001"
_HEADER = struct.Struct("<8s16sQIIIIQ")
_SLOT = struct.Struct("<B64s14IQQ")
_EXTENT = struct.Struct("<BxxxII")
_CHECK = struct.Struct("<I")
_SLOT_BYTES = 256
_EXTENT_BYTES = 16
_SLOTS_AT = 4096
_EXTENTS_AT = _SLOTS_AT + MAX_SLOTS * _SLOT_BYTES
_BLANK_SLOT = bytes(_SLOT_BYTES)
_BLANK_EXTENT = bytes(_EXTENT_BYTES)
_FLOCK = struct.Struct("hhqqi")
_PRIVATE_FILE = 0o600
_RETRY_SECONDS = 0.0005
LOCK_SECONDS = 2.0


class TableError(Exception):
    """The table cannot be used; the text says why."""


class PoolBusyError(TableError):
    """Another process has held the table for too long."""


@dataclass(frozen=True, slots=True)
class Header:
    """What never changes but for the two counters."""

    layout: bytes
    block_bytes: int
    extent_blocks: int
    extents: int
    """Records of the table: the most that the pool can ever hold."""
    fixed_capacity: int = 0
    """Extents that may be lent; 0: as many as the replicas bring."""
    reclaims: int = 0
    """Extents taken from dead replicas since the pool was made."""


VACANT, JOINED, LEFT = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Slot:
    """One replica's row. Extents unless a name says otherwise."""

    state: int = VACANT
    """`VACANT`, `JOINED`, or `LEFT`: the replica ended or died and may come back."""
    replica_id: str = ""
    attempt: int = 0
    epoch: int = 0
    """Raised with each joining, so that a record of an earlier owner is never taken for a new one's."""
    pid: int = 0
    minimum: int = 0
    ceiling: int = 0
    brought: int = 0
    longest: int = 0
    """What its longest request takes: it could never end in a smaller minimum."""
    live: int = 0
    needed: int = 0
    give_back: int = 0
    preempt: int = 0
    live_blocks: int = 0
    cached_blocks: int = 0
    waiting: int = 0
    returned_total: int = 0
    preempted_total: int = 0

    def pack(self) -> bytes:
        """Record of the slot, checksum first."""
        body = _SLOT.pack(
            self.state,
            self.replica_id.encode(),
            self.attempt,
            self.epoch,
            self.pid,
            self.minimum,
            self.ceiling,
            self.brought,
            self.longest,
            self.live,
            self.needed,
            self.give_back,
            self.preempt,
            self.live_blocks,
            self.cached_blocks,
            self.waiting,
            self.returned_total,
            self.preempted_total,
        )
        return _CHECK.pack(zlib.crc32(body)) + body

    @staticmethod
    def unpack(record: bytes) -> Slot:
        """Read a record. Raises `TableError` if it is damaged."""
        if record == _BLANK_SLOT:
            return Slot()
        (check,) = _CHECK.unpack_from(record)
        body = record[_CHECK.size : _CHECK.size + _SLOT.size]
        if zlib.crc32(body) != check:
            raise TableError("a replica's row is damaged")
        state, name, *rest = _SLOT.unpack(body)
        return Slot(state, name.rstrip(b"\0").decode(), *rest)


@dataclass(frozen=True, slots=True)
class Extent:
    """One extent's record."""

    owner: int = FREE
    generation: int = 0
    """Raised each time the extent is returned or reclaimed."""
    epoch: int = 0
    """The owner's epoch."""

    def pack(self) -> bytes:
        """Record: owner byte first, so that all owners can be read in one stride."""
        body = _EXTENT.pack(self.owner, self.generation, self.epoch)
        return body + _CHECK.pack(zlib.crc32(body))

    @staticmethod
    def unpack(record: bytes) -> Extent:
        """Read a record; a damaged one has the owner `DAMAGED`."""
        if record == _BLANK_EXTENT:
            return Extent()
        body = record[: _EXTENT.size]
        if zlib.crc32(body) != _CHECK.unpack_from(record, _EXTENT.size)[0]:
            return Extent(owner=DAMAGED)
        return Extent(*_EXTENT.unpack(body))


class Table:
    """An open table. Reading needs no lock; `write_*` only inside a `transaction`."""

    def __init__(self, folder: Path) -> None:
        """Open an existing table. Raises `TableError` or `OSError`."""
        self._file = os.open(folder / "table", os.O_RDWR | os.O_CLOEXEC)
        self._locks = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _PRIVATE_FILE)
        self._owners = os.open(folder / "owners", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _PRIVATE_FILE)
        self._thread_lock = threading.Lock()
        self.header = self.read_header()
        size = _EXTENTS_AT + self.header.extents * _EXTENT_BYTES
        if os.fstat(self._file).st_size < size:
            raise TableError("the table is shorter than its header says")
        self._map = mmap.mmap(self._file, size, prot=mmap.PROT_READ)
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Close; the locks that this object holds are dropped."""
        self.view.release()
        self._map.close()
        for descriptor in (self._file, self._locks, self._owners):
            os.close(descriptor)

    @staticmethod
    def create(folder: Path, header: Header) -> None:
        """Write a new table; it appears whole."""
        draft = folder / "table.new"
        with draft.open("wb") as file:
            os.fchmod(file.fileno(), _PRIVATE_FILE)
            file.truncate(_EXTENTS_AT + header.extents * _EXTENT_BYTES)
            file.write(_pack_header(header))
        draft.replace(folder / "table")

    @contextmanager
    def transaction(self, *, seconds: float = LOCK_SECONDS) -> Iterator[None]:
        """Hold the table alone. Raises `PoolBusyError` if it cannot be had in time."""
        with self._thread_lock:
            lock_within(self._locks, seconds)
            try:
                yield
            finally:
                fcntl.flock(self._locks, fcntl.LOCK_UN)

    # -- header ----------------------------------------------------------------------------------
    def read_header(self) -> Header:
        """Read the header. Raises `TableError` if this is no table of ours."""
        record = os.pread(self._file, _HEADER.size + _CHECK.size, 0)
        if len(record) < _HEADER.size + _CHECK.size or not record.startswith(_MAGIC):
            raise TableError("this is no table of KV extents")
        if zlib.crc32(record[: _HEADER.size]) != _CHECK.unpack_from(record, _HEADER.size)[0]:
            raise TableError("the table's header is damaged")
        _, layout, block_bytes, extent_blocks, extents, fixed, _spare, reclaims = _HEADER.unpack(
            record[: _HEADER.size]
        )
        return Header(layout, block_bytes, extent_blocks, extents, fixed, reclaims)

    def write_header(self, header: Header) -> None:
        """Replace the header."""
        os.pwrite(self._file, _pack_header(header), 0)
        self.header = header

    # -- slots -----------------------------------------------------------------------------------
    def read_slot(self, index: int) -> Slot:
        """Read one replica's row. Raises `TableError` if it is damaged."""
        return Slot.unpack(os.pread(self._file, _SLOT_BYTES, _SLOTS_AT + index * _SLOT_BYTES))

    def read_slots(self) -> tuple[Slot, ...]:
        """Read all rows; a damaged one counts as vacant, and its extents as nobody's."""
        data = os.pread(self._file, MAX_SLOTS * _SLOT_BYTES, _SLOTS_AT)
        return tuple(_lenient(data[at : at + _SLOT_BYTES]) for at in range(0, len(data), _SLOT_BYTES))

    def write_slot(self, index: int, slot: Slot) -> None:
        """Replace one row."""
        os.pwrite(self._file, slot.pack(), _SLOTS_AT + index * _SLOT_BYTES)

    def change_slot(self, index: int, **changes: object) -> Slot:
        """Replace fields of a row."""
        slot = replace(self.read_slot(index), **changes)  # type: ignore[arg-type]  # fields by name
        self.write_slot(index, slot)
        return slot

    # -- extents ---------------------------------------------------------------------------------
    def owners(self) -> bytes:
        """Owner byte of every extent, in one stride and without checking each record."""
        return bytes(self.view[_EXTENTS_AT::_EXTENT_BYTES])

    def read_extent(self, number: int) -> Extent:
        """Read one record."""
        return Extent.unpack(self.extent_record(number))

    def extent_record(self, number: int) -> bytes:
        """One record as it lies in the file."""
        at = _EXTENTS_AT + number * _EXTENT_BYTES
        return bytes(self.view[at : at + _EXTENT_BYTES])

    def extent_range(self, first: int, count: int) -> memoryview:
        """Records of neighbouring extents, live."""
        at = _EXTENTS_AT + first * _EXTENT_BYTES
        return self.view[at : at + count * _EXTENT_BYTES]

    def write_extent(self, number: int, extent: Extent) -> None:
        """Replace one record."""
        os.pwrite(self._file, extent.pack(), _EXTENTS_AT + number * _EXTENT_BYTES)

    # -- signs of life ---------------------------------------------------------------------------
    def claim(self, index: int) -> None:
        """Hold a slot for as long as this table object is open. Raises `TableError` if it is held."""
        try:
            fcntl.fcntl(self._owners, fcntl.F_OFD_SETLK, _byte_lock(fcntl.F_WRLCK, index))
        except BlockingIOError:
            raise TableError(f"slot {index} is held by a living process") from None

    def abandon(self, index: int) -> None:
        """Let go of a slot."""
        fcntl.fcntl(self._owners, fcntl.F_OFD_SETLK, _byte_lock(fcntl.F_UNLCK, index))

    def is_claimed(self, index: int) -> bool:
        """Whether another table object, in whatever process, holds the slot.

        Asked of a slot of one's own, the answer is no: the kernel names only conflicts.
        """
        answer = fcntl.fcntl(self._owners, fcntl.F_OFD_GETLK, _byte_lock(fcntl.F_WRLCK, index))
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def lock_within(descriptor: int, seconds: float) -> None:
    """Lock a file against all others. Raises `PoolBusyError`: a holder may be stopped for good."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise PoolBusyError(f"locked by another process for {seconds:g} s") from None
            time.sleep(_RETRY_SECONDS)
        else:
            return


def _byte_lock(kind: int, index: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, index, 1, 0)


def _pack_header(header: Header) -> bytes:
    body = _HEADER.pack(
        _MAGIC,
        header.layout,
        header.block_bytes,
        header.extent_blocks,
        header.extents,
        header.fixed_capacity,
        0,
        header.reclaims,
    )
    return body + _CHECK.pack(zlib.crc32(body))


def _lenient(record: bytes) -> Slot:
    try:
        return Slot.unpack(record)
    except TableError:
        return Slot()
