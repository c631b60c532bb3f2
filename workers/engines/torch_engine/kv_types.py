"""What keys and values are kept as: the model's own type, or 8-bit floats with a scale for each vector."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KV_DTYPES = ("auto", "model", "fp8_e4m3")
"""Values of the option. `auto` is the model's type: 8-bit floats are less exact, so they are asked for."""

FP8 = torch.float8_e4m3fn
SCALE = torch.bfloat16
"""A vector's scale needs range and not digits: what its rounding adds is far below that of the codes."""
_LARGEST_CODE = 448.0
_SMALLEST_SCALE = 1e-30
"""So that a vector of zeros is divided by something."""
_FIRST_FP8_CAPABILITY = (8, 9)
_HALF_BITS_TO_VALUE = 256.0
"""2 to the difference of the exponents' biases, 15 of float16 and 7 of e4m3."""


class KvTypeError(ValueError):
    """The device cannot keep keys and values like that; the message says why."""


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """What the choice depends on."""

    kind: str
    """`cpu`, `cuda`, ..."""
    capability: tuple[int, int] | None = None
    """Of a CUDA device: major and minor."""
    is_rocm: bool = False


def read_traits(device: torch.device) -> DeviceTraits:
    """Ask torch about a device."""
    if device.type != "cuda":
        return DeviceTraits(device.type)
    return DeviceTraits("cuda", torch.cuda.get_device_capability(device), torch.version.hip is not None)


def choose_kv_dtype(wanted: str, compute: torch.dtype, traits: DeviceTraits) -> torch.dtype:
    """Return what keys and values are kept as. Raises `KvTypeError`."""
    if wanted in {"auto", "model"}:
        return compute
    if wanted != "fp8_e4m3":
        raise KvTypeError(f"kv_dtype is one of {', '.join(KV_DTYPES)}, not {wanted!r}")
    if traits.is_rocm:
        raise KvTypeError("kv_dtype fp8_e4m3: AMD's 8-bit floats are of another kind (fnuz); use model")
    if traits.kind == "cuda" and (traits.capability or (0, 0)) < _FIRST_FP8_CAPABILITY:
        major, minor = traits.capability or (0, 0)
        raise KvTypeError(
            f"kv_dtype fp8_e4m3 needs compute capability 8.9 or newer and this device has {major}.{minor};"
            " use model"
        )
    if traits.kind not in {"cpu", "cuda"}:
        raise KvTypeError(f"kv_dtype fp8_e4m3 is not known to work on {traits.kind}; use model")
    return FP8


def scale_bytes(dtype: torch.dtype) -> int:
    """Bytes that lie beside each vector of a type."""
    return SCALE.itemsize if dtype == FP8 else 0


def type_name(dtype: torch.dtype) -> str:
    """Name of an element type, as layouts spell it."""
    return str(dtype).removeprefix("torch.")


def quantize(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return 8-bit codes `[..., size]` and scales `[...]` of vectors `[..., size]`.

    What comes back differs from a vector by at most a sixteenth of each element, or by a 1000th part of
    the vector's 448th for elements near zero.
    """
    vectors = vectors.float()  # a small scale would be zero in float16
    largest = vectors.abs().amax(dim=-1, keepdim=True)
    scales = (largest / _LARGEST_CODE).clamp_(min=_SMALLEST_SCALE).to(SCALE)
    # The scale may have been rounded down, and a value beyond the largest code would become NaN.
    codes = (vectors / scales.float()).clamp_(-_LARGEST_CODE, _LARGEST_CODE).to(FP8)
    return codes, scales.squeeze(-1)


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the vectors of codes `[..., size]` and scales `[...]`."""
    # A scale of tiny vectors is zero in float16, whose range is the shortest.
    wide = torch.float32 if dtype == torch.float16 else dtype
    if codes.device.type == "cpu":
        # Moved bit by bit into float16, which has the same digits: eight times as fast as torch's own way.
        shifted = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4001)
        values = shifted.view(torch.float16).to(wide)
        return values.mul_((scales.to(wide) * _HALF_BITS_TO_VALUE).unsqueeze(-1)).to(dtype)
    return codes.to(wide).mul_(scales.to(wide).unsqueeze(-1)).to(dtype)
