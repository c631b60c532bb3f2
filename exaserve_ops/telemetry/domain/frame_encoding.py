"""Writing of value frames: all cells of a fleet at once, since every second has one.

What `frames.quantise` says of one value holds for each of them; the format is described there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from exaserve_ops.telemetry.domain.frames import (
    EMPTY_SLOT,
    FORMAT_VERSION,
    HEADER,
    HIGHEST,
    MAX_FRAME_BYTES,
    METRICS,
    MISSING,
    NOT_A_NUMBER,
    STALE,
)

_SCALES = np.array([metric.scale for metric in METRICS])
NO_VALUES = (None,) * len(METRICS)


class Cell(NamedTuple):
    """One replica in one slot: status index and one value a metric, in the order of `METRICS`."""

    status: int
    values: tuple[float | None, ...]
    stale: bool = False


_EMPTY = Cell(EMPTY_SLOT, NO_VALUES)


def encode_frame(
    cells: Sequence[Cell | None], *, layout_version: int, sequence: int, built_at_seconds: float
) -> bytes:
    """Encode one frame; `None` is an empty slot. Raises `ValueError` over `MAX_FRAME_BYTES`."""
    filled = [_EMPTY if cell is None else cell for cell in cells]
    header = HEADER.pack(
        b"XF", FORMAT_VERSION, len(METRICS), layout_version, sequence, built_at_seconds, len(cells)
    )
    statuses = bytes([cell.status for cell in filled])
    frame = b"".join((header, statuses, b"\0" * (len(cells) % 2), _codes(filled).tobytes()))
    if len(frame) > MAX_FRAME_BYTES:
        raise ValueError(f"frame of {len(frame)} bytes is over {MAX_FRAME_BYTES}")
    return frame


def _codes(cells: Sequence[Cell]) -> npt.NDArray[np.uint16]:
    """Codes of all metrics, an array of all cells for each, little-endian."""
    values = [cell.values for cell in cells]
    # `None` becomes NaN here, and is told from a real one below: there are few of those.
    numbers = np.array(values, dtype=np.float64).reshape(len(cells), len(METRICS)).T
    with np.errstate(over="ignore"):  # beyond the range is its edge
        scaled = np.rint(np.clip(numbers / _SCALES[:, np.newaxis], 0, HIGHEST))
    unknown = np.isnan(numbers)
    codes = np.where(unknown, MISSING, scaled).astype("<u2")
    for metric, index in np.argwhere(unknown):
        if values[index][metric] is not None:
            codes[metric, index], unknown[metric, index] = NOT_A_NUMBER, False
    stale = np.array([cell.stale for cell in cells], dtype=bool)
    codes[stale[np.newaxis, :] & ~unknown] = STALE
    return codes
