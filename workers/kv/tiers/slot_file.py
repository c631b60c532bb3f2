"""KV blocks on disk: a file for each replica, in slots of one size, with seals that every read checks.

A file lives as long as its owner: it is locked by the process that made it, and a file that nobody
has locked is removed when the next one is made, and by the agent. Nothing in it outlives a process.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import hmac
import logging
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workers.kv import libc

log = logging.getLogger(__name__)

_MAGIC = b"xkv1"
_SEAL_BYTES = 16
_DIGEST_BYTES = 16
_FIELDS = struct.Struct("<4sIQ16s")
"""Magic, length in bytes, generation, digest; the seal of these and of the content follows."""
HEADER_BYTES = _FIELDS.size + _SEAL_BYTES
_PAGE_BYTES = 4096
_PRIVATE_FILE = 0o600
_PRIVATE_FOLDER = 0o700
_ENDING = ".slots"
_LOCK_NAME = "lock"


class DamagedBlockError(Exception):
    """A slot does not hold what was written there."""


class SlotFile:
    """One replica's blocks on disk. For one thread at a time."""

    def __init__(self, folder: Path, name: str, *, slots: int, block_bytes: int) -> None:
        """Make the file, removing those of dead owners first. Raises `OSError`."""
        self.block_bytes = block_bytes
        self.slot_bytes = slot_bytes(block_bytes)
        self.path = folder / f"{name}-{os.getpid()}{_ENDING}"
        self._key = os.urandom(32)  # of this file alone, so that no other file's slot passes for one of it
        folder.mkdir(mode=_PRIVATE_FOLDER, parents=True, exist_ok=True)
        with _folder_lock(folder):
            _remove_dead(folder)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self.descriptor = os.open(self.path, flags, _PRIVATE_FILE)
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(self.descriptor, slots * self.slot_bytes)
                _set_aside(self.descriptor, slots * self.slot_bytes)
            except OSError:
                self.close()
                raise

    def write(self, slot: int, generation: int, digest: bytes, content: bytes) -> None:
        """Replace a slot's content. Raises `OSError`, also for a write that was cut short."""
        fields = _FIELDS.pack(_MAGIC, len(content), generation, digest)
        parts = [fields, self._seal(fields, content), content]
        written = os.pwritev(self.descriptor, parts, slot * self.slot_bytes)
        if written != HEADER_BYTES + len(content):
            raise OSError(
                errno.EIO, f"only {written} of {HEADER_BYTES + len(content)} bytes of a block were written"
            )

    def read(self, slot: int, generation: int, digest: bytes) -> bytearray:
        """Return what was written to a slot. Raises `DamagedBlockError` if it is anything else, `OSError`."""
        header = bytearray(HEADER_BYTES)
        content = bytearray(self.block_bytes)
        got = os.preadv(self.descriptor, [header, content], slot * self.slot_bytes)
        if got != HEADER_BYTES + self.block_bytes:
            raise DamagedBlockError(f"only {got} bytes can be read of slot {slot}")
        fields, seal = bytes(header[: _FIELDS.size]), bytes(header[_FIELDS.size :])
        if fields != _FIELDS.pack(_MAGIC, self.block_bytes, generation, digest):
            raise DamagedBlockError(f"slot {slot} holds another block")
        if not hmac.compare_digest(seal, self._seal(fields, content)):
            raise DamagedBlockError(f"the content of slot {slot} has changed")
        return content

    def close(self) -> None:
        """Remove the file and give its room back."""
        self.path.unlink(missing_ok=True)
        os.close(self.descriptor)

    def _seal(self, fields: bytes, content: bytes | bytearray) -> bytes:
        seal = hashlib.blake2b(fields, digest_size=_SEAL_BYTES, key=self._key)
        seal.update(content)
        return seal.digest()


def slot_bytes(block_bytes: int) -> int:
    """Bytes of a slot, whole pages."""
    return -(-(HEADER_BYTES + block_bytes) // _PAGE_BYTES) * _PAGE_BYTES


def remove_dead_files(folder: Path) -> int:
    """Remove the files of owners that are dead; returns how many. Raises `OSError`.

    While somebody makes a file nothing is done: whoever does so removes them.
    """
    if not folder.is_dir():
        return 0
    try:
        with _folder_lock(folder, wait=False):
            return _remove_dead(folder)
    except BlockingIOError:
        return 0


def _remove_dead(folder: Path) -> int:
    removed = 0
    for path in folder.glob(f"*{_ENDING}"):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # its owner lives
        else:
            path.unlink()
            removed += 1
        finally:
            os.close(descriptor)
    if removed:
        log.info("removed %d files of KV blocks whose owners are dead", removed)
    return removed


def _set_aside(descriptor: int, size_bytes: int) -> None:
    """Have the disk's room set aside now, where the file system can; else a full disk shows at a write."""
    try:
        libc.reserve(descriptor, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise


@contextmanager
def _folder_lock(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Between making a file and locking it nobody may look for dead owners."""
    descriptor = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _PRIVATE_FILE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
