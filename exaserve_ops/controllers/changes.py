"""What is made of the record, read again only where the record changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from exaserve_ops.audit.selectors import newest_event_ids

READ_ANYWAY_SECONDS = 30.0
"""What changes without an event, such as a label, shows this late."""

COSTLY_SECONDS = 0.1
SPACING_FACTOR = 9.0
"""While changes never end, as when thousands start, costly reading takes a tenth of the time at most."""

_T = TypeVar("_T")


class Remembered(Generic[_T]):
    """The answer to a costly query. Every change of a status leaves an event, so one look tells its age."""

    def __init__(self, read: Callable[[], _T], *, read_anyway_seconds: float = READ_ANYWAY_SECONDS) -> None:
        self._read = read
        self._read_anyway_seconds = read_anyway_seconds
        self._answer: tuple[tuple[int, ...], float, _T] | None = None
        self._not_before = -1e9

    def get(self) -> _T:
        """The answer as of now; of a moment ago where it is costly and changes all the time."""
        newest, now = newest_event_ids(), time.monotonic()
        if self._answer is not None:
            seen, read_at, answer = self._answer
            is_current = newest == seen and now - read_at < self._read_anyway_seconds
            if is_current or now < self._not_before:
                return answer
        answer = self._read()
        self._answer = newest, now, answer  # from before the reading: a change during it is read again
        ended = time.monotonic()
        if ended - now >= COSTLY_SECONDS:
            self._not_before = ended + SPACING_FACTOR * (ended - now)
        return answer
