"""A bound on refused attempts, to join or to sign in: per key, in this process, of bounded size."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable


class RefusalBound:
    """Counts refusals of each key (an address, say) over a sliding window.

    Only refusals count: a rack of nodes that joins through one address at once is not held up, while
    somebody who tries tokens is. Tokens carry 256 random bits, so what this bounds is the work they cause.
    """

    def __init__(
        self,
        *,
        limit: int = 20,
        window_seconds: float = 60.0,
        max_keys: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._window_seconds = window_seconds
        self._max_keys = max_keys
        self._clock = clock
        self._refusals: OrderedDict[str, deque[float]] = OrderedDict()
        self._lock = threading.Lock()

    def wait_seconds(self, key: str) -> float:
        """Seconds until this key may try again; zero where it may now."""
        with self._lock:
            times = self._recent(key)
            if len(times) < self._limit:
                return 0.0
            return max(0.0, times[0] + self._window_seconds - self._clock())

    def count_refusal(self, key: str) -> None:
        """Count one refusal. The key unheard of for longest makes room for a new one."""
        with self._lock:
            times = self._recent(key)
            times.append(self._clock())
            self._refusals[key] = times
            self._refusals.move_to_end(key)
            while len(self._refusals) > self._max_keys:
                self._refusals.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._refusals.clear()

    def _recent(self, key: str) -> deque[float]:
        times = self._refusals.get(key)
        if times is None:
            return deque(maxlen=self._limit)
        while times and times[0] <= self._clock() - self._window_seconds:
            times.popleft()
        return times
