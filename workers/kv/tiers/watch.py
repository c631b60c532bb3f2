"""Watches what comes in and what leaves again, so that swapping stops when it is in vain."""

from __future__ import annotations

from collections import OrderedDict, deque
from itertools import takewhile

from workers.kv.tiers.heat import Heat
from workers.kv.tiers.thrash import SwapWindow, ThrashRules, ThrashState, judge_thrash


class SwapWatch:
    """What was swapped in within the window: it is hot for so long, and counted if it leaves again."""

    def __init__(self, heat: Heat, rules: ThrashRules) -> None:
        """Begin with a window in which nothing happened."""
        self._heat = heat
        self._rules = rules
        self._came_in: OrderedDict[bytes, float] = OrderedDict()
        """Content that came in and is still there, and when."""
        self._arrivals: deque[float] = deque()
        self._left_again: deque[float] = deque()
        self.state = ThrashState()

    def note_in(self, digest: bytes, *, now: float) -> None:
        """Content was swapped in."""
        self._arrivals.append(now)
        if digest not in self._came_in:
            self._heat.warm((digest,))
        self._came_in[digest] = now
        self._came_in.move_to_end(digest)

    def note_loss(self, digest: bytes, *, now: float) -> None:
        """Content had to leave where it is computed with."""
        if self._came_in.pop(digest, None) is not None:
            self._left_again.append(now)
            self._heat.cool((digest,), coldest=False)

    def judge(self, *, now: float) -> None:
        """Let the window move on, and decide whether swapping goes on."""
        horizon = now - self._rules.window_seconds
        old = list(takewhile(lambda digest: self._came_in[digest] < horizon, self._came_in))
        for digest in old:
            del self._came_in[digest]
        self._heat.cool(old, coldest=False)
        for times in (self._arrivals, self._left_again):
            while times and times[0] < horizon:
                times.popleft()
        window = SwapWindow(len(self._arrivals), len(self._left_again))
        self.state = judge_thrash(self.state, window, self._rules, now=now)
