"""What is written in one turn of the event loop leaves at its end, all of it together.

A process that sleeps on another core is woken by the first packet that it gets, which costs the sender
as much as all the rest of sending. With engines or clients on the same machine, packets in a row wake
each of them once instead of once each: that saved 14% of the CPU time of a request, 32 at once. What
goes to one connection in one turn also leaves by one call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sized
from typing import Protocol

FEW_REQUESTS = 4
"""With fewer requests open nothing is shared, and waiting is only time lost."""


class Outlet(Protocol):
    """A connection that has something to send."""

    def flush(self) -> None:
        """Hand it to the transport."""


class Outbox:
    """The connections of one process that have something to send."""

    def __init__(self, open_requests: Sized) -> None:
        self._open_requests = open_requests
        self._full: list[Outlet] = []

    def add(self, outlet: Outlet) -> None:
        """Have a connection flushed at the end of this turn, or now if hardly anything is open."""
        if len(self._open_requests) < FEW_REQUESTS:
            outlet.flush()
            return
        if not self._full:
            asyncio.get_running_loop().call_soon(self._flush)
        self._full.append(outlet)

    def _flush(self) -> None:
        full, self._full = self._full, []
        for outlet in full:
            outlet.flush()
