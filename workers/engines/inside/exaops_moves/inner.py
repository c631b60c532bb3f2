"""Asking the engine inside its own process, past its network side; and what clients may not ask of it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

KV_FIELD = "kv_transfer_params"
MOST_BODY_BYTES = 64 << 20
_MAY_HIDE = re.compile(rb"\\u00[2-7]|\x00")
"""Letters that are escaped, or another encoding than UTF-8: a field's name may be in there unseen."""


class BodyTooLargeError(Exception):
    """More than anybody should send."""


async def read_body(receive: Receive, most_bytes: int = MOST_BODY_BYTES) -> bytes | None:
    """Read a request's body; `None` where the client left. Raises `BodyTooLargeError`."""
    data = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        data += message.get("body", b"")
        if len(data) > most_bytes:
            raise BodyTooLargeError
        if not message.get("more_body"):
            return bytes(data)


def replayed(body: bytes, receive: Receive) -> Receive:
    """Give a body that was read to whoever reads next, and then what else comes."""
    left = [body]

    async def give() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return give


async def ask(app: App, scope: Scope, path: str, asked: dict[str, Any] | None, key: str) -> tuple[int, bytes]:
    """Put a request to the engine's own server and return status and body; without `asked` by GET.

    `scope` is that of the request on whose behalf this is. A cancelled call is an aborted request.
    """
    body = b"" if asked is None else json.dumps(asked).encode()
    inner = {
        **scope,
        "method": "GET" if asked is None else "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [
            (b"host", b"localhost"),
            (b"authorization", b"Bearer " + key.encode()),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
    }
    status, pieces = 0, bytearray()

    async def never() -> Message:
        await asyncio.get_running_loop().create_future()
        raise AssertionError  # nobody ends that future

    async def take(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            pieces.extend(message.get("body", b""))

    await app(inner, replayed(body, never), take)
    return status, bytes(pieces)


def names_kv(body: bytes) -> bool:
    """Whether a request names KV of another engine, at any depth: that is for moves alone.

    It would have this engine connect to wherever it says, and read there what is not the client's.
    """
    if KV_FIELD.encode() not in body and not _MAY_HIDE.search(body):
        return False
    found = False

    def look(pairs: list[tuple[str, Any]]) -> None:
        nonlocal found
        found = found or any(name == KV_FIELD for name, _ in pairs)

    try:
        json.loads(body, object_pairs_hook=look)
    except (ValueError, RecursionError):
        return KV_FIELD.encode() in body or b"\x00" in body
    return found
