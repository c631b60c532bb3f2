"""Requests that cannot be sent just now: a bounded line, looked at again whenever something changes."""

from __future__ import annotations

from typing import Protocol


class Waiter(Protocol):
    """A request in the line."""

    model: str

    @property
    def is_batch(self) -> bool:
        """Whether it waits behind those that are not."""

    def wake(self) -> bool:
        """Try again. Returns whether it could go on; then it has left the line."""


_Line = tuple[str, bool]


class WaitingRoom:
    """First come, first served within a model; batch requests after all others."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines: dict[_Line, dict[Waiter, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, waiter: Waiter) -> bool:
        """Let a request wait. Returns false if there are too many already.

        Batch requests fill half of the room at most, so that the others always find some.
        """
        line = self._lines.setdefault((waiter.model, waiter.is_batch), {})
        if waiter in line:
            return True
        limit = self._limit // 2 if waiter.is_batch else self._limit
        if self._count >= limit:
            self._drop_if_empty((waiter.model, waiter.is_batch))
            return False
        line[waiter] = None
        self._count += 1
        return True

    def discard(self, waiter: Waiter) -> None:
        """Take a request out of the line, if it is in it."""
        name = (waiter.model, waiter.is_batch)
        line = self._lines.get(name)
        if line is None or waiter not in line:
            return
        del line[waiter]
        self._count -= 1
        self._drop_if_empty(name)

    def holds_interactive(self, model: str) -> bool:
        """Whether somebody waits whom a batch request must not overtake."""
        return (model, False) in self._lines

    def wake_one(self, model: str) -> None:
        """A replica has room for one more request of this model."""
        for is_batch in (False, True):
            for waiter in list(self._lines.get((model, is_batch), ())):
                if waiter.wake():
                    return

    def wake_all(self) -> None:
        """Replicas came, went or were given another chance."""
        for name in sorted(self._lines, key=lambda line: line[1]):
            for waiter in list(self._lines.get(name, ())):
                waiter.wake()

    def _drop_if_empty(self, name: _Line) -> None:
        if not self._lines.get(name):
            self._lines.pop(name, None)
