"""Requests that cannot be sent just now: a bounded line, looked at again whenever something changes."""

from __future__ import annotations

from typing import Protocol


class Waiter(Protocol):
    """A request in the line."""

    model: str

    def wake(self) -> bool:
        """Try again. Returns whether it could go on; then it has left the line."""


class WaitingRoom:
    """First come, first served within a model."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines: dict[str, dict[Waiter, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, waiter: Waiter) -> bool:
        """Let a request wait. Returns false if there are too many already."""
        if self._count >= self._limit:
            return False
        line = self._lines.setdefault(waiter.model, {})
        if waiter not in line:
            line[waiter] = None
            self._count += 1
        return True

    def discard(self, waiter: Waiter) -> None:
        """Take a request out of the line, if it is in it."""
        line = self._lines.get(waiter.model)
        if line is None or waiter not in line:
            return
        del line[waiter]
        self._count -= 1
        if not line:
            del self._lines[waiter.model]

    def wake_one(self, model: str) -> None:
        """A replica has room for one more request of this model."""
        for waiter in list(self._lines.get(model, ())):
            if waiter.wake():
                return

    def wake_all(self) -> None:
        """Replicas came, went or were given another chance."""
        for line in list(self._lines.values()):
            for waiter in list(line):
                waiter.wake()
