"""What sending KV costs, from moves that were measured: seconds for the talk, and bytes a second. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

FEWEST_MOVES = 3
"""Fewer say nothing of a line."""
_SPREAD = 4
"""Sizes must differ by so much before what depends on them can be told from what does not."""


@dataclass(frozen=True, slots=True)
class Sending:
    """How long sending takes: `talk_seconds + bytes / bytes_per_second`."""

    bytes_per_second: float | None = None
    """`None`: not measured yet."""
    talk_seconds: float = 0.0
    """Of a move whatever its size: connections, and waiting for two busy engines to answer."""

    def seconds(self, kv_bytes: float) -> float | None:
        """How long so many bytes take; `None` where that was not measured yet."""
        return self.talk_seconds + kv_bytes / self.bytes_per_second if self.bytes_per_second else None


UNMEASURED = Sending()


def fit_sending(moves: Sequence[tuple[int, float]]) -> Sending:
    """Fit a line through bytes and seconds of single moves by least squares.

    Where their sizes are too much alike, or larger ones did not take longer, all of the time is put down to
    the bytes: that errs towards moving less. Few moves say nothing.
    """
    if len(moves) < FEWEST_MOVES:
        return UNMEASURED
    sizes, took = [float(size) for size, _ in moves], [seconds for _, seconds in moves]
    plain = Sending(sum(sizes) / max(sum(took), 1e-9))
    if max(sizes) < _SPREAD * max(min(sizes), 1.0):
        return plain
    mean_size, mean_took = fmean(sizes), fmean(took)
    variance = sum((size - mean_size) ** 2 for size in sizes)
    slope = sum((s - mean_size) * (t - mean_took) for s, t in zip(sizes, took, strict=True)) / variance
    talk = mean_took - slope * mean_size
    if slope <= 0 or talk <= 0:
        return plain
    return Sending(1 / slope, talk)
