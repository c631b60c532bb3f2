"""All pieces of a manifest in one row: their places in files, their digests, and the stripes they form."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from workers.protocol.manifest import Manifest, piece_span


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece, and where its bytes belong."""

    index: int
    """In the row of all pieces."""
    path: str
    """Of its file, relative to the model's folder."""
    offset: int
    length: int
    digest: bytes


class PieceRow:
    """Pieces by their number, files in the manifest's order."""

    def __init__(self, manifest: Manifest, name: str) -> None:
        """Take a manifest and its own digest, which names the swarm: pieces of another never fit."""
        self.manifest = manifest
        self.name = name
        self._firsts: list[int] = []
        self._files = [file for file in manifest.files if file.piece_count]
        count = 0
        for file in self._files:
            self._firsts.append(count)
            count += file.piece_count
        self.count = count

    def piece(self, index: int) -> Piece:
        """One piece. Raises `IndexError` for a number that none has."""
        if not 0 <= index < self.count:
            raise IndexError(f"piece {index} of {self.count}")
        place = bisect_right(self._firsts, index) - 1
        file, inner = self._files[place], index - self._firsts[place]
        offset, length = piece_span(file, inner, self.manifest.piece_bytes)
        return Piece(index, file.path, offset, length, file.piece_digest(inner))

    def stripe(self, stripe: int, stripes: int) -> range:
        """Numbers of the pieces of one stripe: a run of them, so that disks and origins read in order."""
        return range(self.count * stripe // stripes, self.count * (stripe + 1) // stripes)

    @property
    def map_bytes(self) -> int:
        """Size of a map with one bit for each piece."""
        return -(-self.count // 8)


def to_map(indices: Iterable[int], map_bytes: int) -> bytes:
    """Bits of these numbers, the lowest bit of each byte first."""
    bits = bytearray(map_bytes)
    for index in indices:
        bits[index >> 3] |= 1 << (index & 7)
    return bytes(bits)


def from_map(bits: bytes, count: int) -> Iterator[int]:
    """Yield the numbers below `count` whose bits are set, in order."""
    for place, byte in enumerate(bits):
        if byte:
            for bit in range(8):
                index = place * 8 + bit
                if byte >> bit & 1 and index < count:
                    yield index
