"""Sizes in words, for reasons that people read. Pure."""

from __future__ import annotations

_STEP = 1024
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_THREE_DIGITS = 1000


def size_text(size_bytes: float) -> str:
    """Three digits and the binary unit that fits: `54.8 GiB`. Exact below a kibibyte."""
    size, unit = float(size_bytes), 0
    while abs(size) >= _THREE_DIGITS and unit < len(_UNITS) - 1:
        size /= _STEP
        unit += 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.3g} {_UNITS[unit]}"
