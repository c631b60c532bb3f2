"""Memory of a CUDA device that processes share, by the driver's virtual memory management.

Needs compute capability 7.0 and a driver for CUDA 11.2 or newer; a device that cannot is refused with
the reason, and its replicas have memory of their own.
"""

from __future__ import annotations

import logging
import os

from workers.kv.cuda_driver import (
    ACCESS_READ,
    ACCESS_READ_WRITE,
    ATTRIBUTE_POSIX_HANDLES,
    ATTRIBUTE_VIRTUAL_MEMORY,
    CudaDriver,
    CudaError,
    CudaUnavailableError,
)
from workers.kv.memory import Piece

_OLDEST_DRIVER = 11020

log = logging.getLogger(__name__)


class CudaMemory:
    """Memory of one device, as `SharedMemory`. Usable by several threads, one at a time."""

    kind: str = "cuda"

    def __init__(self, driver: CudaDriver, ordinal: int = 0) -> None:
        """Open a visible device. Raises `CudaUnavailableError` with the reason, or `CudaError`."""
        self._driver = driver
        version = driver.version()
        if version < _OLDEST_DRIVER:
            known = f"{version // 1000}.{version % 1000 // 10}"
            raise CudaUnavailableError(f"the driver supports CUDA {known}, and sharing memory needs 11.2")
        self._device = driver.device(ordinal)
        for attribute, what in (
            (ATTRIBUTE_VIRTUAL_MEMORY, "managing addresses and memory apart"),
            (ATTRIBUTE_POSIX_HANDLES, "handing memory to other processes"),
        ):
            if not driver.attribute(attribute, self._device):
                raise CudaUnavailableError(f"this device does not support {what}")
        self._context = driver.retain_context(self._device)
        driver.use_context(self._context)
        self.page_bytes = driver.granularity(self._device)
        self.device_uuid = driver.device_uuid(self._device)
        self._reading_is_enforced = True

    def allocate(self, size_bytes: int) -> Piece:
        """Return new memory of the device."""
        self._enter()
        return Piece(self._driver.create(size_bytes, self._device), size_bytes)

    def release(self, piece: Piece) -> None:
        """Release the handle."""
        self._enter()
        self._driver.release(piece.handle)

    def export(self, piece: Piece) -> int:
        """Return a descriptor that stands for the memory."""
        self._enter()
        return self._driver.export_descriptor(piece.handle)

    def adopt(self, descriptor: int, size_bytes: int) -> Piece:
        """Import what a descriptor stands for, and close it."""
        self._enter()
        try:
            return Piece(self._driver.import_descriptor(descriptor), size_bytes)
        finally:
            os.close(descriptor)

    def seal(self, piece: Piece) -> None:
        """Do nothing: who may write is said with each mapping."""

    def reserve(self, size_bytes: int) -> int:
        """Reserve addresses of the device."""
        self._enter()
        return self._driver.reserve(size_bytes)

    def unreserve(self, address: int, size_bytes: int) -> None:
        """Free addresses."""
        self._enter()
        self._driver.free_addresses(address, size_bytes)

    def map(self, address: int, piece: Piece, *, writable: bool) -> None:
        """Lay a piece at reserved addresses, for this device alone."""
        self._enter()
        self._driver.map(address, piece.size_bytes, piece.handle)
        try:
            self._allow(address, piece.size_bytes, writable=writable)
        except CudaError:
            self._driver.unmap(address, piece.size_bytes)
            raise

    def unmap(self, address: int, size_bytes: int) -> None:
        """Take away what lies there."""
        self._enter()
        self._driver.unmap(address, size_bytes)

    def wipe(self, address: int, size_bytes: int) -> None:
        """Overwrite with zeros and wait for it."""
        self._enter()
        self._driver.fill(address, 0, size_bytes)
        self._driver.synchronize()

    def settle(self) -> None:
        """Wait for all kernels and copies of this process."""
        self._enter()
        self._driver.synchronize()

    def close(self) -> None:
        """Let go of the device."""
        self._driver.release_context(self._device)

    def _allow(self, address: int, size_bytes: int, *, writable: bool) -> None:
        if not writable and self._reading_is_enforced:
            try:
                self._driver.set_access(address, size_bytes, self._device, ACCESS_READ)
            except CudaError as error:
                # Some drivers know no memory that a device may only read. What was written
                # into shared weights is then found by their checksum, at the next mapping.
                log.warning("weights are not protected from this replica's own kernels: %s", error)
                self._reading_is_enforced = False
            else:
                return
        self._driver.set_access(address, size_bytes, self._device, ACCESS_READ_WRITE)

    def _enter(self) -> None:
        """Make the device's context this thread's: torch may have changed it, and threads start without."""
        self._driver.use_context(self._context)
