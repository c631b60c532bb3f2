"""The route table in Redis: written by controllers, read by gateways.

Whole records travel, so that a replica that kept its id but moved to another port is a changed
record and not the same one. Each write that changes something raises `exaops:route:version` and is
announced; gateways also poll, so a lost announcement is late by a poll at most. Load changes all the
time: it has no version, and is read with every poll, alone where nothing else changed.

Redis may lose everything. `exaops:route:parts` names the parts that were written since, so that a
reader can tell "no replicas" from "nothing written yet" and goes on with what it knew.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import msgspec
import redis
import redis.asyncio
import redis.exceptions

from exaserve_ops.routing.domain.records import KeyRecord, NodeFacts, RouteRecord

REPLICAS_KEY = "exaops:route:replicas"
FACTS_KEY = "exaops:route:facts"
KEYS_KEY = "exaops:route:keys"
MODELS_KEY = "exaops:route:models"
COMING_KEY = "exaops:route:coming"
PARTS_KEY = "exaops:route:parts"
VERSION_KEY = "exaops:route:version"
LEADER_KEY = "exaops:route:leader"
CHANGED_CHANNEL = "exaops:route:changed"

POLL_SECONDS = 2.0
ANSWER_SECONDS = 2.0
"""Bound of each exchange with Redis; it is on this machine or one switch away."""
UNCONDITIONAL_READ_POLLS = 15
"""Every so many polls all is read even if the version says that nothing changed."""

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_encoder = msgspec.msgpack.Encoder()
_route_decoder = msgspec.msgpack.Decoder(RouteRecord)
_facts_decoder = msgspec.msgpack.Decoder(NodeFacts)
_key_decoder = msgspec.msgpack.Decoder(KeyRecord)


@dataclass(frozen=True, slots=True)
class RouteTable:
    """One consistent read of all that a gateway is told; `None` for a part never written.

    A part that is the same object as in the table before was not read again.
    """

    version: int
    replicas: Mapping[str, RouteRecord] | None = None
    facts: Mapping[str, NodeFacts] = field(default_factory=dict)
    keys: Mapping[str, KeyRecord] | None = None
    models: frozenset[str] = frozenset()
    """Models that a deployment serves, even with no replica at present."""
    coming: frozenset[str] = frozenset()
    """Those of them with a replica on its way: it starts, wakes, or is ready and not reached yet."""
    dropped: int = 0
    """Records that could not be decoded."""


class OvertakenError(Exception):
    """A leader of a later epoch writes the table: this one must not."""


class RouteTableWriter:
    """Writer side, for the one controller that leads. Takes a client that returns bytes."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._epoch = 0
        self._has_claimed = True

    def claim(self, epoch: int) -> None:
        """Write as the leader of this epoch; with the first write, older ones are shut out.

        A leader that stood still and wakes up with an old table in its hands gets `OvertakenError`.
        """
        self._epoch = epoch
        self._has_claimed = False

    def write_replicas(self, records: Mapping[str, RouteRecord]) -> bool:
        """Make the table hold exactly these, by replica id. Returns whether anything changed."""
        return self._replace(REPLICAS_KEY, "replicas", records)

    def write_keys(self, records: Mapping[str, KeyRecord]) -> bool:
        """Make the key table hold exactly these, by SHA-256 hex. Returns whether it changed."""
        return self._replace(KEYS_KEY, "keys", records)

    def write_models(self, names: frozenset[str]) -> bool:
        """Name the models that deployments serve: requests for them wait and get no 404."""
        return self._replace_names(MODELS_KEY, "models", names)

    def write_coming(self, names: frozenset[str]) -> bool:
        """Name the models that a replica is on its way for: requests for them wait for longer."""
        return self._replace_names(COMING_KEY, "coming", names)

    def has_lost(self) -> bool:
        """Whether a part that gateways cannot begin without is gone, as after a loss of all data."""
        return not {b"replicas", b"keys"} <= cast("set[bytes]", self._redis.smembers(PARTS_KEY))

    def _replace_names(self, key: str, part: str, names: frozenset[str]) -> bool:
        stored = cast("set[bytes]", self._redis.smembers(key))
        wanted = {name.encode() for name in names}
        if stored == wanted and self._is_written(part):
            return False

        def fill(pipeline: redis.client.Pipeline) -> None:
            pipeline.delete(key)
            if wanted:
                pipeline.sadd(key, *sorted(wanted))
            self._announce(pipeline, part)

        self._commit(fill)
        return True

    def write_facts(self, facts: Sequence[NodeFacts]) -> None:
        """Replace the load of these nodes. Not announced, and no new version: it is read at every poll."""
        if facts:
            loads = {one.node_id: _encoder.encode(one) for one in facts}
            self._redis.hset(FACTS_KEY, mapping=cast("Any", loads))

    def drop_facts(self, node_id: str) -> None:
        """Forget a node's load, so that it counts as unknown."""
        self._redis.hdel(FACTS_KEY, node_id)

    def _replace(
        self, key: str, part: str, records: Mapping[str, RouteRecord] | Mapping[str, KeyRecord]
    ) -> bool:
        stored = cast("dict[bytes, bytes]", self._redis.hgetall(key))
        wanted = {name.encode(): _encoder.encode(record) for name, record in records.items()}
        changed = {name: raw for name, raw in wanted.items() if stored.get(name) != raw}
        gone = stored.keys() - wanted.keys()
        if not changed and not gone and self._has_claimed and self._is_written(part):
            return False

        def fill(pipeline: redis.client.Pipeline) -> None:
            if gone:
                pipeline.hdel(key, *(name.decode() for name in gone))
            if changed:
                pipeline.hset(key, mapping=cast("Any", changed))
            self._announce(pipeline, part)

        self._commit(fill)
        return True

    def _commit(self, fill: Callable[[redis.client.Pipeline], None]) -> None:
        """Carry out in one step, unless a later leader wrote since. Raises `OvertakenError`."""
        with self._redis.pipeline(transaction=True) as pipeline:
            while True:
                if self._epoch:
                    self._watch_leader(pipeline)
                fill(pipeline)
                try:
                    pipeline.execute()
                except redis.exceptions.WatchError:
                    continue  # somebody claimed the table this moment: a later leader, or we ourselves
                break
        self._has_claimed = True

    def _watch_leader(self, pipeline: redis.client.Pipeline) -> None:
        pipeline.watch(LEADER_KEY)  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
        leader = int(cast("bytes | None", pipeline.get(LEADER_KEY)) or 0)
        if leader > self._epoch:
            raise OvertakenError(f"epoch {self._epoch} is over; the table is written by {leader}")
        pipeline.multi()
        if leader < self._epoch:
            pipeline.set(LEADER_KEY, self._epoch)

    def _is_written(self, part: str) -> bool:
        return bool(self._redis.sismember(PARTS_KEY, part))

    def _announce(self, pipeline: redis.client.Pipeline, part: str) -> None:
        pipeline.sadd(PARTS_KEY, part)
        self._raise_version(pipeline)
        pipeline.publish(CHANGED_CHANNEL, part)

    @staticmethod
    def _raise_version(pipeline: redis.client.Pipeline) -> None:
        # After a loss of all data the count starts anywhere but where it was: a reader that
        # remembers the old number must not mistake the new table for the one it has.
        pipeline.set(VERSION_KEY, secrets.randbits(40), nx=True)
        pipeline.incr(VERSION_KEY)


class RouteTableReader:
    """Reader side, for a gateway: calls `on_table` with each change, for ever.

    Survives any absence of Redis, from the start on. `on_contact` is told after each poll whether
    Redis answered.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        on_table: Callable[[RouteTable], None],
        on_contact: Callable[[bool], None],
        *,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self._redis = client
        self._on_table = on_table
        self._on_contact = on_contact
        self._poll_seconds = poll_seconds
        self._version: int | None = None
        self._table = RouteTable(0)
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Poll and listen until cancelled."""
        await asyncio.gather(self._poll_for_ever(), self._listen_for_ever())

    async def _poll_for_ever(self) -> None:
        polls = 0
        while True:
            if polls % UNCONDITIONAL_READ_POLLS == 0:
                self._version = None
            polls += 1
            self._wake.clear()
            self._on_contact(await self._poll())
            try:
                async with asyncio.timeout(self._poll_seconds):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _poll(self) -> bool:
        """Read the load, and the rest if its version changed. Returns whether Redis answered."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                pipeline: Any = self._redis.pipeline(transaction=True)
                pipeline.get(VERSION_KEY)
                pipeline.hgetall(FACTS_KEY)
                raw, facts = await pipeline.execute()
                if raw is None:
                    self._version = None
                    return True  # nothing written since a loss: what was known stays in force
                if int(raw) == self._version:
                    loads, dropped = _decode(_facts_decoder, facts)
                    self._accept(replace(self._table, facts=loads, dropped=dropped))
                else:
                    self._accept(await self._read())
        except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
            _log.debug("event=route_table_unreadable error=%r", error)
            return False
        return True

    async def _read(self) -> RouteTable:
        pipeline: Any = self._redis.pipeline(transaction=True)
        pipeline.get(VERSION_KEY)
        pipeline.smembers(PARTS_KEY)
        pipeline.hgetall(REPLICAS_KEY)
        pipeline.hgetall(FACTS_KEY)
        pipeline.hgetall(KEYS_KEY)
        pipeline.smembers(MODELS_KEY)
        pipeline.smembers(COMING_KEY)
        return decode_table(await pipeline.execute())

    def _accept(self, table: RouteTable) -> None:
        self._version, self._table = table.version, table
        self._on_table(table)

    async def _listen_for_ever(self) -> None:
        while True:
            try:
                async with self._redis.pubsub() as pubsub:
                    await pubsub.subscribe(CHANGED_CHANNEL)
                    self._wake.set()  # what was announced before the subscription
                    while True:
                        message = await pubsub.get_message(
                            ignore_subscribe_messages=True, timeout=self._poll_seconds
                        )
                        if message is not None:
                            self._wake.set()
            except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
                _log.debug("event=route_table_channel_lost error=%r", error)
                await asyncio.sleep(self._poll_seconds)


def decode_table(answer: Sequence[Any]) -> RouteTable:
    """Decode the answer to a read: version, parts, replicas, facts, keys, models, models to come.

    A record that does not decode is dropped and counted; the rest is used.
    """
    version, parts, replicas, facts, keys, models, coming = answer
    routes, bad_routes = _decode(_route_decoder, replicas)
    loads, bad_loads = _decode(_facts_decoder, facts)
    allowed, bad_keys = _decode(_key_decoder, keys)
    return RouteTable(
        version=int(version or 0),
        replicas=routes if b"replicas" in parts else None,
        facts=loads,
        keys=allowed if b"keys" in parts else None,
        models=_names(models),
        coming=_names(coming),
        dropped=bad_routes + bad_loads + bad_keys,
    )


def _names(raws: set[bytes]) -> frozenset[str]:
    return frozenset(name.decode(errors="replace") for name in raws)


def _decode(decoder: msgspec.msgpack.Decoder[_T], raws: Mapping[bytes, bytes]) -> tuple[dict[str, _T], int]:
    records: dict[str, _T] = {}
    for name, raw in raws.items():
        try:
            records[name.decode()] = decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return records, len(raws) - len(records)
