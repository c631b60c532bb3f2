"""Answers that take long to find are kept for a while: many viewers cost no more than one."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, TypeVar

from exaserve_ops.lib import clock

QUICK_SECONDS = 0.1
"""An answer that took less is found anew each time."""
REST_FACTOR = 20.0
"""Others are kept for so many times what they took: they cost a twentieth of a core at most."""
MOST_SECONDS = 60.0
MOST_ANSWERS = 32

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kept(Generic[T]):
    """An answer, and when it was found."""

    answer: T
    found_at: datetime
    good_until_seconds: float
    """On the monotonic clock."""


class KeptAnswers(Generic[T]):
    """The newest answer to each question, found by one thread at a time."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, Kept[T]] = OrderedDict()
        self._finding: dict[Hashable, threading.Lock] = {}

    def get(self, question: Hashable, find: Callable[[], T]) -> Kept[T]:
        """Return the kept answer, or find one. What `find` raises is passed on and not kept."""
        with self._lock:
            turn = self._finding.setdefault(question, threading.Lock())
        with turn:
            known = self._kept.get(question)
            if known is not None and self._monotonic() < known.good_until_seconds:
                return known
            try:
                return self._find(question, find)
            finally:
                with self._lock:
                    self._finding.pop(question, None)

    def _find(self, question: Hashable, find: Callable[[], T]) -> Kept[T]:
        began, at = self._monotonic(), clock.now()
        answer = find()
        took = self._monotonic() - began
        rest = min(MOST_SECONDS, took * REST_FACTOR) if took >= QUICK_SECONDS else 0.0
        found = Kept(answer, at, began + took + rest)
        with self._lock:
            self._kept[question] = found
            self._kept.move_to_end(question)
            while len(self._kept) > MOST_ANSWERS:
                self._kept.popitem(last=False)
        return found
