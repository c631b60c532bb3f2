"""What a swarm needs of the rest of the node: a place for pieces, and the origin."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from workers.weights.swarm.pieces import Piece


class PieceSink(Protocol):
    """Where verified pieces go."""

    def write(self, piece: Piece, data: memoryview, /) -> None:
        """Keep a piece that was verified. Raises `OSError`, such as for a full disk."""
        ...

    def open_file(self, path: str, /) -> int:
        """Descriptor of one of the revision's files, for reading. Raises `OSError`."""
        ...


class RangeReader(Protocol):
    """Bytes of one file, from an offset on."""

    def read_into(self, memory: memoryview, /) -> None:
        """Fill this memory with the next bytes. Raises `OSError` if the origin fails or ends before."""
        ...


class Origin(Protocol):
    """Where the weights come from in the first place."""

    def open_range(self, path: str, offset: int, length: int, /) -> AbstractContextManager[RangeReader]:
        """Begin to read so many bytes of a file. Raises `OSError` if the origin does not give them."""
        ...
