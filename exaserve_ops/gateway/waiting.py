"""Requests that cannot be sent just now: a bounded line, looked at again whenever something changes."""

from __future__ import annotations

import enum
import itertools
from typing import Protocol

_TRIES = 4
"""So many long prompts in a row that cannot go say that the others cannot, either."""


class Queue(enum.IntEnum):
    """Which of a model's lines a request stands in; the lower ones are called first."""

    INTERACTIVE = 0
    LONG = 1
    """Its prompt is long, and as many such are being computed as may be."""
    BATCH = 2


class Waiter(Protocol):
    """A request in the line."""

    model: str

    @property
    def queue(self) -> Queue:
        """Where it stands, should it have to wait now."""

    def wake(self) -> bool:
        """Try again. Returns whether it could go on; then it has left the line."""


_Line = tuple[str, Queue]


class WaitingRoom:
    """First come, first served within a model and a queue."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines: dict[_Line, dict[Waiter, None]] = {}
        self._places: dict[Waiter, _Line] = {}

    def __len__(self) -> int:
        return len(self._places)

    @property
    def is_half_free(self) -> bool:
        """Whether others would find room if what comes now stayed for long."""
        return 2 * len(self._places) < self._limit

    def add(self, waiter: Waiter) -> bool:
        """Let a request wait. Returns false if there are too many already.

        Long and batch requests fill half of the room at most, so that the others always find some.
        """
        if waiter in self._places:
            return True
        queue = waiter.queue
        limit = self._limit if queue is Queue.INTERACTIVE else self._limit // 2
        if len(self._places) >= limit:
            return False
        line = self._places[waiter] = (waiter.model, queue)
        self._lines.setdefault(line, {})[waiter] = None
        return True

    def discard(self, waiter: Waiter) -> None:
        """Take a request out of the line, if it is in it."""
        place = self._places.pop(waiter, None)
        if place is None:
            return
        line = self._lines[place]
        del line[waiter]
        if not line:
            del self._lines[place]

    def holds_interactive(self, model: str) -> bool:
        """Whether somebody waits whom a batch request must not overtake."""
        return (model, Queue.INTERACTIVE) in self._lines

    def waiting_in(self, queue: Queue) -> int:
        """How many wait in this queue, of all models."""
        return sum(len(line) for (_, which), line in self._lines.items() if which is queue)

    def wake_one(self, model: str) -> None:
        """A replica has room for one more request of this model."""
        if not self._lines:
            return
        for queue in (Queue.INTERACTIVE, Queue.BATCH):
            for waiter in list(self._lines.get((model, queue), ())):
                if waiter.wake():
                    return

    def wake_long(self, model: str) -> None:
        """A long prompt of this model is computed: another one may be."""
        # Each try may look at every replica, so few are made: those at the head of the line.
        for waiter in list(itertools.islice(self._lines.get((model, Queue.LONG), ()), _TRIES)):
            if waiter.wake():
                return

    def wake_all(self) -> None:
        """Replicas came, went or were given another chance."""
        for name in sorted(self._lines, key=lambda line: line[1]):
            failures = 0
            for waiter in list(self._lines.get(name, ())):
                failures = 0 if waiter.wake() else failures + 1
                if failures >= _TRIES and name[1] is Queue.LONG:
                    break
