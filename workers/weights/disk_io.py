"""Disks as they are: reading what really is on one, writing soon, and letting others go first.

A disk that changes its bytes is found out only by reading them from there, and whoever reads old weights must
not push what engines work with out of memory. So files are read directly (`O_DIRECT`), which neither looks at
the page cache nor fills it; on file systems that cannot, their pages are dropped before each read and after.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from pathlib import Path
from typing import Self

_ALIGNMENT = 4096
"""Offsets and lengths of direct reads are multiples of it; larger than any disk's own block."""
_NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})

_WRITE_BYTES = 256 * 1024
"""Written at a time. Larger writes take larger folios of the page cache, for which the kernel looks, and on
virtual machines faults, up to ten times as long."""
_LIBC = ctypes.CDLL(None)
_SYNC_FILE_RANGE_WRITE = 2
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""Number of the system call, which the C library has no name for."""
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_IDLE = 3 << 13
_IOPRIO_USUAL = 0


class DiskFile:
    """A file of which pieces are read from the disk. One thread only; all may raise `OSError`."""

    def __init__(self, path: Path, piece_bytes: int, *, direct: bool = True) -> None:
        """Open a file; links are not followed."""
        self._path = path
        # Mapped memory begins at a page, as direct reads want it.
        self._memory = memoryview(mmap.mmap(-1, -(-piece_bytes // _ALIGNMENT) * _ALIGNMENT))
        self._direct = direct
        self._fd = self._open()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        os.close(self._fd)

    def read(self, offset: int, length: int) -> memoryview:
        """The bytes there; fewer at the end of the file. Good until the next read."""
        count = self._read_direct(offset, length) if self._direct else None
        if count is None:
            count = self._read_dropped(offset, length)
        return self._memory[: min(count, length)]

    def _open(self) -> int:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        if self._direct:
            try:
                return os.open(self._path, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
                self._direct = False
        return os.open(self._path, flags)

    def _read_direct(self, offset: int, length: int) -> int | None:
        whole = -(-length // _ALIGNMENT) * _ALIGNMENT
        try:
            return os.preadv(self._fd, [self._memory[:whole]], offset)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
        os.close(self._fd)
        self._direct = False
        self._fd = self._open()
        return None

    def _read_dropped(self, offset: int, length: int) -> int:
        os.posix_fadvise(self._fd, offset, length, os.POSIX_FADV_DONTNEED)
        try:
            return os.preadv(self._fd, [self._memory[:length]], offset)
        finally:
            os.posix_fadvise(self._fd, offset, length, os.POSIX_FADV_DONTNEED)


def write_soon(fd: int, data: memoryview, offset: int) -> None:
    """Write all of it into a file, and have the disk begin with it at once. Raises `OSError`.

    The kernel alone would begin after seconds, and whoever syncs at the end would wait for all of it; where
    the system cannot be asked, it does so.
    """
    at, length = offset, len(data)
    while data:
        written = os.pwrite(fd, data[:_WRITE_BYTES], at)
        data, at = data[written:], at + written
    begin = getattr(_LIBC, "sync_file_range", None)
    if begin is not None:
        begin(fd, ctypes.c_longlong(offset), ctypes.c_longlong(length), _SYNC_FILE_RANGE_WRITE)


def yield_disk(*, to_everybody: bool) -> None:
    """Have this thread use disks only while nobody else does, or as usual again.

    Where the system or the disk's scheduler knows no such order nothing changes.
    """
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        wanted = _IOPRIO_IDLE if to_everybody else _IOPRIO_USUAL
        _LIBC.syscall(number, _IOPRIO_WHO_PROCESS, 0, wanted)
