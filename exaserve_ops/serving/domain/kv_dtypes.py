"""Element types of weights and of the KV cache, and what a number takes in each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

AUTO = "auto"

_BYTES: Mapping[str, Fraction] = {
    "float32": Fraction(4),
    "float16": Fraction(2),
    "bfloat16": Fraction(2),
    "int8": Fraction(1),
    "fp8": Fraction(1),
    # llama.cpp's: 32 numbers and a 2-byte scale.
    "q8_0": Fraction(34, 32),
    # 16 numbers of half a byte and a scale of one byte.
    "nvfp4": Fraction(9, 16),
    "fp4": Fraction(9, 16),
}
_SAME = {
    "float": "float32",
    "fp32": "float32",
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "fp8_inc": "fp8",
    "fp8_e4m3fn": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "fp4_e2m1": "fp4",
}


_BY_BITS = {("8", "int"): "int8", ("8", "float"): "fp8", ("4", "float"): "nvfp4"}
"""`num_bits` and `type` of a compressed-tensors scheme."""


@dataclass(frozen=True, slots=True)
class ElementType:
    """A type of numbers, by one of its names."""

    name: str
    bytes_each: Fraction
    why: str = ""
    """How it was chosen, for people."""


BFLOAT16 = ElementType("bfloat16", _BYTES["bfloat16"])
FLOAT32 = ElementType("float32", _BYTES["float32"])


def element_type(name: str, *, why: str = "") -> ElementType | None:
    """Look up a type by any of its names; `None` for one that is not known."""
    plain = name.strip().lower().removeprefix("torch.")
    each = _BYTES.get(_SAME.get(plain, plain))
    return None if each is None else ElementType(plain, each, why)


def checkpoint_dtype(stated: object) -> str:
    """Element type as config.json states it (`dtype`, formerly `torch_dtype`); empty if it does not."""
    return stated.removeprefix("torch.") if isinstance(stated, str) else ""


def checkpoint_kv_dtype(quantization: object) -> str:
    """Type of the cache that a quantised checkpoint brings scales for; empty without.

    Known spellings: compressed-tensors' `kv_cache_scheme`, ModelOpt's `kv_cache_quant_algo`, Quark's
    `kv_cache_quant_config`. Weights that are quantised say nothing about the cache.
    """
    if not isinstance(quantization, Mapping):
        return ""
    for name in ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quant_config"):
        scheme = quantization.get(name)
        if scheme:
            return _scheme_dtype(scheme)
    return ""


def _scheme_dtype(scheme: object) -> str:
    """A scheme that is not understood counts as none: the model's own type takes more."""
    if isinstance(scheme, str):
        known = element_type(scheme)
        return known.name if known else ""
    if not isinstance(scheme, Mapping):
        return ""
    told = _BY_BITS.get((str(scheme.get("num_bits")), str(scheme.get("type"))))
    if told is not None:
        return told
    return "fp8" if "fp8" in str(scheme.get("dtype", scheme)).lower() else ""
