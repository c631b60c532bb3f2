"""Following one replica's log, or that of a member of it: batched, bounded, and resumable."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from channels.db import database_sync_to_async
from channels.layers import get_channel_layer

from exaserve_ops.dashboard.live.tasks import until_first
from exaserve_ops.dashboard.ports import live_reader
from exaserve_ops.lib.hints import ring
from exaserve_ops.serving.selectors.logs import LOG_HINT, LogSource
from exaserve_ops.telemetry.domain.pictures import LogEntry

RING_SECONDS = 20.0
"""Controllers keep asking the agent for lines as long as somebody rings this often."""
MESSAGE_SECONDS = 0.25
POLL_SECONDS = 2.0
BATCH_ENTRIES = 200
MAX_LINES = 500
MAX_LINE_CHARACTERS = 2000
MAX_MESSAGE_CHARACTERS = 200_000

Say = Callable[[dict[str, Any]], Awaitable[None]]


class LogTail:
    """Reads on from a position and says what it found."""

    def __init__(self, source: LogSource, *, after: str) -> None:
        self._source = source
        self._position = after
        self._hinted = asyncio.Event()

    async def run(self, say: Say) -> None:
        """Follow until cancelled."""
        await until_first(self._keep_asking(), self._listen(), self._follow(say))

    async def _keep_asking(self) -> None:
        while True:
            await database_sync_to_async(ring)(LOG_HINT, self._source.key)
            await asyncio.sleep(RING_SECONDS)

    async def _listen(self) -> None:
        layer = get_channel_layer()
        channel = await layer.new_channel("log")
        group = f"log.{self._source.replica_id}.{self._source.number}"
        await layer.group_add(group, channel)
        try:
            while True:
                await layer.receive(channel)
                self._hinted.set()
        finally:
            await layer.group_discard(group, channel)

    async def _follow(self, say: Say) -> None:
        replica_id, number = str(self._source.replica_id), self._source.number
        while True:
            entries = await live_reader().fetch_log(replica_id, number, self._position, BATCH_ENTRIES)
            if entries:
                self._position = entries[-1].position
                await say(log_message(entries))
            if len(entries) < BATCH_ENTRIES:
                await self._wait()
            await asyncio.sleep(MESSAGE_SECONDS)

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(POLL_SECONDS):
                await self._hinted.wait()
        except TimeoutError:
            return
        self._hinted.clear()


def log_message(entries: Sequence[LogEntry]) -> dict[str, Any]:
    """One message out of many entries: the newest lines that fit, and how many did not.

    Lines are cut at `MAX_LINE_CHARACTERS`, so one enormous line cannot fill the socket.
    """
    lines = [(entry.attempt, line[:MAX_LINE_CHARACTERS]) for entry in entries for line in entry.lines]
    kept: list[tuple[int, str]] = []
    size = 0
    for attempt, line in reversed(lines):
        size += len(line)
        if len(kept) == MAX_LINES or size > MAX_MESSAGE_CHARACTERS:
            break
        kept.append((attempt, line))
    dropped = sum(entry.dropped_lines for entry in entries) + len(lines) - len(kept)
    return {
        "kind": "log",
        "position": entries[-1].position,
        "lines": [{"attempt": attempt, "text": line} for attempt, line in reversed(kept)],
        "dropped": dropped,
    }
