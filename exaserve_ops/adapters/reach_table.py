"""Which replicas a gateway cannot connect to: said by gateways, read by controllers.

A replica may be ready for its agent, next to it, and out of reach for those that should send it
requests. Each gateway keeps one short-lived key, so what a dead gateway said is forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import msgspec
import redis
import redis.asyncio

KEY_PREFIX = "exaops:reach:"
LIFETIME_SECONDS = 15

_decoder = msgspec.msgpack.Decoder(dict[str, str])


class ReachWriter:
    """Writer side, for one gateway. Takes an asynchronous client that returns bytes."""

    def __init__(self, client: redis.asyncio.Redis, gateway_id: str) -> None:
        self._redis = client
        self._key = KEY_PREFIX + gateway_id

    async def write(self, unreachable: Mapping[str, str]) -> None:
        """Say why each of these replicas (by id) cannot be reached; nothing takes all back."""
        if unreachable:
            raw = msgspec.msgpack.encode(dict(unreachable))
            await self._redis.set(self._key, raw, ex=LIFETIME_SECONDS)
        else:
            await self._redis.delete(self._key)


class ReachReader:
    """Reader side, for a controller. Takes a client that returns bytes."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def read(self) -> dict[str, str]:
        """Reason by replica id, over all gateways; of several reasons the first gateway's."""
        keys = sorted(cast("list[bytes]", list(self._redis.scan_iter(KEY_PREFIX + "*", count=1000))))
        reasons: dict[str, str] = {}
        for key in keys:
            raw = cast("bytes | None", self._redis.get(key))
            if raw is None:
                continue
            for replica_id, reason in _decoder.decode(raw).items():
                reasons.setdefault(replica_id, reason)
        return reasons
