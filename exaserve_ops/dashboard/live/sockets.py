"""The sockets of the pages: `ws/live/` for the fleet, `ws/replicas/<id>/log/` for one log."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs
from uuid import UUID

from channels.db import database_sync_to_async

from exaserve_ops.audit.selectors import events_after
from exaserve_ops.dashboard.live.feed import event_message, feed_of_this_loop
from exaserve_ops.dashboard.live.mailbox import Mailbox
from exaserve_ops.dashboard.live.tail import LogTail
from exaserve_ops.dashboard.live.tasks import until_first
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.serving.selectors.logs import LogSource, find_log

logger = logging.getLogger(__name__)

SEND_SECONDS = 30.0
"""A client that takes nothing for this long is sent away."""
TRY_AGAIN_LATER = 1013
TOO_MANY = 4429
NOT_FOUND = 4404
UNABLE = 4410
"""Its node's agent cannot send it; nothing that comes by itself."""
TAILS_PER_USER = 8
MISSED_EVENTS = 200

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class SlowClientError(Exception):
    """The client took nothing for `SEND_SECONDS`."""


class Wire:
    """Sends to one client, and gives up on one that does not read."""

    def __init__(self, send: Send, *, send_seconds: float = SEND_SECONDS) -> None:
        self._send = send
        self._send_seconds = send_seconds

    async def accept(self) -> None:
        """Accept the handshake."""
        await self._send({"type": "websocket.accept"})

    async def message(self, body: dict[str, Any]) -> None:
        """Send one JSON message. Raises `SlowClientError`."""
        await self.raw(json.dumps(body, separators=(",", ":")))

    async def raw(self, body: str | bytes) -> None:
        """Send text or bytes as they are. Raises `SlowClientError`."""
        key = "bytes" if isinstance(body, bytes) else "text"
        try:
            # The server waits in here while the client's buffers are full.
            async with asyncio.timeout(self._send_seconds):
                await self._send({"type": "websocket.send", key: body})
        except TimeoutError as error:
            raise SlowClientError from error

    async def close(self, code: int, reason: str) -> None:
        """Close with a reason that the page shows."""
        await self._send({"type": "websocket.close", "code": code, "reason": reason})


async def live_socket(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    """Frames, summaries and events of the fleet. `?events_after=<id>` resumes the events."""
    await receive()  # websocket.connect
    wire = Wire(send, send_seconds=scope.get("send_seconds", SEND_SECONDS))
    await wire.accept()
    feed = feed_of_this_loop()
    mailbox = Mailbox()
    await feed.join(mailbox)
    try:
        await wire.message(
            {"kind": "hello", "now": clock.unix_seconds(), "last_event_id": feed.last_event_id}
        )
        await _resume_events(mailbox, _query(scope, "events_after"))
        await until_first(_deliver(wire, mailbox), _read_requests(receive, mailbox))
    except SlowClientError:
        logger.warning("a live viewer took nothing for %.0f s and was closed", SEND_SECONDS)
        await wire.close(TRY_AGAIN_LATER, "this page does not keep up")
    finally:
        await feed.leave(mailbox)


async def _resume_events(mailbox: Mailbox, after: str) -> None:
    if not after.isdigit():
        return
    missed = await database_sync_to_async(events_after)(int(after), limit=MISSED_EVENTS)
    mailbox.put_events([event_message(event) for event in missed])


async def _deliver(wire: Wire, mailbox: Mailbox) -> None:
    while True:
        snapshots, events, lost = await mailbox.take()
        for snapshot in snapshots:
            await wire.raw(snapshot)
        if events:
            await wire.message({"kind": "events", "events": events, "lost": lost})


async def _read_requests(receive: Receive, mailbox: Mailbox) -> None:
    """Answer `{"kind": "resync"}` and `{"kind": "watch_kv", "node": <id>}` until the client leaves."""
    while True:
        message = await receive()
        if message["type"] == "websocket.disconnect":
            return
        body = _body_of(message)
        if body.get("kind") == "resync":
            feed_of_this_loop().resend(mailbox)
        elif body.get("kind") == "watch_kv" and (node_id := _uuid_of(body.get("node"))):
            await feed_of_this_loop().watch_node(mailbox, node_id)


class _Tails:
    """How many logs each user reads in this process."""

    open: dict[int, int] = {}


async def log_socket(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    """Lines of one replica's log, at most four messages a second.

    `?member=<number>`: of a member of one that runs on several nodes; `?after=<position>` resumes.
    """
    await receive()  # websocket.connect
    wire = Wire(send)
    await wire.accept()
    user_id = scope["user"].pk
    if _Tails.open.get(user_id, 0) >= TAILS_PER_USER:
        await wire.close(TOO_MANY, f"you read {TAILS_PER_USER} logs already; close one of them")
        return
    replica_id: UUID = scope["url_route"]["kwargs"]["replica_id"]
    source, refusal = await database_sync_to_async(_find_log)(replica_id, _query(scope, "member"))
    if source is None or refusal:
        await wire.close(NOT_FOUND if source is None else UNABLE, refusal)
        return
    _Tails.open[user_id] = _Tails.open.get(user_id, 0) + 1
    try:
        tail = LogTail(source, after=_query(scope, "after") or "0")
        await until_first(tail.run(wire.message), _read_until_disconnect(receive))
    except SlowClientError:
        await wire.close(TRY_AGAIN_LATER, "this page does not keep up")
    finally:
        _Tails.open[user_id] -= 1


def _find_log(replica_id: UUID, member: str) -> tuple[LogSource | None, str]:
    """The log that is asked for, and why it cannot be shown."""
    try:
        source = find_log(replica_id, member)
    except InvalidInputError as error:
        return None, error.message
    return source, "there is no such replica" if source is None else source.problem


async def _read_until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "websocket.disconnect":
        pass


def _query(scope: dict[str, Any], name: str) -> str:
    query: bytes = scope.get("query_string", b"")
    return parse_qs(query.decode("latin-1")).get(name, [""])[-1]


def _body_of(message: dict[str, Any]) -> dict[str, Any]:
    try:
        body = json.loads(message.get("text") or "{}")
    except json.JSONDecodeError:
        return {}
    return body if isinstance(body, dict) else {}


def _uuid_of(value: object) -> str:
    """An id as the store writes it; empty for anything else."""
    try:
        return str(UUID(str(value)))
    except ValueError:
        return ""
