"""Which replica a session lives on: one small value in Redis for each, shared by all gateways.

A claim is set-if-absent and a re-pin is compare-and-swap on the owner epoch, both in one script and
one round trip, so two gateways that act at once end up with one owner. Every call is bounded; a
caller that gets `SessionTableUnavailableError` falls back to hashing, which all gateways do alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import cast

import msgspec
import redis.asyncio
import redis.exceptions

DEFAULT_TTL_SECONDS = 24 * 3600
ANSWER_SECONDS = 0.150
"""Longer than this and a turn is better off with the fall-back."""

_CLAIM = """
local raw = redis.call('GET', KEYS[1])
local entry
if raw then entry = cmsgpack.unpack(raw) else entry = {ARGV[1], 1, 0, 0} end
entry[3] = entry[3] + 1
raw = cmsgpack.pack(entry)
redis.call('SET', KEYS[1], raw, 'EX', ARGV[2])
return raw
"""

_REPIN = """
local raw = redis.call('GET', KEYS[1])
local entry
if raw then entry = cmsgpack.unpack(raw) else entry = {'', tonumber(ARGV[3]), 1, 0} end
if entry[2] == tonumber(ARGV[3]) then
  entry[1] = ARGV[1]
  entry[2] = entry[2] + 1
  raw = cmsgpack.pack(entry)
  redis.call('SET', KEYS[1], raw, 'EX', ARGV[2])
end
return raw
"""

_NOTE_CONTEXT = """
local raw = redis.call('GET', KEYS[1])
if not raw then return 0 end
local entry = cmsgpack.unpack(raw)
entry[4] = tonumber(ARGV[1])
redis.call('SET', KEYS[1], cmsgpack.pack(entry), 'KEEPTTL')
return 1
"""


class SessionTableUnavailableError(Exception):
    """Redis is away, slow or confused; decide without it."""


class SessionEntry(msgspec.Struct, frozen=True, array_like=True):
    """Where a session lives. `turns` counts requests, this one included."""

    replica_id: str
    owner_epoch: int
    """Raised by each re-pin; a re-pin that expects another epoch changes nothing."""
    turns: int
    context_tokens: int = 0


_decoder = msgspec.msgpack.Decoder(SessionEntry)


def session_key(model: str, session_id: str) -> str:
    """Redis key of one session of one model."""
    return f"exaops:s:{model}:{session_id}"


class SessionTable:
    """The table, over a client that returns bytes and does not retry by itself."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        *,
        ttl_seconds: int = DEFAULT_TTL_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self._ttl_seconds = ttl_seconds
        self._answer_seconds = answer_seconds
        self._claim = client.register_script(_CLAIM)
        self._repin = client.register_script(_REPIN)
        self._note_context = client.register_script(_NOTE_CONTEXT)

    async def claim(self, model: str, session_id: str, replica_id: str) -> SessionEntry:
        """Count a turn; the session goes to `replica_id` only if it has no owner yet.

        Returns the entry in force, which may name another replica. Raises
        `SessionTableUnavailableError`.
        """
        key = session_key(model, session_id)
        return await self._entry(self._claim([key], [replica_id, self._ttl_seconds]))

    async def repin(self, model: str, session_id: str, replica_id: str, expected_epoch: int) -> SessionEntry:
        """Move the session if its owner epoch is still the expected one.

        Returns the entry in force: another gateway's if that was faster. Raises
        `SessionTableUnavailableError`.
        """
        key = session_key(model, session_id)
        arguments: list[str | int] = [replica_id, self._ttl_seconds, expected_epoch]
        return await self._entry(self._repin([key], arguments))

    async def note_context(self, model: str, session_id: str, context_tokens: int) -> None:
        """Record the length of a session's context. Raises `SessionTableUnavailableError`."""
        key = session_key(model, session_id)
        await self._bounded(self._note_context([key], [context_tokens]))

    async def _entry(self, call: Awaitable[object]) -> SessionEntry:
        raw = await self._bounded(call)
        try:
            return _decoder.decode(cast("bytes", raw))
        except (msgspec.DecodeError, TypeError) as error:
            raise SessionTableUnavailableError(f"not a session entry: {error}") from error

    async def _bounded(self, call: Awaitable[object]) -> object:
        try:
            async with asyncio.timeout(self._answer_seconds):
                return await call
        except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
            raise SessionTableUnavailableError(repr(error)) from error
