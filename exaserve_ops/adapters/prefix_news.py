"""What gateways tell one another of prompts' beginnings: the stream `exaops:prefixes`.

A gateway says which beginnings it sent where, the news of half a second in one entry; the others read
it, and one that has just started reads what was said before. All of it is a hint: what is lost, late or
too much costs a prompt that is computed anew, so nothing is kept for later and nothing is sent again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import redis.asyncio
import redis.exceptions

from exaserve_ops.routing.domain.prefixes import DIGEST_BYTES

STREAM_KEY = "exaops:prefixes"
STREAM_MAX_LENGTH = 4_096
MOST_DIGESTS = 1_024
"""Told at once: 16 KiB a second of a gateway at most, at two times a second. What is more is not told."""
READ_ENTRIES = 512
_ANSWER_SECONDS = 2.0
_FROM, _NEWS = b"g", b"n"

_log = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[tuple[bytes, bytes]])

OnNews = Callable[[bytes, Sequence[bytes], float], None]
"""Owner digest of a replica, the beginnings it was sent, and when by the reader's clock."""


class PrefixNews:
    """One gateway's side of it. `add` never waits; `run` tells and hears."""

    def __init__(self, on_news: OnNews, *, clock: Callable[[], float]) -> None:
        self._on_news = on_news
        self._clock = clock
        self._name = secrets.token_bytes(8)
        self._news: dict[bytes, list[bytes]] = {}
        self._count = 0
        self._last_id: bytes | None = None
        self.dropped = 0
        """Beginnings that were not told because there were too many."""

    def add(self, owner: bytes, digests: Sequence[bytes]) -> None:
        """Tell the others soon."""
        room = MOST_DIGESTS - self._count
        told = digests[:room]
        self.dropped += len(digests) - len(told)
        if told:
            self._news.setdefault(owner, []).extend(told)
            self._count += len(told)

    async def run(
        self, client: redis.asyncio.Redis, is_ready: Callable[[], bool], period_seconds: float
    ) -> None:
        """Tell and hear until cancelled, as soon as replicas are known."""
        while True:
            await asyncio.sleep(period_seconds)
            if is_ready():
                await self.exchange(client)

    async def exchange(self, client: redis.asyncio.Redis) -> bool:
        """Tell what is new here, take in what is new elsewhere. Returns false if Redis is away."""
        news, self._news, self._count = self._news, {}, 0
        calls: Any = client.pipeline(transaction=False)  # its stubs take a queued call for one to await
        if news:
            content = _encoder.encode([(owner, b"".join(digests)) for owner, digests in news.items()])
            entry: dict[Any, Any] = {_FROM: self._name, _NEWS: content}
            calls.xadd(STREAM_KEY, entry, maxlen=STREAM_MAX_LENGTH, approximate=True)
        calls.time()
        if self._last_id is None:
            calls.xrevrange(STREAM_KEY, count=READ_ENTRIES)
        else:
            calls.xread({STREAM_KEY: self._last_id}, count=READ_ENTRIES)
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                *_, (seconds, microseconds), found = await calls.execute()
        except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
            _log.debug("event=prefix_news_unheard error=%r", error)
            return False
        entries = reversed(found) if self._last_id is None else found[0][1] if found else ()
        self._last_id = self._last_id or b"0"
        self._take_in(entries, seconds + microseconds / 1e6)
        return True

    def _take_in(self, entries: Iterable[tuple[bytes, dict[bytes, bytes]]], store_seconds: float) -> None:
        for entry_id, fields in entries:
            self._last_id = entry_id
            if fields.get(_FROM) == self._name:
                continue
            try:
                news = _decoder.decode(fields.get(_NEWS, b""))
            except msgspec.DecodeError:
                continue
            age = max(0.0, store_seconds - int(entry_id.partition(b"-")[0]) / 1000)
            for owner, joined in news:
                digests = [joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES)]
                self._on_news(owner, digests, self._clock() - age)
