"""The few functions of NVIDIA's driver library that shared device memory needs, through ctypes.

Nothing is loaded before a `CudaDriver` is made, and a machine without a driver is an error with a name.
Numbers and structures are those of `cuda.h`; they are part of the driver's binary interface and do not
change between releases.
"""

from __future__ import annotations

import ctypes
import errno
import uuid
from typing import Any

_LIBRARY = "libcuda.so.1"
_OUT_OF_MEMORY = 2

ATTRIBUTE_VIRTUAL_MEMORY = 102
ATTRIBUTE_POSIX_HANDLES = 103
_PINNED = 1
_POSIX_DESCRIPTOR = 1
_ON_DEVICE = 1
_MINIMUM_GRANULARITY = 0
ACCESS_READ = 1
ACCESS_READ_WRITE = 3

_ADVICE = {
    "CUDA_ERROR_OUT_OF_MEMORY": "the device's memory is used up: give replicas less, or have fewer of them",
    "CUDA_ERROR_NO_DEVICE": "no device is visible: look at nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_INVALID_DEVICE": "there is no such device: look at CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "kernel driver and library differ: restart the machine",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "update the driver",
    "CUDA_ERROR_NOT_SUPPORTED": "this device or driver cannot do it: use kv_pool private, weights private",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "memory was touched that is not leased: replace the process",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "the device's memory is damaged: take it out of service",
    "CUDA_ERROR_DEVICES_UNAVAILABLE": "another process has the device to itself: look at its compute mode",
}


class CudaError(OSError):
    """A call to the driver failed; the text has the error's name and what to do.

    An `OSError`, with ENOMEM where memory is used up, so that whoever shares memory needs not know whose.
    """

    def __init__(self, call: str, code: int, name: str) -> None:
        """Describe error `code` of a call."""
        advice = _ADVICE.get(name, "")
        text = f"{call}: {name}" + (f" ({advice})" if advice else "")
        super().__init__(errno.ENOMEM if code == _OUT_OF_MEMORY else errno.EIO, text)
        self.name = name


class CudaUnavailableError(OSError):
    """This machine has no device whose memory can be shared; the text says why in plain words."""


class Location(ctypes.Structure):
    """`CUmemLocation`."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("gpu_direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class AllocationProperties(ctypes.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("windows", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    )


class AccessDescription(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class Uuid(ctypes.Structure):
    """`CUuuid`."""

    _fields_ = (("value", ctypes.c_ubyte * 16),)


_Integer, _Size, _Address, _Handle = ctypes.c_int, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint64
_Flags, _Context, _Device = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDriverGetVersion": (ctypes.POINTER(_Integer),),
    "cuGetErrorName": (_Integer, ctypes.POINTER(ctypes.c_char_p)),
    "cuDeviceGet": (ctypes.POINTER(_Device), _Integer),
    "cuDeviceGetAttribute": (ctypes.POINTER(_Integer), _Integer, _Device),
    "cuDeviceGetUuid_v2": (ctypes.POINTER(Uuid), _Device),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(_Context), _Device),
    "cuDevicePrimaryCtxRelease_v2": (_Device,),
    "cuCtxSetCurrent": (_Context,),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (ctypes.POINTER(_Size), ctypes.POINTER(_Size)),
    "cuMemGetAllocationGranularity": (
        ctypes.POINTER(_Size),
        ctypes.POINTER(AllocationProperties),
        _Integer,
    ),
    "cuMemCreate": (ctypes.POINTER(_Handle), _Size, ctypes.POINTER(AllocationProperties), _Flags),
    "cuMemRelease": (_Handle,),
    "cuMemExportToShareableHandle": (ctypes.c_void_p, _Handle, _Integer, _Flags),
    "cuMemImportFromShareableHandle": (ctypes.POINTER(_Handle), ctypes.c_void_p, _Integer),
    "cuMemAddressReserve": (ctypes.POINTER(_Address), _Size, _Size, _Address, _Flags),
    "cuMemAddressFree": (_Address, _Size),
    "cuMemMap": (_Address, _Size, _Size, _Handle, _Flags),
    "cuMemUnmap": (_Address, _Size),
    "cuMemSetAccess": (_Address, _Size, ctypes.POINTER(AccessDescription), _Size),
    "cuMemsetD8_v2": (_Address, ctypes.c_ubyte, _Size),
}
"""Arguments of each function that is used; all of them return a `CUresult`."""


class CudaDriver:
    """The driver library, initialised. Its methods raise `CudaError`."""

    def __init__(self, library: Any = None) -> None:  # noqa: ANN401 - a ctypes library, which has no type
        """Load and initialise; `library` stands in for it in tests. Raises `CudaUnavailableError`."""
        self._library = library if library is not None else _load()
        for name, arguments in SIGNATURES.items():
            try:
                function = getattr(self._library, name)
            except AttributeError:
                raise CudaUnavailableError(
                    f"the NVIDIA driver has no {name}: version 11.2 or newer is needed"
                ) from None
            function.argtypes = arguments
            function.restype = _Integer
        self._call("cuInit", 0)

    def version(self) -> int:
        """CUDA version that the driver supports, as 11020 for 11.2."""
        value = _Integer()
        self._call("cuDriverGetVersion", ctypes.byref(value))
        return value.value

    def device(self, ordinal: int) -> int:
        """Return the handle of a visible device."""
        value = _Device()
        self._call("cuDeviceGet", ctypes.byref(value), ordinal)
        return value.value

    def attribute(self, attribute: int, device: int) -> int:
        """Read an attribute of a device."""
        value = _Integer()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        return value.value

    def device_uuid(self, device: int) -> str:
        """Return the UUID of a device, or of its slice, without the tools' prefix."""
        value = Uuid()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(value), device)
        return str(uuid.UUID(bytes=bytes(value.value)))

    def retain_context(self, device: int) -> int:
        """Take hold of the device's primary context, which is torch's as well."""
        value = _Context()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(value), device)
        return value.value or 0

    def release_context(self, device: int) -> None:
        """Undo `retain_context`."""
        self._call("cuDevicePrimaryCtxRelease_v2", device)

    def use_context(self, context: int) -> None:
        """Make a context that of this thread."""
        self._call("cuCtxSetCurrent", context)

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        self._call("cuCtxSynchronize")

    def memory_bytes(self) -> tuple[int, int]:
        """Free and whole memory of the current context's device."""
        free, total = _Size(), _Size()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def granularity(self, device: int) -> int:
        """Bytes that allocations and addresses are multiples of."""
        value = _Size()
        properties = _shareable(device)
        self._call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(value),
            ctypes.byref(properties),
            _MINIMUM_GRANULARITY,
        )
        return value.value

    def create(self, size_bytes: int, device: int) -> int:
        """Allocate memory without an address, which can be shared; return its handle."""
        handle = _Handle()
        properties = _shareable(device)
        self._call("cuMemCreate", ctypes.byref(handle), size_bytes, ctypes.byref(properties), 0)
        return handle.value

    def release(self, handle: int) -> None:
        """Let a handle go; memory is free when nobody has a handle, descriptor or mapping of it."""
        self._call("cuMemRelease", handle)

    def export_descriptor(self, handle: int) -> int:
        """Return a new file descriptor that stands for the memory."""
        descriptor = _Integer()
        self._call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, _POSIX_DESCRIPTOR, 0)
        return descriptor.value

    def import_descriptor(self, descriptor: int) -> int:
        """Return a handle of memory that another process exported; the descriptor may be closed then."""
        handle = _Handle()
        self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), descriptor, _POSIX_DESCRIPTOR)
        return handle.value

    def reserve(self, size_bytes: int) -> int:
        """Reserve addresses that nothing lies at."""
        address = _Address()
        self._call("cuMemAddressReserve", ctypes.byref(address), size_bytes, 0, 0, 0)
        return address.value

    def free_addresses(self, address: int, size_bytes: int) -> None:
        """Undo `reserve`; nothing may be mapped there any more."""
        self._call("cuMemAddressFree", address, size_bytes)

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        """Lay memory at reserved addresses; it is not accessible yet."""
        self._call("cuMemMap", address, size_bytes, 0, handle, 0)

    def unmap(self, address: int, size_bytes: int) -> None:
        """Undo `map`."""
        self._call("cuMemUnmap", address, size_bytes)

    def set_access(self, address: int, size_bytes: int, device: int, access: int) -> None:
        """Let a device read, or read and write, what is mapped there."""
        description = AccessDescription(Location(_ON_DEVICE, device), access)
        self._call("cuMemSetAccess", address, size_bytes, ctypes.byref(description), 1)

    def fill(self, address: int, value: int, size_bytes: int) -> None:
        """Overwrite with one value; `synchronize` waits for it."""
        self._call("cuMemsetD8_v2", address, value, size_bytes)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise CudaError(name, code, self._name_of(code))

    def _name_of(self, code: int) -> str:
        text = ctypes.c_char_p()
        known = self._library.cuGetErrorName(code, ctypes.byref(text)) == 0
        return text.value.decode() if known and text.value else f"CUDA error {code}"


def _shareable(device: int) -> AllocationProperties:
    return AllocationProperties(
        type=_PINNED, handle_types=_POSIX_DESCRIPTOR, location=Location(_ON_DEVICE, device)
    )


def _load() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise CudaUnavailableError(f"there is no NVIDIA driver here: {error}") from error
