"""Tensors over memory that torch did not allocate: an arena's, or a holder's weights."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

_CPU, _CUDA = 1, 2
_UNSIGNED, _BITS_OF_BYTE, _ONE_LANE = 1, 8, 1


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _View(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("dimensions", ctypes.c_int32),
        ("type", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """`DLManagedTensor` of DLPack: how libraries hand tensors to one another."""

    _fields_ = (("view", _View), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_kept: list[tuple[_Managed, ctypes.Array[ctypes.c_int64]]] = []
"""What torch points to for as long as a tensor lives, which is as long as the process does."""

_make_capsule = ctypes.pythonapi.PyCapsule_New
_make_capsule.restype = ctypes.py_object
_make_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def tensor_over(address: int, size_bytes: int, device: torch.device) -> Tensor:
    """Return `[size_bytes]` of uint8 at an address of a device.

    Nothing is read or checked, so the range may be reserved and only partly mapped, which
    `torch.frombuffer` and the CUDA array interface do not allow. Whoever maps the range must keep it
    for as long as the tensor is used.
    """
    shape = (ctypes.c_int64 * 1)(size_bytes)
    place = _Device(_CUDA, device.index or 0) if device.type == "cuda" else _Device(_CPU, 0)
    kind = _Type(_UNSIGNED, _BITS_OF_BYTE, _ONE_LANE)
    managed = _Managed(_View(address, place, 1, kind, shape, None, 0), None, None)
    _kept.append((managed, shape))
    capsule = _make_capsule(ctypes.addressof(managed), b"dltensor", None)
    tensor: Tensor = from_dlpack(capsule)
    return tensor
