"""The only place that reads a wall clock. Everything that decides takes `now` as a parameter."""

from __future__ import annotations

import time
from datetime import UTC, datetime


def now() -> datetime:
    """Return the present moment, in UTC."""
    return datetime.now(tz=UTC)  # noqa: TID251 - this is the clock


def unix_seconds() -> float:
    """Seconds since 1970, for values that cross a process boundary."""
    return time.time()  # noqa: TID251 - this is the clock


def from_unix(seconds: float) -> datetime:
    """Return the moment that a count of seconds since 1970 names, in UTC."""
    return datetime.fromtimestamp(seconds, tz=UTC)
