"""Weights in the layout that oneDNN multiplies fastest, and that layout as bytes of a file.

oneDNN multiplies a weight that it has packed beforehand two to three times as fast as torch's own
`linear` does a plain one, from one row to hundreds, in float32 and in bfloat16 alike. Which layout it
takes depends on its version and on the machine; it describes each in a few hundred bytes. Packed bytes
and their description become a weight again through the C interface that torch has for the programs its
compiler makes. A torch without it, or one in which it does something else, is told by trying.
"""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_OPERATORS = torch.ops.mkldnn
"""What torch's compiler calls for a frozen `linear`; the underscores are part of the operators' names."""
_MULTIPLY = _OPERATORS._linear_pointwise.default  # noqa: SLF001 - as above
_PACK = _OPERATORS._reorder_linear_weight.default  # noqa: SLF001 - as above
_LAYOUT = _OPERATORS._get_mkldnn_serialized_md.default  # noqa: SLF001 - as above
_SIZE = _OPERATORS._nbytes.default  # noqa: SLF001 - as above

_HAS_ONEDNN: bool = torch._C._has_mkldnn  # noqa: SLF001 - what torch.backends.mkldnn reads, untyped
_ALIGNMENT_BYTES = 64
_CPU_DEVICE = 0
_PROBE_SHAPE = (48, 32)
_CPU_FACTS = (b"model name", b"flags", b"Features", b"CPU part")
"""Lines of /proc/cpuinfo that say what a processor can do, of x86 and of Arm."""
_LAYOUT_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")


class PackingError(ValueError):
    """Bytes do not make a packed weight here; the message says why."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One weight `[outputs, inputs]` in oneDNN's layout."""

    tensor: Tensor
    """Opaque to all but oneDNN."""
    memory: Tensor | None = None
    """Bytes that the tensor lies in, if they are not its own: kept for as long as it is."""

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        size: int = _SIZE(self.tensor)
        return size

    @property
    def layout(self) -> bytes:
        """OneDNN's description of how the bytes are to be read."""
        return bytes(_LAYOUT(self.tensor).tolist())

    @property
    def content(self) -> memoryview:
        """The bytes themselves; valid while the weight is."""
        return memoryview((ctypes.c_ubyte * self.nbytes).from_address(_OPERATORS.data_ptr(self.tensor)))


def onednn_multiplies(weight: Tensor) -> bool:
    """Whether this machine's oneDNN takes such a weight."""
    return weight.device.type == "cpu" and onednn_takes(weight.dtype)


def onednn_takes(dtype: torch.dtype) -> bool:
    """Whether this machine's oneDNN multiplies this type."""
    if not _HAS_ONEDNN:
        return False
    if dtype == torch.bfloat16:
        return bool(_OPERATORS._is_mkldnn_bf16_supported())  # noqa: SLF001 - as above
    return dtype == torch.float32


def pack(weight: Tensor) -> PackedWeight:
    """Copy a weight into oneDNN's layout. Only where `onednn_multiplies`."""
    return PackedWeight(_PACK(weight, None))


@functools.lru_cache(maxsize=32)
def describe_packed(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, int]:
    """Return layout and size in bytes of any weight of this shape. Only where `onednn_takes`."""
    packed = pack(torch.empty(shape, dtype=dtype))
    return packed.layout, packed.nbytes


def unpack_from(memory: Tensor, shape: tuple[int, ...], dtype: torch.dtype, layout: bytes) -> PackedWeight:
    """Make a weight of packed bytes without copying them. Raises `PackingError`.

    `memory` holds them as `uint8`, from its first byte on. They must have been packed by a process with
    the same `layout_key`.
    """
    if memory.data_ptr() % _ALIGNMENT_BYTES:
        raise PackingError(f"packed bytes must begin at a multiple of {_ALIGNMENT_BYTES}")
    tensor = _interface().wrap(memory.data_ptr(), shape, dtype, layout)
    packed = PackedWeight(tensor, memory)
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or packed.nbytes > memory.numel():
        raise PackingError(f"the layout is not that of a {dtype} weight of {shape}")
    return packed


@functools.cache
def packs_to_bytes(dtype: torch.dtype) -> str:
    """Try the way to bytes and back with a small weight; returns what is wrong, or nothing."""
    if not onednn_takes(dtype):
        return f"oneDNN does not multiply {dtype} here"
    weight = torch.arange(_PROBE_SHAPE[0] * _PROBE_SHAPE[1]).view(_PROBE_SHAPE).to(dtype)
    try:
        packed = pack(weight)
        memory = torch.zeros(packed.nbytes + _ALIGNMENT_BYTES, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % _ALIGNMENT_BYTES :]
        memory[: packed.nbytes] = torch.frombuffer(packed.content, dtype=torch.uint8)
        again = unpack_from(memory, _PROBE_SHAPE, dtype, packed.layout)
        # Without a product: oneDNN would keep the kernels of it for as long as this process lives.
        same = again.layout == packed.layout and bytes(again.content) == bytes(packed.content)
    except (PackingError, AttributeError, RuntimeError) as error:
        return f"torch {torch.__version__} does not take packed weights from bytes: {error}"
    return "" if same else f"torch {torch.__version__} reads packed bytes otherwise than it wrote them"


def layout_key(dtype: torch.dtype) -> str:
    """Name all that the layout of packed weights depends on: software, processor, settings.

    Only where `packs_to_bytes`. Processes with the same key read one another's bytes.
    """
    settings = [(name, os.environ.get(name, "")) for name in _LAYOUT_VARIABLES]
    probe = describe_packed(_PROBE_SHAPE, dtype)
    return repr((torch.__version__, torch.__config__.show(), _processor(), settings, probe))


def multiply(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `rows @ weight.T + bias` for a weight that oneDNN takes, plain or the tensor of a packed one."""
    result: Tensor = _MULTIPLY(rows, weight, bias, "none", [], "")
    return result


@functools.cache
def _processor() -> bytes:
    """What the first processor is called and can do."""
    try:
        text = Path("/proc/cpuinfo").read_bytes()
    except OSError:
        return torch.backends.cpu.get_cpu_capability().encode()
    first = text.partition(b"\n\n")[0].splitlines()
    return b"\n".join(line for line in first if line.startswith(_CPU_FACTS))


class _CInterface:
    """The few functions of torch's C interface that are needed."""

    def __init__(self) -> None:
        """Find them. Raises `PackingError`."""
        path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
        try:
            library = ctypes.CDLL(str(path))
            self._create = library.aoti_torch_create_tensor_from_blob_v2
            self._layout = int(library.aoti_torch_layout__mkldnn())
            self._types = {
                torch.float32: int(library.aoti_torch_dtype_float32()),
                torch.bfloat16: int(library.aoti_torch_dtype_bfloat16()),
            }
            self._steal = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr  # noqa: SLF001 - the handle's only way back
        except (OSError, AttributeError) as error:
            raise PackingError(f"an interface is missing: {error}") from error
        int64, int32, pointer = ctypes.c_int64, ctypes.c_int32, ctypes.POINTER
        self._create.restype = int32
        self._create.argtypes = [
            *(ctypes.c_void_p, int64, pointer(int64), pointer(int64), int64),
            *(int32, int32, int32, pointer(ctypes.c_void_p)),
            *(int32, ctypes.c_char_p, int64),
        ]
        self._capsule = ctypes.pythonapi.PyCapsule_New
        self._capsule.restype = ctypes.py_object
        self._capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

    def wrap(self, address: int, shape: tuple[int, ...], dtype: torch.dtype, layout: bytes) -> Tensor:
        """Make an opaque tensor over packed bytes, which stay the caller's."""
        if dtype not in self._types:
            raise PackingError(f"no packed weights of {dtype}")
        sizes = (ctypes.c_int64 * len(shape))(*shape)
        strides = (ctypes.c_int64 * len(shape))()
        handle = ctypes.c_void_p()
        failed = self._create(
            address,
            len(shape),
            sizes,
            strides,
            0,
            self._types[dtype],
            _CPU_DEVICE,
            0,
            ctypes.byref(handle),
            self._layout,
            layout,
            len(layout),
        )
        if failed or not handle.value:
            raise PackingError("torch refuses the layout")
        tensor: Tensor = self._steal(self._capsule(handle, None, None))
        return tensor


@functools.cache
def _interface() -> _CInterface:
    return _CInterface()
