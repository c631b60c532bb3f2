"""Value frames of the live heatmaps: small, binary, built once for all viewers.

A *layout* (JSON, sent when it changes) says which replica is in which cell; a *frame* carries the
values of all cells for all metrics, quantised to 16 bits. Missing, stale and NaN have codes of their
own, so none of them can be mistaken for a zero on the way to a cell's colour.

Frame, little-endian::

    bytes  0-1   "XF"
    byte   2     format version (1)
    byte   3     number of metrics M
    bytes  4-7   layout version, uint32
    bytes  8-11  sequence, uint32
    bytes 12-19  built at, float64, Unix seconds
    bytes 20-23  number of cells C = rows x columns, uint32
    then         C status bytes (index into the layout's `statuses`, 255 for an empty slot),
                 one pad byte if C is odd,
                 M arrays of C uint16 codes; value = code x the metric's `scale`
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

FORMAT_VERSION = 1
MISSING = 0xFFFF
STALE = 0xFFFE
NOT_A_NUMBER = 0xFFFD
HIGHEST = 0xFFFC
EMPTY_SLOT = 255
MAX_FRAME_BYTES = 256 * 1024

HEADER = struct.Struct("<2sBBIIdI")


@dataclass(frozen=True, slots=True)
class Metric:
    """One quantity of the heatmaps."""

    key: str
    label: str
    unit: str
    """`ratio`, `seconds`, `requests` or `tokens_per_second`."""
    scale: float
    low: float
    high: float
    """Fixed range of the colour scale, so that colours mean the same tomorrow."""
    threshold: float | None = None
    """Objective marked on the legend."""


LOAD_METRICS: tuple[Metric, ...] = (
    Metric("kv_used_ratio", "KV pool used", "ratio", 0.0001, 0.0, 1.0, 0.9),
    Metric("ttft_p95_seconds", "TTFT p95", "seconds", 0.001, 0.0, 2.0, 1.0),
    Metric("requests_waiting", "Queue", "requests", 1.0, 0.0, 16.0),
    Metric("itl_p95_seconds", "ITL p95", "seconds", 0.0001, 0.0, 0.2, 0.1),
    Metric("prefix_hit_ratio", "Prefix hit rate", "ratio", 0.0001, 0.0, 1.0),
    Metric("generation_tokens_per_second", "Tokens/s", "tokens_per_second", 1.0, 0.0, 200.0),
)
"""What replicas report of themselves, under the names of their load's fields."""

METRICS: tuple[Metric, ...] = (
    *LOAD_METRICS,
    Metric("routing_weight", "Routing weight", "ratio", 0.0001, 0.0, 1.0),
)
"""All, in the order of the frame; the last one is the control plane's own judgement."""


def quantise(value: float | None, scale: float, *, stale: bool = False) -> int:
    """16-bit code of a value; values beyond the range end at its edges, never wrap."""
    if value is None:
        return MISSING
    if stale:
        return STALE
    if math.isnan(value):
        return NOT_A_NUMBER
    return round(min(float(HIGHEST), max(0.0, value / scale)))


@dataclass(frozen=True, slots=True)
class DecodedFrame:
    """A frame read back; `codes[m][c]` is the raw code of metric m in cell c."""

    layout_version: int
    sequence: int
    built_at_seconds: float
    statuses: bytes
    codes: tuple[tuple[int, ...], ...]

    def value(self, metric: int, cell: int) -> float | None:
        """The value in a cell; `None` for missing or stale, NaN for NaN."""
        code = self.codes[metric][cell]
        if code in {MISSING, STALE}:
            return None
        return math.nan if code == NOT_A_NUMBER else code * METRICS[metric].scale


def frame_numbers(frame: bytes) -> tuple[int, int]:
    """Layout version and sequence, without reading the cells. Raises `ValueError` for other bytes."""
    try:
        magic, version, _, layout, sequence, _, _ = HEADER.unpack_from(frame)
    except struct.error as error:
        raise ValueError("not a frame: too short") from error
    if magic != b"XF" or version != FORMAT_VERSION:
        raise ValueError("not a frame of this format version")
    return layout, sequence


def decode_frame(frame: bytes) -> DecodedFrame:
    """Read a frame. Raises `ValueError` for other bytes."""
    try:
        magic, version, metrics, layout, sequence, built_at, count = HEADER.unpack_from(frame)
    except struct.error as error:
        raise ValueError("not a frame: too short") from error
    if magic != b"XF" or version != FORMAT_VERSION:
        raise ValueError("not a frame of this format version")
    start = HEADER.size + count + count % 2
    arrays = struct.iter_unpack(f"<{count}H", frame[start:]) if count else [()] * metrics
    return DecodedFrame(
        layout_version=layout,
        sequence=sequence,
        built_at_seconds=built_at,
        statuses=frame[HEADER.size : HEADER.size + count],
        codes=tuple(arrays),
    )
