"""The memory of a pool that a holder lends: each leased extent is mapped at its place, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from workers.kv.arena import SharedArena
from workers.kv.holder_link import HolderLink
from workers.kv.holder_wire import MOST_DESCRIPTORS, Done, GiveBack, Lend, Lent, close_all
from workers.kv.memory import Piece, SharedMemory

_MARK = "held"
"""File in the folder of a pool whose memory lies with a holder."""


class HeldArena:
    """Addresses for a whole pool, of which leased extents are mapped. Implements `SharedArena`.

    On a CPU a touch of anything else ends the process (SIGSEGV). On an accelerator a kernel that does so
    fails with an illegal address, which ends the use of the device by that process and by no other.
    """

    def __init__(
        self, memory: SharedMemory, link: HolderLink, pool_id: str, extents: int, extent_bytes: int
    ) -> None:
        """Reserve addresses. Raises `OSError`."""
        self.extent_bytes = extent_bytes
        self.size_bytes = extents * extent_bytes
        self._memory = memory
        self._link = link
        self._pool_id = pool_id
        self._pieces: dict[int, Piece] = {}
        self.address = memory.reserve(self.size_bytes)

    def open_extents(self, extents: Iterable[int]) -> None:
        """Have the holder lend wiped memory and map it. Raises `OSError`: none of them is open then."""
        opened: list[int] = []
        try:
            for batch in _batches(sorted(extents)):
                _, descriptors = self._link.ask(Lend(self._pool_id, batch), Lent)
                self._map(batch, descriptors)
                opened += batch
        except OSError:
            self.close_extents(opened)
            raise

    def close_extents(self, extents: Iterable[int]) -> None:
        """Lose access first, then have the holder wipe: nothing can be written after the wiping."""
        numbers = sorted(set(extents) & self._pieces.keys())
        if not numbers:
            return
        self._memory.settle()
        for number in numbers:
            self._unmap(number)
        for batch in _batches(numbers):
            try:
                self._link.ask(GiveBack(self._pool_id, batch), Done)
            except OSError:
                # The holder reads in the table that they were returned, now or when it is back; and it
                # lends no memory that it has not wiped.
                return

    def scrub(self, extents: Iterable[int]) -> None:
        """Do nothing: what a dead replica had is gone with it, and each lending is new, wiped memory."""

    def close(self) -> None:
        """Unmap and let go of the addresses."""
        self._memory.settle()
        for number in tuple(self._pieces):
            self._unmap(number)
        self._memory.unreserve(self.address, self.size_bytes)
        self._link.close()

    def _map(self, batch: tuple[int, ...], descriptors: list[int]) -> None:
        waiting = list(descriptors)
        try:
            if len(descriptors) != len(batch):
                raise ConnectionError(f"{len(descriptors)} extents came and {len(batch)} were asked for")
            for number in batch:
                piece = self._memory.adopt(waiting.pop(0), self.extent_bytes)
                try:
                    self._memory.map(self.address + number * self.extent_bytes, piece, writable=True)
                except OSError:
                    self._memory.release(piece)
                    raise
                self._pieces[number] = piece
        except OSError:
            close_all(waiting)
            for number in batch:
                if number in self._pieces:
                    self._unmap(number)
            raise

    def _unmap(self, number: int) -> None:
        piece = self._pieces.pop(number)
        self._memory.unmap(self.address + number * self.extent_bytes, piece.size_bytes)
        self._memory.release(piece)


class HeldArenas:
    """How pools whose memory lies with a holder are made and opened. Implements `Arenas`."""

    def __init__(self, memory: SharedMemory, link: HolderLink) -> None:
        """Open arenas over one connection."""
        self._memory = memory
        self._link = link

    def create(self, home: Path, extents: int, extent_bytes: int) -> None:  # noqa: ARG002 - a port
        """Mark the pool: its memory is made when it is lent."""
        (home / _MARK).touch()

    def open(self, home: Path, extents: int, extent_bytes: int) -> SharedArena:
        """Open a pool's memory. Raises `OSError`."""
        if not (home / _MARK).exists():
            raise FileNotFoundError(f"the memory of pool {home.name} does not lie with a holder")
        return HeldArena(self._memory, self._link, home.name, extents, extent_bytes)


def _batches(numbers: list[int]) -> Iterator[tuple[int, ...]]:
    for at in range(0, len(numbers), MOST_DESCRIPTORS):
        yield tuple(numbers[at : at + MOST_DESCRIPTORS])
