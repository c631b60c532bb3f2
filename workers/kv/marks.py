"""What each extent of a pool holds and when it was last used, for people who look at the pool.

A file beside the table that no rule depends on. Each replica writes the records of its own extents,
without a lock; whoever reads takes a record for true only if it names the extent's present owner.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workers.kv.table import MAX_SLOTS

_RECORD = struct.Struct("<BxHHxxI")
"""Owner as in the table, live blocks, cached blocks, last use."""
_PRIVATE_FILE = 0o600
_TICKS_PER_SECOND = 10
_MOST_BLOCKS = 0xFFFF


@dataclass(frozen=True, slots=True)
class Mark:
    """One extent, as its owner last said."""

    owner: int
    """The owner's slot counted from 1, as in the table; 0: nobody ever said."""
    live_blocks: int
    cached_blocks: int
    used_at_seconds: float
    """Last use of any of its blocks, on the machine's monotonic clock; to a tenth."""


class Marks:
    """The open file. It is made when it is missing: pools may be older than it."""

    def __init__(self, folder: Path) -> None:
        """Open the marks of a pool. Raises `OSError`."""
        self._file = os.open(folder / "marks", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _PRIVATE_FILE)

    def close(self) -> None:
        """Close."""
        os.close(self._file)

    def write(self, marks: Mapping[int, Mark]) -> None:
        """Replace the records of these extents, neighbours with one call. Raises `OSError`."""
        run: list[bytes] = []
        first = -1
        for number in sorted(marks):
            if number != first + len(run):
                self._write_run(first, run)
                first, run = number, []
            run.append(_pack(marks[number]))
        self._write_run(first, run)

    def _write_run(self, first: int, run: list[bytes]) -> None:
        if run:
            os.pwrite(self._file, b"".join(run), first * _RECORD.size)

    def read(self, extents: int) -> list[Mark]:
        """Read the records of the first extents; those that were never written say nothing."""
        data = os.pread(self._file, extents * _RECORD.size, 0).ljust(extents * _RECORD.size, b"\0")
        return [
            Mark(owner, live, cached, ticks / _TICKS_PER_SECOND)
            for owner, live, cached, ticks in _RECORD.iter_unpack(data)
        ]


def _pack(mark: Mark) -> bytes:
    return _RECORD.pack(
        mark.owner if 0 < mark.owner <= MAX_SLOTS else 0,
        min(mark.live_blocks, _MOST_BLOCKS),
        min(mark.cached_blocks, _MOST_BLOCKS),
        int(mark.used_at_seconds * _TICKS_PER_SECOND) & 0xFFFFFFFF,
    )
