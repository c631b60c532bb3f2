"""Memory that processes hand to one another as file descriptors, whichever device it lies on.

Addresses and memory are two things: addresses are reserved once, and pieces of memory are laid there and
taken away again. A process reaches what it has mapped and nothing else.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from dataclasses import dataclass
from typing import Protocol

from workers.kv import libc
from workers.kv.layout import PAGE_BYTES

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class Piece:
    """Memory without an address; exists until every process has released and unmapped it."""

    handle: int
    size_bytes: int


class SharedMemory(Protocol):
    """One kind of such memory. All methods raise `OSError`, with ENOMEM where there is no more."""

    kind: str
    """`host` or `cuda`."""
    page_bytes: int
    """Sizes and addresses are multiples of it."""
    device_uuid: str
    """Which device's memory it is; empty for the host's."""

    def allocate(self, size_bytes: int) -> Piece:
        """Return new memory. Its content is not defined."""
        ...

    def release(self, piece: Piece) -> None:
        """Let go of a piece; where it is mapped it stays."""
        ...

    def export(self, piece: Piece) -> int:
        """Return a descriptor to hand to another process; the caller closes it."""
        ...

    def adopt(self, descriptor: int, size_bytes: int) -> Piece:
        """Return the piece behind a descriptor, which belongs to this object then."""
        ...

    def seal(self, piece: Piece) -> None:
        """Forbid writing from now on, as far as this kind of memory can."""
        ...

    def reserve(self, size_bytes: int) -> int:
        """Return addresses for so many bytes, with nothing there: a touch ends the process."""
        ...

    def unreserve(self, address: int, size_bytes: int) -> None:
        """Give addresses back; nothing is mapped there any more."""
        ...

    def map(self, address: int, piece: Piece, *, writable: bool) -> None:
        """Lay a piece at reserved addresses."""
        ...

    def unmap(self, address: int, size_bytes: int) -> None:
        """Take away what lies there; the addresses stay reserved."""
        ...

    def wipe(self, address: int, size_bytes: int) -> None:
        """Overwrite with zeros, and return when that is done."""
        ...

    def settle(self) -> None:
        """Wait until nothing that was started before uses any memory."""
        ...


class HostMemory:
    """The host's memory, in anonymous files. Also what devices' memory is tested with."""

    kind: str = "host"
    page_bytes: int = PAGE_BYTES
    device_uuid: str = ""

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        """`limit_bytes` bounds what this object allocates."""
        self._left_bytes = limit_bytes

    def allocate(self, size_bytes: int) -> Piece:
        """Return new memory, which is set aside at once."""
        if self._left_bytes is not None:
            if size_bytes > self._left_bytes:
                raise OSError(errno.ENOMEM, f"{size_bytes} bytes are wanted, {self._left_bytes} are left")
            self._left_bytes -= size_bytes
        descriptor = os.memfd_create("exaserve", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size_bytes)
            libc.reserve(descriptor, 0, size_bytes)
        except OSError:
            os.close(descriptor)
            raise
        return Piece(descriptor, size_bytes)

    def release(self, piece: Piece) -> None:
        """Close the file."""
        os.close(piece.handle)
        if self._left_bytes is not None:
            self._left_bytes += piece.size_bytes

    def export(self, piece: Piece) -> int:
        """Return another descriptor of the file."""
        return os.dup(piece.handle)

    def adopt(self, descriptor: int, size_bytes: int) -> Piece:
        """Take a descriptor over."""
        return Piece(descriptor, size_bytes)

    def seal(self, piece: Piece) -> None:
        """Have the kernel refuse writes and writable mappings. Raises EBUSY while there are any."""
        fcntl.fcntl(piece.handle, fcntl.F_ADD_SEALS, _SEALS)

    def reserve(self, size_bytes: int) -> int:
        """Map nothing, without access."""
        return libc.reserve_addresses(size_bytes)

    def unreserve(self, address: int, size_bytes: int) -> None:
        """Unmap."""
        libc.unmap(address, size_bytes)

    def map(self, address: int, piece: Piece, *, writable: bool) -> None:
        """Map the file over the reservation."""
        libc.map_at(address, piece.size_bytes, piece.handle, writable=writable)

    def unmap(self, address: int, size_bytes: int) -> None:
        """Put a reservation back over it."""
        libc.reserve_addresses(size_bytes, at=address)

    def wipe(self, address: int, size_bytes: int) -> None:
        """Overwrite with zeros."""
        ctypes.memset(address, 0, size_bytes)

    def settle(self) -> None:
        """Return at once: a CPU's writes are done when they are made."""
