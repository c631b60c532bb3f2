"""Live pictures in Redis: written by the leading controller, read by every web process."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, cast

import msgspec
import redis
import redis.asyncio
from asgiref.sync import async_to_sync
from channels.layers import get_channel_layer

from exaserve_ops.adapters.reports import describe_heartbeat, describe_kv, describe_weights
from exaserve_ops.adapters.swarm_board import read_swarms
from exaserve_ops.serving.domain.reports import LogLines
from exaserve_ops.telemetry.domain.log_lines import untold
from exaserve_ops.telemetry.domain.pictures import LivePicture, LogEntry, NodeReport
from exaserve_ops.weights.domain.held import StoreSight
from exaserve_ops.weights.domain.swarm_notes import SwarmNotes

LAYOUT_KEY = "exaops:live:layout"
FRAME_KEY = "exaops:live:frame"
SUMMARY_KEY = "exaops:live:summary"
NODES_KEY = "exaops:live:nodes"

PICTURE_SECONDS = 3600
"""A picture that nobody replaced for an hour is of no use to anybody."""
LOG_SECONDS = 300
LOG_ENTRIES = 2_000

_encoder = msgspec.msgpack.Encoder()
_node_decoder = msgspec.msgpack.Decoder(tuple[float | None, int, bytes])


def log_key(replica_id: str, member: int) -> str:
    """Stream of the log lines of a replica, or of one member of it."""
    return f"exaops:log:{replica_id}:{member}"


class RedisLivePublisher:
    """Writer side, for one thread. Takes a client that returns bytes."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def publish(self, picture: LivePicture) -> None:
        """Replace the picture, and hint that it is new."""
        pipeline = self._redis.pipeline(transaction=True)
        if picture.layout is not None:
            pipeline.set(LAYOUT_KEY, picture.layout)
        pipeline.set(FRAME_KEY, picture.frame, ex=PICTURE_SECONDS)
        pipeline.set(SUMMARY_KEY, picture.summary, ex=PICTURE_SECONDS)
        if picture.gone_nodes:
            pipeline.hdel(NODES_KEY, *picture.gone_nodes)
        if picture.nodes:
            reports = {node_id: _encode_node(report) for node_id, report in picture.nodes.items()}
            pipeline.hset(NODES_KEY, mapping=cast("Any", reports))
        pipeline.execute()
        _hint("live", {"type": "live.frame", "sequence": picture.sequence})

    def announce_events(self, last_id: int) -> None:
        """Hint that there are new events."""
        _hint("events", {"type": "live.events", "last_id": last_id})

    def append_log(self, lines: LogLines, member: int) -> None:
        """Keep log lines for their readers, for a few minutes, and hint.

        An agent that is asked anew begins with the newest lines: those that are kept already are left out.
        """
        key = log_key(lines.replica_id, member)
        told, dropped = lines.lines, lines.dropped_lines
        if lines.is_backlog:
            kept = self._kept_lines(key, lines.attempt)
            told = untold(kept, lines.lines)
            if len(told) < len(lines.lines):
                dropped = 0  # they come before lines that are kept
            if kept and not told:
                self._redis.expire(key, LOG_SECONDS)
                return
        entry = {"a": lines.attempt, "d": dropped, "l": json.dumps(told)}
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.xadd(key, cast("Any", entry), maxlen=LOG_ENTRIES, approximate=True)
        pipeline.expire(key, LOG_SECONDS)
        pipeline.execute()
        _hint(f"log.{lines.replica_id}.{member}", {"type": "live.log"})

    def _kept_lines(self, key: str, attempt: int) -> list[str]:
        """Lines of an attempt that readers can have, oldest first."""
        entries = _log_entries(self._redis.xrange(key))
        return [line for entry in entries if entry.attempt == attempt for line in entry.lines]


class RedisLiveReader:
    """Reader side, for a web process: asynchronous for consumers, plain for pages."""

    def __init__(self, url: str) -> None:
        self._async = redis.asyncio.Redis.from_url(url, socket_timeout=5, health_check_interval=30)
        self._sync = redis.Redis.from_url(url, socket_timeout=5, health_check_interval=30)

    async def fetch_frame(self) -> bytes | None:
        """Newest value frame."""
        return cast("bytes | None", await self._async.get(FRAME_KEY))

    async def fetch_summary(self) -> bytes | None:
        """Newest summary."""
        return cast("bytes | None", await self._async.get(SUMMARY_KEY))

    async def fetch_log(self, replica_id: str, member: int, after: str, limit: int) -> list[LogEntry]:
        """Log entries after a position, oldest first."""
        key = log_key(replica_id, member)
        return _log_entries(await self._async.xrange(key, min=_from(after), count=limit))

    def read_log(self, replica_id: str, member: int, after: str, limit: int) -> list[LogEntry]:
        """The same for a plain view; none where Redis is away."""
        try:
            key = log_key(replica_id, member)
            return _log_entries(self._sync.xrange(key, min=_from(after), count=limit))
        except redis.RedisError:
            return []

    def read_node(self, node_id: str) -> dict[str, Any] | None:
        """Last telemetry of a node; `None` where there is none, or Redis is away."""
        try:
            raw = cast("bytes | None", self._sync.hget(NODES_KEY, node_id))
        except redis.RedisError:
            return None
        return _describe_node(raw) if raw else None

    def read_kv(self, node_id: str) -> dict[str, Any] | None:
        """KV memory of a node as last reported, and when; `None` where nothing is known."""
        try:
            raw = cast("bytes | None", self._sync.hget(NODES_KEY, node_id))
        except redis.RedisError:
            return None
        return _describe_kv(raw) if raw else None

    async def fetch_kv(self, node_ids: Collection[str]) -> dict[str, dict[str, Any]]:
        """The same of many nodes, in one round trip; without those of which nothing is known."""
        ids = list(node_ids)
        raws = cast("list[bytes | None]", await self._async.hmget(NODES_KEY, ids))
        return {node_id: _describe_kv(raw) for node_id, raw in zip(ids, raws, strict=True) if raw}

    def read_nodes(self, node_ids: Collection[str]) -> dict[str, dict[str, Any]]:
        """Last telemetry of many nodes, in one round trip; without those that have none."""
        ids = list(node_ids)
        try:
            raws = cast("list[bytes | None]", self._sync.hmget(NODES_KEY, ids)) if ids else []
        except redis.RedisError:
            return {}
        return {node_id: _describe_node(raw) for node_id, raw in zip(ids, raws, strict=True) if raw}

    def read_weights(self, node_ids: Collection[str]) -> dict[str, StoreSight]:
        """Weights on many nodes' disks, in one round trip; without those that tell nothing of any."""
        ids = list(node_ids)
        try:
            raws = cast("list[bytes | None]", self._sync.hmget(NODES_KEY, ids)) if ids else []
        except redis.RedisError:
            return {}
        told = {node_id: _describe_weights(raw) for node_id, raw in zip(ids, raws, strict=True) if raw}
        return {node_id: sight for node_id, sight in told.items() if sight is not None}

    def read_swarms(self) -> dict[str, SwarmNotes]:
        """Swarms of the last day; none where Redis is away."""
        return read_swarms(self._sync)

    def read_layout(self) -> bytes | None:
        """Newest heatmap layout; `None` where there is none, or Redis is away."""
        try:
            return cast("bytes | None", self._sync.get(LAYOUT_KEY))
        except redis.RedisError:
            return None

    def read_summary(self) -> dict[str, Any] | None:
        """The newest summary; `None` where there is none, or Redis is away."""
        try:
            raw = cast("bytes | None", self._sync.get(SUMMARY_KEY))
        except redis.RedisError:
            return None
        return cast("dict[str, Any]", json.loads(raw)) if raw else None


def _from(after: str) -> str:
    return f"({after}" if after != "0" else "-"


def _log_entries(answer: object) -> list[LogEntry]:
    entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", answer)
    return [
        LogEntry(
            position=position.decode(),
            attempt=int(fields[b"a"]),
            lines=tuple(json.loads(fields[b"l"])),
            dropped_lines=int(fields[b"d"]),
        )
        for position, fields in entries
    ]


def _encode_node(report: NodeReport) -> bytes:
    return _encoder.encode((report.received_at_seconds, report.sequence, report.heartbeat))


def _describe_node(raw: bytes) -> dict[str, Any]:
    received_at, sequence, heartbeat = _node_decoder.decode(raw)
    return {"received_at": received_at, "sequence": sequence, **describe_heartbeat(heartbeat)}


def _describe_weights(raw: bytes) -> StoreSight | None:
    _, _, heartbeat = _node_decoder.decode(raw)
    return describe_weights(heartbeat)


def _describe_kv(raw: bytes) -> dict[str, Any]:
    received_at, sequence, heartbeat = _node_decoder.decode(raw)
    return {"received_at": received_at, "sequence": sequence, **describe_kv(heartbeat)}


def _hint(group: str, message: dict[str, Any]) -> None:
    async_to_sync(get_channel_layer().group_send)(group, message)
