"""Nodes of a swarm on loopback addresses, with folders for disks: the product's own two ends of the wire."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from workers.protocol import manifest as manifests
from workers.weights.swarm.member import SwarmMember
from workers.weights.swarm.parents import ORIGIN, Parent
from workers.weights.swarm.pieces import Piece, PieceRow
from workers.weights.swarm.pulling import PullLimits
from workers.weights.swarm.rates import RateCap
from workers.weights.swarm.serving import PieceServer, ServeLimits

PIECE = 64 * 1024
KEY = b"k" * 32
BRISK = PullLimits(connect_seconds=1.0, silent_seconds=1.8, starved_seconds=2.0, origin_patience_seconds=0.3)


def row_of(contents: dict[str, bytes]) -> PieceRow:
    """Pieces of these files."""
    files = tuple(
        manifests.ManifestFile(
            path,
            len(content),
            hashlib.sha256(content).hexdigest(),
            b"".join(blake3(content[i : i + PIECE]).digest() for i in range(0, len(content), PIECE)),
        )
        for path, content in sorted(contents.items())
    )
    name, data = manifests.encode(manifests.Manifest(manifests.revision_of(files), PIECE, files))
    return PieceRow(manifests.decode(data, name), name)


class FolderSink:
    """A disk; `fails` may make any write fail, `spoils` may damage what was verified."""

    def __init__(self, folder: Path, row: PieceRow) -> None:
        self.folder = folder
        self.fails: Callable[[Piece], OSError | None] = lambda _: None
        self.spoils: Callable[[Piece], bool] = lambda _: False
        self.written: list[int] = []
        for file in row.manifest.files:
            (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
            (folder / file.path).touch()

    def write(self, piece: Piece, data: memoryview, /) -> None:
        failure = self.fails(piece)
        if failure is not None:
            raise failure
        kept = bytearray(data)
        if self.spoils(piece):
            kept[0] ^= 0xFF
        with (self.folder / piece.path).open("r+b") as file:
            file.seek(piece.offset)
            file.write(kept)
        self.written.append(piece.index)

    def open_file(self, path: str, /) -> int:
        return os.open(self.folder / path, os.O_RDONLY)


class MemoryOrigin:
    """An origin that counts, and may fail, be slow, or send damaged bytes."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self.contents = contents
        self.sent_bytes = 0
        self.away = False
        self.damages = False
        self.gate = threading.Event()
        self.gate.set()

    @contextmanager
    def open_range(self, path: str, offset: int, length: int, /) -> Iterator[_Bytes]:
        if self.away:
            raise OSError("the origin is away")
        yield _Bytes(self, memoryview(self.contents[path])[offset : offset + length])


class _Bytes:
    def __init__(self, origin: MemoryOrigin, left: memoryview) -> None:
        self._origin = origin
        self._left = left

    def read_into(self, memory: memoryview, /) -> None:
        if not self._origin.gate.wait(30.0):
            raise OSError("the origin is slow")
        if self._origin.away:
            raise OSError("the origin went away")
        memory[:] = self._left[: len(memory)]
        self._left = self._left[len(memory) :]
        if self._origin.damages:
            memory[0] ^= 0xFF
        self._origin.sent_bytes += len(memory)


class SwarmNode:
    """One member with a server of its own."""

    def __init__(
        self,
        name: str,
        row: PieceRow,
        folder: Path,
        *,
        origin: MemoryOrigin | None = None,
        present: Sequence[int] = (),
        limits: PullLimits = BRISK,
        serves: ServeLimits | None = None,
        caps: Sequence[RateCap] = (),
    ) -> None:
        self.name = name
        self.row = row
        self.sink = FolderSink(folder, row)
        self.server = PieceServer(name, "127.0.0.1", limits=serves)
        self.server.start()
        self.member = SwarmMember(
            self.server, row, self.sink, present=present, origin=origin, limits=limits, caps=caps
        )
        self.member.keys.put(1, KEY, 600.0)

    @property
    def parent(self) -> Parent:
        """This node, as a parent of others."""
        return Parent(self.name, "127.0.0.1", self.server.port)

    def contents(self) -> dict[str, bytes]:
        """What is on its disk."""
        files = self.row.manifest.files
        return {file.path: (self.sink.folder / file.path).read_bytes() for file in files}

    def stop(self) -> None:
        self.member.leave()
        self.server.stop()


@contextmanager
def nodes_of(
    count: int, row: PieceRow, folder: Path, origin: MemoryOrigin | None = None, **options: object
) -> Iterator[list[SwarmNode]]:
    """So many members, gone afterwards."""
    nodes: list[SwarmNode] = []
    try:
        for number in range(count):
            name = f"n{number}"
            nodes.append(SwarmNode(name, row, folder / name, origin=origin, **options))  # type: ignore[arg-type]
        yield nodes
    finally:
        for node in nodes:
            node.stop()


def from_origin() -> Parent:
    """The origin, as a parent."""
    return Parent(ORIGIN)


def wait_for(done: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    """Wait for a condition; fails when it does not come."""
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, f"no {what} in {seconds:.0f} s"
        time.sleep(0.01)
