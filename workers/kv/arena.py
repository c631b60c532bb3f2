"""The memory of a pool as one process sees it: everything there, nothing open but what is leased."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from workers.kv import libc

ARENA_FILE = "arena"
"""In the folder of a pool that lies in the host's memory."""
_PRIVATE_FILE = 0o600


class SharedArena(Protocol):
    """Memory that all replicas of a pool share, lent extent by extent."""

    extent_bytes: int

    def open_extents(self, extents: Iterable[int]) -> None:
        """Make extents usable. Raises `OSError` where the machine has no memory for them."""
        ...

    def close_extents(self, extents: Iterable[int]) -> None:
        """Wipe extents, give their memory back, and lose access to them."""
        ...

    def scrub(self, extents: Iterable[int]) -> None:
        """Wipe extents of somebody who is dead."""
        ...

    def close(self) -> None:
        """Let go of the memory; whoever still points into it dies at the next touch."""
        ...


class Arenas(Protocol):
    """How the memory of a pool is made and opened; the rest of a pool is the same wherever it lies."""

    def create(self, home: Path, extents: int, extent_bytes: int) -> None:
        """Prepare the memory of a new pool in its folder. Raises `OSError`."""
        ...

    def open(self, home: Path, extents: int, extent_bytes: int) -> SharedArena:
        """Open a pool's memory for this process. Raises `OSError`."""
        ...


class CpuArena:
    """A sparse file in memory, mapped whole and closed; leased extents are opened one by one.

    A touch of anything else ends the process that did it (SIGSEGV) and harms nobody.
    """

    def __init__(self, path: Path, extents: int, extent_bytes: int) -> None:
        """Map an arena. Raises `OSError`."""
        self.extent_bytes = extent_bytes
        self.size_bytes = extents * extent_bytes
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.address = libc.map_closed(self._file, self.size_bytes)
        except OSError:
            os.close(self._file)
            raise

    @staticmethod
    def create(path: Path, extents: int, extent_bytes: int) -> None:
        """Make the file; it takes no memory before extents are opened."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _PRIVATE_FILE)
        try:
            os.ftruncate(descriptor, extents * extent_bytes)
        finally:
            os.close(descriptor)

    def open_extents(self, extents: Iterable[int]) -> None:
        """Make extents usable. Raises `OSError` where the machine has no memory for them."""
        for first, count in runs(extents):
            libc.reserve(self._file, first * self.extent_bytes, count * self.extent_bytes)
            self._protect(first, count, libc.PROT_READ_WRITE)

    def close_extents(self, extents: Iterable[int]) -> None:
        """Lose access first, then wipe: nothing can be written after the wiping."""
        for first, count in runs(extents):
            self._protect(first, count, libc.PROT_NONE)
            libc.punch_hole(self._file, first * self.extent_bytes, count * self.extent_bytes)

    def scrub(self, extents: Iterable[int]) -> None:
        """Wipe extents and give their memory back to the machine."""
        for first, count in runs(extents):
            libc.punch_hole(self._file, first * self.extent_bytes, count * self.extent_bytes)

    def buffer(self) -> ctypes.Array[ctypes.c_char]:
        """All of the arena as one buffer. Valid until `close`; touch leased extents only."""
        return (ctypes.c_char * self.size_bytes).from_address(self.address)

    def close(self) -> None:
        """Unmap."""
        libc.unmap(self.address, self.size_bytes)
        os.close(self._file)

    def _protect(self, first: int, count: int, protection: int) -> None:
        libc.protect(self.address + first * self.extent_bytes, count * self.extent_bytes, protection)


class FileArenas:
    """Pools in the host's memory: one sparse file each. Implements `Arenas`."""

    def create(self, home: Path, extents: int, extent_bytes: int) -> None:
        """Make the file. Raises `OSError`."""
        CpuArena.create(home / ARENA_FILE, extents, extent_bytes)

    def open(self, home: Path, extents: int, extent_bytes: int) -> SharedArena:
        """Map the file. Raises `OSError`."""
        return CpuArena(home / ARENA_FILE, extents, extent_bytes)


class FileScrubber:
    """Wipes extents of an arena without mapping it: what the agent needs."""

    def __init__(self, path: Path, extent_bytes: int) -> None:
        """Open the file. Raises `OSError`."""
        self._extent_bytes = extent_bytes
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def scrub(self, extents: Iterable[int]) -> None:
        """Wipe extents and give their memory back to the machine."""
        for first, count in runs(extents):
            libc.punch_hole(self._file, first * self._extent_bytes, count * self._extent_bytes)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Neighbouring numbers as (first, count)."""
    first, count = 0, 0
    for number in sorted(numbers):
        if count and number == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = number, 1
    if count:
        yield first, count
