"""A FAKE of NVIDIA's driver library: host memory behind the same C functions, for machines without a device.

It stands in at the ctypes boundary. Each function is a real C function pointer with the prototype of
`cuda.h`, declared here once more and not taken from the code under test, and structures are read as raw
bytes, so a wrong layout or argument type shows. Memory is real: an allocation is an anonymous file, a
mapping is a mapping, and a touch of anything else is a SIGSEGV. It is stricter than the driver where that
finds mistakes: it demands a current context, page-multiple sizes, and that addresses are freed empty.

What it cannot show: whether a real driver does the same, and anything about kernels.

`python cuda_library.py ARGUMENTS` runs a holder over it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import re
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any

from workers.kv import libc
from workers.kv.cuda_driver import CudaDriver
from workers.kv.cuda_memory import CudaMemory
from workers.kv.holder import main
from workers.kv.memory import HostMemory, SharedMemory

PAGE_BYTES = 64 * 1024
"""Real devices have 2 MiB; smaller pages make for faster tests."""
UUID = bytes(range(16))
GARBAGE = 0xEE
"""What memory holds before somebody wipes it."""

_NAMES = {
    1: b"CUDA_ERROR_INVALID_VALUE",
    2: b"CUDA_ERROR_OUT_OF_MEMORY",
    100: b"CUDA_ERROR_NO_DEVICE",
    101: b"CUDA_ERROR_INVALID_DEVICE",
    201: b"CUDA_ERROR_INVALID_CONTEXT",
    400: b"CUDA_ERROR_INVALID_HANDLE",
    700: b"CUDA_ERROR_ILLEGAL_ADDRESS",
    801: b"CUDA_ERROR_NOT_SUPPORTED",
}
_INVALID_VALUE, _OUT_OF_MEMORY, _NO_DEVICE, _INVALID_DEVICE, _NO_CONTEXT = 1, 2, 100, 101, 201
_INVALID_HANDLE, _ILLEGAL_ADDRESS, _NOT_SUPPORTED = 400, 700, 801
_CONTEXT = 0xC0DE
_PROPERTIES = struct.Struct("iiii P BBH4x")
"""type, requestedHandleTypes, location.type, location.id, win32HandleMetaData, allocFlags."""
_ACCESS = struct.Struct("iii")
"""location.type, location.id, flags."""

_P, _I, _U, _N, _A = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_uint64
_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (_U,),
    "cuDriverGetVersion": (_P,),
    "cuGetErrorName": (_I, _P),
    "cuDeviceGet": (_P, _I),
    "cuDeviceGetAttribute": (_P, _I, _I),
    "cuDeviceGetUuid_v2": (_P, _I),
    "cuDevicePrimaryCtxRetain": (_P, _I),
    "cuDevicePrimaryCtxRelease_v2": (_I,),
    "cuCtxSetCurrent": (_P,),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (_P, _P),
    "cuMemGetAllocationGranularity": (_P, _P, _I),
    "cuMemCreate": (_P, _N, _P, _A),
    "cuMemRelease": (_A,),
    "cuMemExportToShareableHandle": (_P, _A, _I, _A),
    "cuMemImportFromShareableHandle": (_P, _P, _I),
    "cuMemAddressReserve": (_P, _N, _N, _A, _A),
    "cuMemAddressFree": (_A, _N),
    "cuMemMap": (_A, _N, _N, _A, _A),
    "cuMemUnmap": (_A, _N),
    "cuMemSetAccess": (_A, _N, _P, _N),
    "cuMemsetD8_v2": (_A, ctypes.c_ubyte, _N),
}


class DriverFaultError(Exception):
    """A call is answered with an error."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def _snake_case(name: str) -> str:
    """`cuMemCreate` as `cu_mem_create`."""
    return re.sub(r"(?<!^)(?<!_)([A-Z]+)", r"_\1", name).lower()


class FakeCudaLibrary:
    """Stands in for `ctypes.CDLL("libcuda.so.1")`."""

    def __init__(
        self,
        *,
        version: int = 12040,
        devices: int = 1,
        attributes: dict[int, int] | None = None,
        limit_bytes: int = 1 << 40,
        knows_read_only: bool = True,
    ) -> None:
        self.version = version
        self.devices = devices
        self.attributes = {102: 1, 103: 1} if attributes is None else attributes
        self.left_bytes = limit_bytes
        self.knows_read_only = knows_read_only
        self.calls: list[str] = []
        self.files: dict[int, int] = {}
        """Handle to file."""
        self.own: set[int] = set()
        """Handles that were allocated here and not imported."""
        self.reservations: dict[int, int] = {}
        self.mappings: dict[int, tuple[int, bool]] = {}
        """Address to size, and whether writing is allowed."""
        self.contexts = 0
        self._local = threading.local()
        self._next_handle = 1000
        for name, arguments in _PROTOTYPES.items():
            prototype = ctypes.CFUNCTYPE(_I, *arguments)
            setattr(self, name, prototype(self._guarded(name, getattr(self, f"_{_snake_case(name)}"))))

    def leaks(self) -> dict[str, int]:
        """What was taken and not given back."""
        taken = {
            "handles": len(self.files),
            "mappings": len(self.mappings),
            "reservations": len(self.reservations),
        }
        return {what: count for what, count in taken.items() if count}

    def _guarded(self, name: str, function: Callable[..., None]) -> Callable[..., int]:
        @functools.wraps(function)
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            try:
                function(*arguments)
            except DriverFaultError as fault:
                return fault.code
            except MemoryError:
                return _OUT_OF_MEMORY
            return 0

        return call

    def _need_context(self) -> None:
        if getattr(self._local, "context", None) != _CONTEXT:
            raise DriverFaultError(_NO_CONTEXT)

    # -- device ----------------------------------------------------------------------------------
    def _cu_init(self, flags: int) -> None:
        if flags or not self.devices:
            raise DriverFaultError(_NO_DEVICE)

    def _cu_driver_get_version(self, out: int) -> None:
        _I.from_address(out).value = self.version

    def _cu_get_error_name(self, code: int, out: int) -> None:
        if code not in _NAMES:
            raise DriverFaultError(_INVALID_VALUE)
        # Kept by the table, as the driver's own text is by the driver.
        ctypes.c_char_p.from_address(out).value = _NAMES[code]

    def _cu_device_get(self, out: int, ordinal: int) -> None:
        if not 0 <= ordinal < self.devices:
            raise DriverFaultError(_INVALID_DEVICE)
        _I.from_address(out).value = ordinal

    def _cu_device_get_attribute(self, out: int, attribute: int, device: int) -> None:
        self._check_device(device)
        _I.from_address(out).value = self.attributes.get(attribute, 0)

    def _cu_device_get_uuid_v2(self, out: int, device: int) -> None:
        self._check_device(device)
        ctypes.memmove(out, UUID, len(UUID))

    def _check_device(self, device: int) -> None:
        if not 0 <= device < self.devices:
            raise DriverFaultError(_INVALID_DEVICE)

    def _cu_device_primary_ctx_retain(self, out: int, device: int) -> None:
        self._check_device(device)
        self.contexts += 1
        _P.from_address(out).value = _CONTEXT

    def _cu_device_primary_ctx_release_v2(self, device: int) -> None:
        self._check_device(device)
        self.contexts -= 1

    def _cu_ctx_set_current(self, context: int) -> None:
        if context != _CONTEXT or not self.contexts:
            raise DriverFaultError(_NO_CONTEXT)
        self._local.context = context

    def _cu_ctx_synchronize(self) -> None:
        self._need_context()

    def _cu_mem_get_info_v2(self, free: int, total: int) -> None:
        self._need_context()
        _N.from_address(free).value = self.left_bytes
        _N.from_address(total).value = 1 << 41

    # -- memory ----------------------------------------------------------------------------------
    def _cu_mem_get_allocation_granularity(self, out: int, properties: int, option: int) -> None:
        self._check_properties(properties)
        if option not in (0, 1):
            raise DriverFaultError(_INVALID_VALUE)
        _N.from_address(out).value = PAGE_BYTES

    def _check_properties(self, address: int) -> None:
        raw = ctypes.string_at(address, _PROPERTIES.size)
        kind, handles, place, device, windows, *flags = _PROPERTIES.unpack(raw)
        if (kind, handles, place, windows, *flags) != (1, 1, 1, 0, 0, 0, 0) or device >= self.devices:
            raise DriverFaultError(_INVALID_VALUE)

    def _cu_mem_create(self, out: int, size: int, properties: int, flags: int) -> None:
        self._need_context()
        self._check_properties(properties)
        if flags or not size or size % PAGE_BYTES:
            raise DriverFaultError(_INVALID_VALUE)
        if size > self.left_bytes:
            raise DriverFaultError(_OUT_OF_MEMORY)
        self.left_bytes -= size
        file = os.memfd_create("fake-cuda", os.MFD_CLOEXEC)
        os.ftruncate(file, size)
        with mmap.mmap(file, size) as content:
            content.write(bytes([GARBAGE]) * size)
        handle = self._add(file)
        self.own.add(handle)
        _A.from_address(out).value = handle

    def _add(self, file: int) -> int:
        self._next_handle += 1
        self.files[self._next_handle] = file
        return self._next_handle

    def _file(self, handle: int) -> int:
        if handle not in self.files:
            raise DriverFaultError(_INVALID_HANDLE)
        return self.files[handle]

    def _cu_mem_release(self, handle: int) -> None:
        file = self._file(handle)
        del self.files[handle]
        if handle in self.own:
            self.own.remove(handle)
            self.left_bytes += os.fstat(file).st_size
        os.close(file)

    def _cu_mem_export_to_shareable_handle(self, out: int, handle: int, kind: int, flags: int) -> None:
        if kind != 1 or flags:
            raise DriverFaultError(_INVALID_VALUE)
        _I.from_address(out).value = os.dup(self._file(handle))

    def _cu_mem_import_from_shareable_handle(self, out: int, descriptor: int | None, kind: int) -> None:
        self._need_context()
        if kind != 1:
            raise DriverFaultError(_INVALID_VALUE)
        try:
            file = os.dup(descriptor or 0)
        except OSError:
            raise DriverFaultError(_INVALID_VALUE) from None
        _A.from_address(out).value = self._add(file)

    def _cu_mem_address_reserve(self, out: int, size: int, alignment: int, wanted: int, flags: int) -> None:
        if not size or size % PAGE_BYTES or alignment or wanted or flags:
            raise DriverFaultError(_INVALID_VALUE)
        address = libc.reserve_addresses(size)
        self.reservations[address] = size
        _A.from_address(out).value = address

    def _cu_mem_address_free(self, address: int, size: int) -> None:
        inside = any(address <= at < address + size for at in self.mappings)
        if self.reservations.get(address) != size or inside:
            raise DriverFaultError(_INVALID_VALUE)
        del self.reservations[address]
        libc.unmap(address, size)

    def _cu_mem_map(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        file = self._file(handle)
        reserved = any(
            at <= address and address + size <= at + span for at, span in self.reservations.items()
        )
        taken = any(at < address + size and address < at + span for at, (span, _) in self.mappings.items())
        if not reserved or taken or offset or flags or size != os.fstat(file).st_size:
            raise DriverFaultError(_INVALID_VALUE)
        libc.map_at(address, size, file, writable=True)
        libc.protect(address, size, libc.PROT_NONE)
        self.mappings[address] = (size, False)

    def _cu_mem_unmap(self, address: int, size: int) -> None:
        if self.mappings.get(address, (0, False))[0] != size:
            raise DriverFaultError(_INVALID_VALUE)
        del self.mappings[address]
        libc.reserve_addresses(size, at=address)

    def _cu_mem_set_access(self, address: int, size: int, descriptions: int, count: int) -> None:
        place, device, flags = _ACCESS.unpack(ctypes.string_at(descriptions, _ACCESS.size))
        known = self.mappings.get(address, (0, False))[0] == size
        if not known or count != 1 or place != 1 or device >= self.devices or flags not in (1, 3):
            raise DriverFaultError(_INVALID_VALUE)
        if flags == 1 and not self.knows_read_only:
            raise DriverFaultError(_NOT_SUPPORTED)
        libc.protect(address, size, libc.PROT_READ_WRITE if flags == 3 else mmap.PROT_READ)
        self.mappings[address] = (size, flags == 3)

    def _cu_memset_d8_v2(self, address: int, value: int, size: int) -> None:
        self._need_context()
        for at, (span, writable) in self.mappings.items():
            if writable and at <= address and address + size <= at + span:
                ctypes.memset(address, value, size)
                return
        raise DriverFaultError(_ILLEGAL_ADDRESS)


def fake_cuda_memory(limit_bytes: int | None = None) -> CudaMemory:
    """The code under test over the fake."""
    library = FakeCudaLibrary() if limit_bytes is None else FakeCudaLibrary(limit_bytes=limit_bytes)
    return CudaMemory(CudaDriver(library))


def open_memory(kind: str, limit_bytes: int | None = None) -> SharedMemory:
    """As the holder's own, with the fake in the driver's place."""
    return HostMemory(limit_bytes=limit_bytes) if kind == "host" else fake_cuda_memory(limit_bytes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], open_memory))
