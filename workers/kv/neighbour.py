"""Blocks of another replica of this node, copied out of the memory that both draw on.

The pool's file is read, not mapped: a replica's address space has nothing of its neighbours at any moment,
a place that was returned meanwhile reads as zeros, and no touch can end a process. What was read counts
for nothing before its tag fits, which only the block's owner can make.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from workers.kv.transfer import Ticket

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
ARENA_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class LentBlock:
    """Where a block lies in the pool, and the tag that its content had there."""

    place: int
    """Number of the block, from the beginning of the pool's memory."""
    tag: bytes


class PoolReader:
    """Reads blocks of a pool that lies in the host's memory. May be used by any thread."""

    def __init__(self, arena: Path, block_bytes: int) -> None:
        """Open the pool's file. Raises `OSError`."""
        self._file = os.open(arena, os.O_RDONLY | os.O_CLOEXEC)
        self._block_bytes = block_bytes
        told = os.fstat(self._file)
        self._places = told.st_size // block_bytes
        named = (_BOOT_ID.read_text("ascii").strip(), told.st_dev, told.st_ino)
        self.arena_id = hashlib.blake2b(repr(named).encode(), digest_size=ARENA_ID_BYTES).digest()
        """Equal at two replicas only if both draw on one file of one running machine."""

    def copy(self, ticket: Ticket, index: int, digest: bytes, lent: LentBlock, into: memoryview) -> bool:
        """Copy a block, `index` in its transfer, to `into`; whether it is what its owner said of it.

        If not, `into` holds rubbish. Raises `OSError`.
        """
        if not 0 <= lent.place < self._places:
            return False
        count = os.preadv(self._file, [into], lent.place * self._block_bytes)
        return count == self._block_bytes and ticket.tag(index, digest, into) == lent.tag

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
