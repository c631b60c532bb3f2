"""A bound on refused attempts to join: per address, in this process, of bounded size."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable


class RefusalBound:
    """Counts refusals of each address over a sliding window.

    Only refusals count: a rack of nodes that joins through one address at once is not held up, while
    somebody who tries tokens is. Tokens carry 256 random bits, so what this bounds is the work they cause.
    """

    def __init__(
        self,
        *,
        limit: int = 20,
        window_seconds: float = 60.0,
        max_addresses: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._window_seconds = window_seconds
        self._max_addresses = max_addresses
        self._clock = clock
        self._refusals: OrderedDict[str, deque[float]] = OrderedDict()
        self._lock = threading.Lock()

    def wait_seconds(self, address: str) -> float:
        """Seconds until this address may try again; zero where it may now."""
        with self._lock:
            times = self._recent(address)
            if len(times) < self._limit:
                return 0.0
            return max(0.0, times[0] + self._window_seconds - self._clock())

    def count_refusal(self, address: str) -> None:
        """Count one refusal. The address unheard of for longest makes room for a new one."""
        with self._lock:
            times = self._recent(address)
            times.append(self._clock())
            self._refusals[address] = times
            self._refusals.move_to_end(address)
            while len(self._refusals) > self._max_addresses:
                self._refusals.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._refusals.clear()

    def _recent(self, address: str) -> deque[float]:
        times = self._refusals.get(address)
        if times is None:
            return deque(maxlen=self._limit)
        while times and times[0] <= self._clock() - self._window_seconds:
            times.popleft()
        return times
