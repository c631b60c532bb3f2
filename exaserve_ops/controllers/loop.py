"""The shapes that every controller has: a loop that never dies, and a queue of keys.

Reconcile by key, never by event: a key that rings ten times is worked on once, one that fails comes
back after a growing pause, and one that is being worked on is not worked on by a second thread.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from django.db import close_old_connections, connections

_log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.2
LONGEST_BACKOFF_SECONDS = 30.0
LONGEST_LOOP_BACKOFF_SECONDS = 5.0
"""Of a whole loop: stores come back, and then nothing should wait for us."""


@dataclass(slots=True)
class LoopHealth:
    """How a loop fares, for the status page and the watchdog."""

    name: str
    last_success_seconds: float = field(default_factory=time.monotonic)
    failures: int = 0
    consecutive_failures: int = 0


def run_loop(
    health: LoopHealth,
    step: Callable[[], None],
    stop: threading.Event,
    *,
    pause_seconds: float,
    longest_backoff_seconds: float = LONGEST_LOOP_BACKOFF_SECONDS,
) -> None:
    """Call `step` until told to stop. An exception is logged, counted and followed by a pause."""
    while not stop.is_set():
        try:
            close_old_connections()
            step()
        except Exception:  # noqa: BLE001 - a loop's top: whatever happened, the loop goes on
            health.failures += 1
            health.consecutive_failures += 1
            _log_failure(health)
            connections.close_all()
            stop.wait(min(longest_backoff_seconds, backoff_seconds(health.consecutive_failures)))
            continue
        health.consecutive_failures = 0
        health.last_success_seconds = time.monotonic()
        stop.wait(pause_seconds)
    connections.close_all()


def backoff_seconds(failures: int) -> float:
    """Pause after so many failures in a row: doubles, up to half a minute."""
    return float(min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2 ** min(failures - 1, 16)))


def _log_failure(health: LoopHealth) -> None:
    """The first failure in a row with its traceback, later ones as a line: stores stay away for long."""
    if health.consecutive_failures == 1:
        _log.exception("loop=%s event=failed", health.name)
    else:
        _log.warning("loop=%s event=failed_again count=%d", health.name, health.consecutive_failures)


class KeyQueue:
    """Keys to reconcile. Thread-safe; each key is in it at most once, with the earliest due time.

    Keys of `urgent` kinds go before all others.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, urgent: frozenset[str] = frozenset()
    ) -> None:
        self._clock = clock
        self._urgent = urgent
        self._condition = threading.Condition()
        self._due: dict[tuple[str, str], float] = {}
        self._heap: list[tuple[float, tuple[str, str]]] = []
        self._urgent_heap: list[tuple[float, tuple[str, str]]] = []
        self._busy: set[tuple[str, str]] = set()
        self._failures: dict[tuple[str, str], int] = {}

    def add(self, kind: str, key: str, *, after_seconds: float = 0.0) -> None:
        """Have a key reconciled, now or after a while; an earlier due time wins."""
        entry = (kind, key)
        due = self._clock() + after_seconds
        with self._condition:
            if self._due.get(entry, float("inf")) <= due:
                return
            self._due[entry] = due
            heapq.heappush(self._heap_of(entry), (due, entry))
            self._condition.notify_all()  # the one that wakes may not be the one for it

    def take(self, timeout_seconds: float, *, urgent_only: bool = False) -> tuple[str, str] | None:
        """Return a due key that nobody works on; `None` after the time-out."""
        heaps = (self._urgent_heap,) if urgent_only else (self._urgent_heap, self._heap)
        deadline = self._clock() + timeout_seconds
        with self._condition:
            while True:
                entry = next(filter(None, map(self._pop_due, heaps)), None)
                if entry is not None:
                    self._busy.add(entry)
                    return entry
                next_due = min((heap[0][0] for heap in heaps if heap), default=float("inf"))
                wait = min(deadline, next_due) - self._clock()
                if self._clock() >= deadline:
                    return None
                self._condition.wait(max(0.0, wait))

    def done(self, kind: str, key: str, *, failed: bool = False) -> None:
        """Give a key back; a failed one comes again after its back-off."""
        entry = (kind, key)
        with self._condition:
            self._busy.discard(entry)
            if failed:
                self._failures[entry] = self._failures.get(entry, 0) + 1
            else:
                self._failures.pop(entry, None)
            failures = self._failures.get(entry, 0)
            if entry in self._due:  # rang while it was worked on: its heap entry may have been passed
                heapq.heappush(self._heap_of(entry), (self._due[entry], entry))
            self._condition.notify_all()  # the one that wakes may not be the one for it
        if failed:
            self.add(kind, key, after_seconds=backoff_seconds(failures))

    def __len__(self) -> int:
        """How many keys wait."""
        return len(self._due)

    def _heap_of(self, entry: tuple[str, str]) -> list[tuple[float, tuple[str, str]]]:
        return self._urgent_heap if entry[0] in self._urgent else self._heap

    def _pop_due(self, heap: list[tuple[float, tuple[str, str]]]) -> tuple[str, str] | None:
        while heap and heap[0][0] <= self._clock():
            due, entry = heapq.heappop(heap)
            if self._due.get(entry) != due or entry in self._busy:
                continue
            del self._due[entry]
            return entry
        return None
