"""Finished requests, on their way from gateways to controllers: the stream `exaops:turns`.

Gateways append in batches, away from the request's path, and drop (and count) what a full buffer
cannot hold while Redis is away. Controllers read as a consumer group, write first and acknowledge
after, so a turn may arrive twice but is not lost with a controller.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import redis
import redis.exceptions

from exaserve_ops.adapters.resp_link import LinkError, Reply, RespLink, command
from exaserve_ops.routing.domain.records import TurnRecord

STREAM_KEY = "exaops:turns"
STREAM_MAX_LENGTH = 100_000
GROUP = "sessions"
FIELD = "t"

BUFFER_TURNS = 20_000
BATCH_TURNS = 500
FLUSH_SECONDS = 0.2
ANSWER_SECONDS = 2.0
ABANDONED_MILLISECONDS = 60_000
"""A turn that a consumer holds unacknowledged for longer is taken over: the consumer is dead."""

_log = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(TurnRecord)


_APPEND = f"""
for i = 2, #ARGV do
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', '{FIELD}', ARGV[i])
end
return #ARGV - 1
"""


class Turn(msgspec.Struct, omit_defaults=True):
    """A `TurnRecord` as a gateway fills it in: the same fields, made in a fraction of the time."""

    request_id: str
    session_id: str
    model: str
    replica_id: str
    node_id: str
    key_id: str
    path: str
    started_at_seconds: float
    duration_seconds: float
    ttft_seconds: float | None
    outcome: str
    status: int
    why: str
    attempts: int = 1
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    continued_from: tuple[str, ...] = ()
    streamed_events: int = 0


class TurnLog:
    """Writer side, for a gateway. `add` never waits; `run` carries what was added to Redis."""

    def __init__(
        self,
        link: RespLink,
        *,
        buffer_turns: int = BUFFER_TURNS,
        flush_seconds: float = FLUSH_SECONDS,
    ) -> None:
        self._link = link
        self._buffer: collections.deque[bytes] = collections.deque(maxlen=buffer_turns)
        self._flush_seconds = flush_seconds
        self.dropped = 0

    def add(self, turn: Turn | TurnRecord) -> None:
        """Keep a turn for the next batch; the oldest makes room if the buffer is full."""
        if len(self._buffer) == self._buffer.maxlen:
            self.dropped += 1
        self._buffer.append(_encoder.encode(turn))

    async def run(self) -> None:
        """Flush from time to time until cancelled."""
        while True:
            await asyncio.sleep(self._flush_seconds)
            await self.flush()

    async def flush(self) -> bool:
        """Send what is buffered. Returns false, and keeps it, if Redis did not take it."""
        while self._buffer:
            count = min(len(self._buffer), BATCH_TURNS)
            batch = [self._buffer.popleft() for _ in range(count)]
            if not await self._send(batch):
                self._put_back(batch)
                return False
        return True

    async def _send(self, batch: Sequence[bytes]) -> bool:
        answer: asyncio.Future[Reply | LinkError] = asyncio.get_running_loop().create_future()

        def take(reply: Reply | LinkError) -> None:
            if not answer.done():
                answer.set_result(reply)

        self._link.call(command(b"EVAL", _APPEND, 1, STREAM_KEY, STREAM_MAX_LENGTH, *batch), take)
        reply = await answer
        if isinstance(reply, LinkError):
            _log.debug("event=turn_log_unwritten turns=%d error=%r", len(batch), reply)
            return False
        return True

    def _put_back(self, batch: Sequence[bytes]) -> None:
        room = cast("int", self._buffer.maxlen) - len(self._buffer)
        kept = batch[max(0, len(batch) - room) :]
        self.dropped += len(batch) - len(kept)
        self._buffer.extendleft(reversed(kept))


class TurnLogReader:
    """Reader side, for a controller. Takes a client that returns bytes; not for several threads."""

    def __init__(self, client: redis.Redis, consumer: str) -> None:
        self._redis = client
        self._consumer = consumer

    def read(self, block_seconds: float, *, count: int = BATCH_TURNS) -> list[tuple[str, TurnRecord]]:
        """Return turns to record, waiting up to `block_seconds` for the first.

        What a dead consumer left unacknowledged comes first. A group that is missing (first start,
        or all data lost) is made again. Raises `redis.exceptions.RedisError` if Redis is away.
        """
        try:
            return self._read_once(block_seconds, count)
        except redis.exceptions.ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
        self._create_group()
        return self._read_once(block_seconds, count)

    def ack(self, entry_ids: Sequence[str]) -> None:
        """Say that these turns are safely recorded."""
        if entry_ids:
            self._redis.xack(STREAM_KEY, GROUP, *entry_ids)

    def _read_once(self, block_seconds: float, count: int) -> list[tuple[str, TurnRecord]]:
        abandoned = cast(
            "Any",
            self._redis.xautoclaim(STREAM_KEY, GROUP, self._consumer, ABANDONED_MILLISECONDS, count=count),
        )
        if abandoned[1]:
            return self._decode(abandoned[1])
        answer = cast(
            "Any",
            self._redis.xreadgroup(
                GROUP,
                self._consumer,
                {STREAM_KEY: ">"},
                count=count,
                block=max(1, round(block_seconds * 1000)),
            ),
        )
        return self._decode([entry for _, entries in answer or () for entry in entries])

    def _create_group(self) -> None:
        try:
            self._redis.xgroup_create(STREAM_KEY, GROUP, id="0", mkstream=True)
        except redis.exceptions.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):  # another reader was faster
                raise

    def _decode(self, entries: Sequence[tuple[bytes, Any]]) -> list[tuple[str, TurnRecord]]:
        turns: list[tuple[str, TurnRecord]] = []
        unreadable: list[str] = []
        for entry_id, fields in entries:
            try:
                turns.append((entry_id.decode(), _decoder.decode(fields[FIELD.encode()])))
            except (msgspec.DecodeError, KeyError, TypeError):
                unreadable.append(entry_id.decode())
        if unreadable:
            _log.warning("event=turns_unreadable count=%d", len(unreadable))
            self.ack(unreadable)  # they would come back for ever
        return turns
