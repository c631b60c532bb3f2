"""What one gateway says of its last minutes."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from exaserve_ops.gateway.counters import Counters

WINDOW_SECONDS = 300.0
_MARK_SECONDS = 5.0


class _Mark(NamedTuple):
    at_seconds: float
    returning: int
    sticky: int


class RecentTurns:
    """Turns of sessions that came back, in a window that slides in steps of some seconds."""

    def __init__(self, counters: Counters, now: float) -> None:
        self._counters = counters
        self._marks = deque([self._mark(now)])

    def look(self, now: float) -> tuple[int, int, float]:
        """Returning turns, those of them that reached their session's replica, and over how many seconds."""
        newest = self._mark(now)
        if now - self._marks[-1].at_seconds >= _MARK_SECONDS:
            self._marks.append(newest)
        while len(self._marks) > 1 and self._marks[1].at_seconds <= now - WINDOW_SECONDS:
            self._marks.popleft()
        oldest = self._marks[0]
        return newest.returning - oldest.returning, newest.sticky - oldest.sticky, now - oldest.at_seconds

    def _mark(self, now: float) -> _Mark:
        return _Mark(now, self._counters.returning_turns, self._counters.sticky_turns)
