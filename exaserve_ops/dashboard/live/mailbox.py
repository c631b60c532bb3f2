"""What one socket still has to send: bounded, whatever the reader does."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any

MAX_EVENTS = 300


class Mailbox:
    """Keeps the newest of each kind of snapshot, and the last events.

    A slow reader skips frames; it never makes this process keep them.
    """

    def __init__(self) -> None:
        self._snapshots: dict[str, str | bytes] = {}
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._lost_events = 0
        self._filled = asyncio.Event()

    def put(self, kind: str, message: str | bytes) -> None:
        """Replace what waits of this kind."""
        self._snapshots[kind] = message
        self._filled.set()

    def put_events(self, events: Iterable[dict[str, Any]]) -> None:
        """Add events; the oldest fall out when nobody takes them, and are counted."""
        for event in events:
            self._lost_events += len(self._events) == MAX_EVENTS
            self._events.append(event)
        if self._events:
            self._filled.set()

    async def take(self) -> tuple[list[str | bytes], list[dict[str, Any]], int]:
        """Wait until there is something; return snapshots, events and how many events were lost."""
        await self._filled.wait()
        self._filled.clear()
        taken = (list(self._snapshots.values()), list(self._events), self._lost_events)
        self._snapshots.clear()
        self._events.clear()
        self._lost_events = 0
        return taken
