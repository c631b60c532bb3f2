"""Caps on bytes per second that share fairly, and rates as measured."""

from __future__ import annotations

import threading
import time
from collections import deque

SLICE_BYTES = 256 * 1024
"""Under a cap, nobody takes more than this at a time."""
_BURST_SECONDS = 0.05
_SHORTEST_SECONDS = 0.1


class RateCap:
    """A bucket of bytes. Whoever asks reserves its time at once, so streams go in the order they asked."""

    def __init__(self, bytes_per_second: float = 0.0) -> None:
        """Cap at a rate; 0 caps nothing."""
        self._rate = bytes_per_second
        self._ready_at = 0.0
        self._lock = threading.Lock()

    @property
    def caps(self) -> bool:
        """Whether there is a limit."""
        return self._rate > 0

    def set(self, bytes_per_second: float) -> None:
        """Change the rate, from the next slice on."""
        self._rate = bytes_per_second

    def take(self, count: int) -> float:
        """Wait until so many bytes may go; at most a slice at a time. Returns the seconds waited."""
        with self._lock:
            rate = self._rate
            if rate <= 0:
                return 0.0
            now = time.monotonic()
            self._ready_at = max(self._ready_at, now - _BURST_SECONDS)
            wait = self._ready_at - now
            self._ready_at += count / rate
        if wait <= 0:
            return 0.0
        time.sleep(wait)
        return wait


class RateMeter:
    """Bytes per second over the last few seconds."""

    def __init__(self, window_seconds: float = 5.0) -> None:
        self._window = window_seconds
        self._marks: deque[tuple[float, int]] = deque()
        self.total_bytes = 0

    def add(self, count: int) -> None:
        """Count bytes that went. One thread only."""
        self.total_bytes += count
        now = time.monotonic()
        if not self._marks or now - self._marks[-1][0] >= self._window / 50:
            self._marks.append((now, self.total_bytes))
        while len(self._marks) > 2 and now - self._marks[0][0] > self._window:  # noqa: PLR2004 - two ends
            self._marks.popleft()

    def rate(self) -> float:
        """Bytes per second."""
        marks, now = tuple(self._marks), time.monotonic()
        recent = [mark for mark in marks if now - mark[0] <= self._window]
        if len(recent) < 2:  # noqa: PLR2004 - a rate needs two ends
            return 0.0
        began, before = recent[0]
        return (self.total_bytes - before) / max(now - began, _SHORTEST_SECONDS)
