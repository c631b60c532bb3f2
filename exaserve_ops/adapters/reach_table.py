"""Which replicas gateways can connect to: said by gateways, read by controllers.

A replica may be ready for its agent, next to it, and out of reach for those that should send it
requests. Each gateway keeps two short-lived keys: why it cannot connect to whom, which also tells
that it lives, and a set of those it has connected to. What a dead gateway said is forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import msgspec
import redis
import redis.asyncio

KEY_PREFIX = "exaops:reach:"
REACHED_PREFIX = "exaops:reached:"
LIFETIME_SECONDS = 15
_MOST_AT_ONCE = 2_000

_decoder = msgspec.msgpack.Decoder(dict[str, str])


def place_token(replica_id: str, attempt: int, port: int) -> str:
    """Names one start of a replica at one port: what was reached before says nothing of it."""
    return f"{replica_id} {attempt} {port}"


class ReachWriter:
    """Writer side, for one gateway. Takes an asynchronous client that returns bytes."""

    def __init__(self, client: redis.asyncio.Redis, gateway_id: str) -> None:
        self._redis = client
        self._key = KEY_PREFIX + gateway_id
        self._reached_key = REACHED_PREFIX + gateway_id
        self._written: frozenset[str] | None = None
        """What stands in the set; `None` where that is not known."""

    async def write(self, unreachable: Mapping[str, str], reached: frozenset[str]) -> None:
        """Say why each of these replicas (by id) cannot be reached, and which places were."""
        before, self._written = self._written, None
        if before is None:
            await self._redis.delete(self._reached_key)
        elif before and not await self._redis.expire(self._reached_key, LIFETIME_SECONDS):
            before = None  # this process stood still for longer than its words last
        await self._change(reached - (before or frozenset()), (before or frozenset()) - reached)
        # Last: whoever finds this gateway alive finds what it has reached as well.
        raw = msgspec.msgpack.encode(dict(unreachable))
        await self._redis.set(self._key, raw, ex=LIFETIME_SECONDS)
        self._written = reached

    async def _change(self, new: frozenset[str], gone: frozenset[str]) -> None:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for command, tokens in ((pipeline.sadd, sorted(new)), (pipeline.srem, sorted(gone))):
                for start in range(0, len(tokens), _MOST_AT_ONCE):
                    _ = command(self._reached_key, *tokens[start : start + _MOST_AT_ONCE])  # on its way
            _ = pipeline.expire(self._reached_key, LIFETIME_SECONDS)
            await pipeline.execute()


class ReachReader:
    """Reader side, for a controller. Takes a client that returns bytes."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def read(self) -> dict[str, dict[str, str]]:
        """Living gateways, and of each the reasons by replica id."""
        keys = sorted(cast("list[bytes]", list(self._redis.scan_iter(KEY_PREFIX + "*", count=1000))))
        said: dict[str, dict[str, str]] = {}
        for key in keys:
            raw = cast("bytes | None", self._redis.get(key))
            if raw is not None:
                said[key.decode().removeprefix(KEY_PREFIX)] = _decoder.decode(raw)
        return said

    def reached(self, gateway: str, tokens: Sequence[str]) -> list[bool]:
        """Whether a gateway has connected to each of these places."""
        found: list[bool] = []
        for start in range(0, len(tokens), _MOST_AT_ONCE):
            answer = self._redis.smismember(
                REACHED_PREFIX + gateway, list(tokens[start : start + _MOST_AT_ONCE])
            )
            found += [bool(member) for member in cast("list[int]", answer)]
        return found
