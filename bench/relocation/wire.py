"""One HTTP request on a connection of its own: what the benchmark asks engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

OK = 200
_HEAD_BYTES = 1 << 16


class UnansweredError(Exception):
    """The other side refused, went away or did not answer in time."""


async def ask(
    address: str,
    method: str,
    path: str,
    *,
    key: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
    seconds: float = 30.0,
) -> tuple[int, dict[str, Any]]:
    """Return status and JSON. Raises `UnansweredError`."""
    data = b"" if body is None else json.dumps(body).encode()
    fields = {
        "host": address,
        "authorization": f"Bearer {key}",
        "content-type": "application/json",
        "content-length": str(len(data)),
        "connection": "close",
        **(headers or {}),
    }
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    try:
        async with asyncio.timeout(seconds):
            return await _exchange(address, head.encode() + b"\r\n" + data)
    except (OSError, TimeoutError, EOFError, ValueError, IndexError) as error:
        raise UnansweredError(f"{method} {path}: {error!r}") from error


async def _exchange(address: str, request: bytes) -> tuple[int, dict[str, Any]]:
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port), limit=_HEAD_BYTES)
    try:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.read(-1)
    finally:
        writer.close()
    return int(head.split(b" ", 2)[1]), json.loads(body)
