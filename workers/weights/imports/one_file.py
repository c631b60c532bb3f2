"""One file of an import: written and hashed while it arrives, from where the disk has it on."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass

from blake3 import blake3

from workers.protocol.manifest import ManifestFile
from workers.protocol.shards import MAX_HEADER_BYTES, SUFFIX, ShardError, read_header
from workers.weights.disk_io import write_soon
from workers.weights.imports.listing import ListedFile, UnfitError
from workers.weights.imports.records import ImportRecord
from workers.weights.staging import sync_folder
from workers.weights.swarm.port import RangeReader

SYNC_SECONDS = 2.0
_LENGTH_BYTES = 8
Read = Callable[[RangeReader, memoryview], None]


class WrongBytesError(Exception):
    """A file whose digest is not the one that its place told; it is begun anew."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What files share."""

    record: ImportRecord
    hashers: Executor
    """SHA-256 is computed there while the reader's thread computes BLAKE3."""
    stopped: Callable[[], bool]
    piece_bytes: int


class IncomingFile:
    """Takes the bytes of one file in order. One thread at a time."""

    def __init__(self, file: ListedFile, tools: Tools) -> None:
        """Begin, or go on: what the disk has is read again, so that digests cover it. Raises `OSError`."""
        self.file = file
        self._tools = tools
        self._path = tools.record.files / file.path
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._memory = memoryview(bytearray(tools.piece_bytes))
        self._synced_at = time.monotonic()
        self._forget()
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._resume(min(tools.record.synced_bytes(file.path), file.size_bytes))

    def take_from(self, reader: RangeReader, read: Read, on_piece: Callable[[int], None]) -> None:
        """Read the rest of the file. Raises `SourceError`, `OSError`, `UnfitError` or `WrongBytesError`."""
        while self.have_bytes < self.file.size_bytes and not self._tools.stopped():
            piece = self._memory[: min(len(self._memory), self.file.size_bytes - self.have_bytes)]
            read(reader, piece)
            write_soon(self._fd, piece, self.have_bytes)
            self._digest(piece)
            on_piece(len(piece))
            self._sync_now_and_then()

    @property
    def is_whole(self) -> bool:
        """Whether all bytes are here."""
        return self.have_bytes == self.file.size_bytes

    def begin_anew(self) -> None:
        """Drop what there is."""
        os.ftruncate(self._fd, 0)
        self._tools.record.note_synced(self.file.path, 0)
        self._forget()

    def finish(self) -> ManifestFile:
        """Sync and check a file that is whole. Raises as `take_from`."""
        if not self._header_is_good:
            self._check_header()
        if self.file.sha256 and self._sha256.hexdigest() != self.file.sha256:
            raise WrongBytesError(
                f"{self.file.path} has SHA-256 {self._sha256.hexdigest()}, "
                f"and its place tells {self.file.sha256}"
            )
        if self.file.git_sha1 and self._sha1.hexdigest() != self.file.git_sha1:
            raise WrongBytesError(f"{self.file.path} is not the file that its place tells of")
        os.fsync(self._fd)
        sync_folder(self._path.parent)
        return ManifestFile(
            self.file.path, self.file.size_bytes, self._sha256.hexdigest(), b"".join(self._pieces)
        )

    def close(self) -> None:
        """Let go of the file; the next try goes on from what is here."""
        try:
            if not self.is_whole:
                self._sync()
        except OSError:
            pass  # what was noted before holds, and whoever closes has a reason of its own to tell
        finally:
            os.close(self._fd)

    def _forget(self) -> None:
        self._sha256 = hashlib.sha256()
        self._sha1 = hashlib.sha1(b"blob %d\0" % self.file.size_bytes, usedforsecurity=False)
        self._pieces: list[bytes] = []
        self._header_is_good = not self.file.path.endswith(SUFFIX)
        self.have_bytes = 0

    def _resume(self, synced_bytes: int) -> None:
        whole_pieces = synced_bytes - synced_bytes % len(self._memory)
        while self.have_bytes < whole_pieces:
            if os.preadv(self._fd, [self._memory], self.have_bytes) != len(self._memory):
                break
            self._digest(self._memory)
        os.ftruncate(self._fd, self.have_bytes)

    def _digest(self, piece: memoryview) -> None:
        hashing = self._tools.hashers.submit(self._sha256.update, piece)
        if self.file.git_sha1:
            self._sha1.update(piece)
        digest = blake3(piece).digest()
        hashing.result()
        self._pieces.append(digest)
        self.have_bytes += len(piece)
        if not self._header_is_good:
            self._check_header()

    def _check_header(self) -> None:
        """Find a broken shard by its first bytes, before the rest of it is fetched."""
        length = int.from_bytes(os.pread(self._fd, _LENGTH_BYTES, 0), "little")
        most = min(MAX_HEADER_BYTES, self.file.size_bytes - _LENGTH_BYTES)
        if length <= most and self.have_bytes < _LENGTH_BYTES + length:
            return  # it is not all here yet
        try:
            read_header(self.file.path, self.file.size_bytes, lambda at, count: os.pread(self._fd, count, at))
        except ShardError as error:
            raise UnfitError(str(error)) from error
        self._header_is_good = True

    def _sync_now_and_then(self) -> None:
        if time.monotonic() - self._synced_at >= SYNC_SECONDS:
            self._sync()

    def _sync(self) -> None:
        os.fdatasync(self._fd)
        self._tools.record.note_synced(self.file.path, self.have_bytes)
        self._synced_at = time.monotonic()


@contextmanager
def incoming(file: ListedFile, tools: Tools) -> Iterator[IncomingFile]:
    """Open a file that arrives, and note how far it is when that ends."""
    taken = IncomingFile(file, tools)
    try:
        yield taken
    finally:
        taken.close()
