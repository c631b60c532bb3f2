"""The few system calls on memory that Python has no functions for."""

from __future__ import annotations

import ctypes
import mmap
import os

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)

PROT_NONE = 0
PROT_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_KEEP_SIZE = 0x1
_PUNCH_HOLE = 0x2


def map_closed(descriptor: int, size_bytes: int) -> int:
    """Map a file whole, shared and without any access; returns the address. Raises `OSError`."""
    flags = mmap.MAP_SHARED | _MAP_NORESERVE
    return _checked_address(_LIBC.mmap(None, size_bytes, PROT_NONE, flags, descriptor, 0))


def reserve_addresses(size_bytes: int, *, at: int | None = None) -> int:
    """Reserve addresses without memory or access, `at` those given in place of what lies there.

    Returns the first one. Raises `OSError`.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | (0 if at is None else _MAP_FIXED)
    return _checked_address(_LIBC.mmap(at, size_bytes, PROT_NONE, flags, -1, 0))


def map_at(address: int, size_bytes: int, descriptor: int, *, writable: bool) -> None:
    """Map a file at reserved addresses. Raises `OSError`.

    For reading, the mapping is private: a file that is sealed against writing can be mapped so by every
    kernel, and nobody writes, so the memory is shared all the same.
    """
    kind = mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE
    protection = PROT_READ_WRITE if writable else mmap.PROT_READ
    _checked_address(_LIBC.mmap(address, size_bytes, protection, kind | _MAP_FIXED, descriptor, 0))


def unmap(address: int, size_bytes: int) -> None:
    """Undo `map_closed`."""
    _check(_LIBC.munmap(address, size_bytes))


def protect(address: int, size_bytes: int, protection: int) -> None:
    """Open or close part of a mapping. Raises `OSError`."""
    _check(_LIBC.mprotect(address, size_bytes, protection))


def reserve(descriptor: int, offset_bytes: int, size_bytes: int) -> None:
    """Have the file's memory set aside now. Raises `OSError` (ENOSPC) where there is none.

    Without it a full file system would show only at the first touch, as a SIGBUS.
    """
    _check(_LIBC.fallocate(descriptor, _KEEP_SIZE, offset_bytes, size_bytes))


def punch_hole(descriptor: int, offset_bytes: int, size_bytes: int) -> None:
    """Give a range's memory back to the machine; it reads as zeros from then on. Raises `OSError`."""
    _check(_LIBC.fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, offset_bytes, size_bytes))


def _checked_address(address: int | None) -> int:
    if address is None or address == _MAP_FAILED:
        _check(-1)
        raise AssertionError("not reached")
    return address


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
