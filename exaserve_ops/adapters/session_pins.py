"""The session table for whoever has no event loop: one question at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from exaserve_ops.adapters.resp_link import RespLink
from exaserve_ops.adapters.session_table import (
    DEFAULT_TTL_SECONDS,
    SessionEntry,
    SessionTable,
    SessionTableUnavailableError,
    owner_digest,
)
from exaserve_ops.sessions.domain.moves import Pin

ANSWER_SECONDS = 2.0
_TRIES = 2
"""A connection that was lost since the last question shows only when it is used."""


class RedisSessionPins:
    """Looks conversations up and moves them. For one thread; its loop runs only while it asks."""

    def __init__(self, redis_url: str, *, ttl_seconds: int = DEFAULT_TTL_SECONDS) -> None:
        self._runner = asyncio.Runner()
        self._link = RespLink(redis_url, answer_seconds=ANSWER_SECONDS)
        self._table = SessionTable(self._link, ttl_seconds=ttl_seconds)

    def find(self, model: str, session_id: str, replica_ids: Sequence[str], /) -> Pin | None:
        """Which of these replicas has it; `None` without an entry. Raises `ConnectionError`."""
        entry = self._ask(lambda: self._table.found(model, session_id))
        return _pin(entry, replica_ids) if entry.owner_epoch else None

    def repin(
        self, model: str, session_id: str, replica_id: str, expected_epoch: int, expected_turns: int = 0, /
    ) -> Pin:
        """Move it if its epoch and turns (0: any) are still those; says what holds now.

        Raises `ConnectionError`.
        """
        # Asked twice it changes nothing more: the epoch is another one then.
        entry = self._ask(
            lambda: self._table.repinned(
                model, session_id, replica_id, expected_epoch, expected_turns=expected_turns
            )
        )
        return _pin(entry, [replica_id])

    def close(self) -> None:
        """Hang up."""
        self._runner.run(self._link.close())
        self._runner.close()

    def _ask(self, question: Callable[[], Awaitable[SessionEntry]]) -> SessionEntry:
        for _ in range(_TRIES):
            try:
                return self._runner.run(_answer(question))
            except SessionTableUnavailableError:
                continue
        raise ConnectionError("the session table does not answer")


async def _answer(question: Callable[[], Awaitable[SessionEntry]]) -> SessionEntry:
    return await question()


def _pin(entry: SessionEntry, replica_ids: Sequence[str]) -> Pin:
    owner = next((key for key in replica_ids if owner_digest(key) == entry.owner), "")
    return Pin(owner, entry.owner_epoch, entry.turns, entry.last_turn_at_seconds)
