"""A revision on its way: files in their full size, of which some pieces are verified."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from workers.protocol.manifest import Manifest
from workers.weights.disk_io import write_soon
from workers.weights.marks import MARKS, PieceMarks
from workers.weights.swarm.pieces import Piece, PieceRow

_FILES = "files"
_NO_ALLOCATION = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})
"""A file system that cannot set room aside."""


class Staged:
    """Invisible to engines until it is whole. Takes verified pieces from any thread."""

    def __init__(self, folder: Path, manifest: Manifest, manifest_digest: str) -> None:
        """Begin, or go on where an agent that was killed stopped. Raises `OSError`."""
        self.folder = folder
        self.manifest = manifest
        self.row = PieceRow(manifest, manifest_digest)
        self.files = folder / _FILES
        self.files.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._fds: dict[str, int] = {}
        self._unsynced: set[str] = set()
        self.marks = PieceMarks(folder / MARKS, self.row.count)
        self._have_bytes = sum(self.row.piece(index).length for index in self.marks.present())

    @property
    def have_bytes(self) -> int:
        """Verified and written."""
        return self._have_bytes

    @property
    def whole(self) -> bool:
        """Whether every piece is verified."""
        return self.marks.whole

    def settle(self) -> int:
        """Read again what may not have reached the disk before a reboot. Returns the pieces that had not.

        Files of the wrong size, which this never leaves, count as missing. Raises `OSError`.
        """
        lost = [index for index in self.marks.doubtful() if not self._is_right(self.row.piece(index))]
        lost += [index for index in self._of_wrong_size() if self.marks.has(index)]
        self._forget(lost)
        if not self.marks.same_boot:
            self.sync()
        return len(lost)

    def write(self, piece: Piece, data: memoryview) -> None:
        """Keep a piece that was verified. Raises `OSError`, such as for a full disk."""
        fd = self._open(piece.path)
        write_soon(fd, data, piece.offset)
        with self._lock:
            self._unsynced.add(piece.path)
            if self.marks.add(piece.index):
                self._have_bytes += piece.length

    def open_file(self, path: str) -> int:
        """Descriptor of one of the revision's files, for reading; the caller closes it."""
        return os.open(self.files / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def adopt(self, path: str, source: Path) -> bool:
        """Take a file from a revision that has the same one, as a hard link. Returns whether it could."""
        target = self.files / path
        target.parent.mkdir(parents=True, exist_ok=True)
        indices = self.indices(path)
        if all(self.marks.has(index) for index in indices):
            return False
        target.unlink(missing_ok=True)
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError:
            return False  # too many links, or another file system: it is fetched instead
        for index in indices:
            if self.marks.add(index):
                self._have_bytes += self.row.piece(index).length
        with self._lock:
            self._unsynced.add(path)
        return True

    def mark_present(self, but: Iterable[int] = ()) -> None:
        """Say that all pieces but these are here and verified: it was whole before."""
        missing = set(but)
        for index in range(self.row.count):
            if index not in missing and self.marks.add(index):
                self._have_bytes += self.row.piece(index).length

    def sync(self) -> None:
        """Have what was written on the disk, then note so. Raises `OSError`."""
        pieces = self.marks.written()
        with self._lock:
            paths, self._unsynced = self._unsynced, set()
        try:
            for path in sorted(paths):
                os.fdatasync(self._open(path))
        except OSError:
            with self._lock:
                self._unsynced |= paths
            raise
        self.marks.note_synced(pieces)

    def finish_files(self) -> None:
        """Bring what has no pieces, rights and folders in order, and sync all of it. Raises `OSError`."""
        for file in self.manifest.files:
            if not file.piece_count:
                path = self.files / file.path
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch(exist_ok=True)
        self.sync()
        self.close_files()
        seal_folder(self.files)

    def close_files(self) -> None:
        """Close the files; they are opened again when needed."""
        with self._lock:
            fds, self._fds = list(self._fds.values()), {}
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Close everything; what is staged stays."""
        self.close_files()
        self.marks.close()

    def delete(self) -> None:
        """Forget it: nobody wants it any more."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _open(self, path: str) -> int:
        with self._lock:
            fd = self._fds.get(path)
            if fd is None:
                fd = self._fds[path] = self._create(path)
            return fd

    def _create(self, path: str) -> int:
        """Open a file in its full size: a disk that is too small says so now and not after hours."""
        target = self.files / path
        target.parent.mkdir(parents=True, exist_ok=True)
        size = next(file.size_bytes for file in self.manifest.files if file.path == path)
        with suppress(FileNotFoundError):
            if target.lstat().st_nlink > 1:
                # Shared with another revision, whose bytes must stay as they are.
                return os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            target.chmod(0o600)
        fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size != size:
                os.ftruncate(fd, size)
                _allocate(fd, size)
        except OSError:
            os.close(fd)
            raise
        return fd

    def indices(self, path: str) -> range:
        """Numbers of a file's pieces. Raises `KeyError` for a file that is not in the manifest."""
        first = 0
        for file in self.manifest.files:
            if file.path == path:
                return range(first, first + file.piece_count)
            first += file.piece_count
        raise KeyError(path)

    def _of_wrong_size(self) -> list[int]:
        wrong: list[int] = []
        for file in self.manifest.files:
            with suppress(FileNotFoundError):
                if (self.files / file.path).lstat().st_size == file.size_bytes:
                    continue
            wrong += self.indices(file.path)
        return wrong

    def _is_right(self, piece: Piece) -> bool:
        try:
            data = os.pread(self._open(piece.path), piece.length, piece.offset)
        except OSError:
            return False
        return blake3(data).digest() == piece.digest

    def _forget(self, indices: list[int]) -> None:
        for index in indices:
            if self.marks.has(index):
                self._have_bytes -= self.row.piece(index).length
        self.marks.drop(indices)


def _allocate(fd: int, size: int) -> None:
    try:
        if size:
            os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in _NO_ALLOCATION:
            raise


def seal_folder(folder: Path) -> None:
    """Make all files below read-only, and have their names on the disk. Raises `OSError`."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            Path(parent, name).chmod(0o444)
        sync_folder(Path(parent))


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
