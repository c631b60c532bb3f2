"""Which pieces of a staged revision are verified, so that a killed agent goes on where it was.

A file with one byte for each piece. A piece is marked once its bytes were checked and written. That holds
while the machine runs, whatever becomes of the agent; after a reboot only those count whose bytes were
synced to the disk before they were marked so. The others are read and checked again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

MARKS = "pieces"
"""Name of the file, in a staged revision's folder."""

_MISSING, _WRITTEN, _SYNCED = 0, 1, 2
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_HEADER_BYTES = 64


class PieceMarks:
    """Marks of one staged revision. Safe to use from several threads."""

    def __init__(self, path: Path, count: int) -> None:
        """Open or begin the marks of so many pieces. Raises `OSError`."""
        self.count = count
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        boot = _boot_id()
        content = os.read(self._fd, _HEADER_BYTES + count + 1)
        if len(content) != _HEADER_BYTES + count:
            content = boot + bytes(count)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, content, 0)
        self._marks = bytearray(content[_HEADER_BYTES:])
        self.same_boot = content[:_HEADER_BYTES] == boot
        """False: the machine was restarted since, so what was only written counts for nothing yet."""
        self._have = sum(mark != _MISSING for mark in self._marks)

    def present(self) -> Iterator[int]:
        """Pieces that are marked."""
        return (index for index, mark in enumerate(self._marks) if mark)

    def missing(self) -> list[int]:
        """Pieces that are not."""
        return [index for index, mark in enumerate(self._marks) if not mark]

    def doubtful(self) -> list[int]:
        """Pieces to be read and checked again before they count."""
        return [] if self.same_boot else [n for n, mark in enumerate(self._marks) if mark == _WRITTEN]

    def has(self, index: int) -> bool:
        """Whether a piece is marked."""
        return bool(self._marks[index])

    @property
    def whole(self) -> bool:
        """Whether all pieces are marked."""
        return self._have == self.count

    def add(self, index: int) -> bool:
        """Mark a piece whose bytes are written. Returns `False` if it was marked. Raises `OSError`."""
        with self._lock:
            if self._marks[index]:
                return False
            self._set(index, _WRITTEN)
            self._have += 1
            return True

    def drop(self, indices: Iterator[int] | range | list[int]) -> None:
        """Forget pieces. Raises `OSError`."""
        with self._lock:
            for index in indices:
                self._have -= bool(self._marks[index])
                self._set(index, _MISSING)

    def written(self) -> list[int]:
        """Pieces that are not known to be on the disk yet."""
        with self._lock:
            return [index for index, mark in enumerate(self._marks) if mark == _WRITTEN]

    def note_synced(self, indices: list[int]) -> None:
        """Say that these pieces' files were synced after they were marked. Raises `OSError`."""
        with self._lock:
            for index in indices:
                if self._marks[index] == _WRITTEN:
                    self._set(index, _SYNCED)
            if not self.same_boot and _WRITTEN not in self._marks:
                os.pwrite(self._fd, _boot_id(), 0)
                self.same_boot = True
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1

    def _set(self, index: int, mark: int) -> None:
        self._marks[index] = mark
        os.pwrite(self._fd, bytes([mark]), _HEADER_BYTES + index)


def count_marks(path: Path) -> int:
    """Count the pieces that are marked in a file that may not be there."""
    try:
        return sum(mark != _MISSING for mark in path.read_bytes()[_HEADER_BYTES:])
    except OSError:
        return 0


def _boot_id() -> bytes:
    try:
        text = _BOOT_ID.read_text().strip()
    except OSError:
        text = "unknown"
    return text.encode()[:_HEADER_BYTES].ljust(_HEADER_BYTES, b"\0")
