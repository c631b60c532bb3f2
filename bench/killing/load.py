"""An open-loop load of streams and plain requests, by a client that does what the official ones do.

Each request has a connection of its own. One that got no byte is sent again, twice at most, as those
clients do after a connection error; what broke off later is a failure.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_OK = 200
_TRIES = 3
_RETRY_SECONDS = 0.05
_PROMPT_WORDS = 150
_WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
)


@dataclass(slots=True)
class Seen:
    """One request as its client saw it. Times are of the monotonic clock."""

    is_stream: bool
    started_at: float
    ended_at: float = 0.0
    replica_id: str = ""
    """Who began the answer."""
    pieces_at: list[float] = field(default_factory=list)
    """When each piece of text came."""
    tries: int = 0
    error: str = ""
    """Why it did not end well; empty if it did."""


@dataclass
class Load:
    """One client of one gateway address. All requests are kept, also those that are still open."""

    gateway_url: str
    api_key: str
    model: str
    answer_tokens: int
    continues: bool
    timeout_seconds: float = 60.0
    seen: list[Seen] = field(default_factory=list)

    async def run(self, *, per_second: float, may_go_on: Callable[[], bool], rng: random.Random) -> None:
        """Ask by chance, streams and plain requests by turns, whatever becomes of them; then wait for all."""
        tasks: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        number = 0
        while may_go_on():
            number += 1
            task = asyncio.create_task(self.ask(is_stream=bool(number % 2), rng=rng))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            due += rng.expovariate(per_second)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        if tasks:
            await asyncio.wait(tasks)

    async def ask(self, *, is_stream: bool, rng: random.Random) -> None:
        """Ask once, and keep what came of it. Never raises for a failure."""
        seen = Seen(is_stream, time.monotonic())
        self.seen.append(seen)
        request = self._request(is_stream=is_stream, rng=rng)
        while True:
            seen.tries += 1
            seen.error = await self._try(request, seen)
            if not seen.error or seen.replica_id or seen.tries == _TRIES:
                break
            await asyncio.sleep(_RETRY_SECONDS)
        seen.ended_at = time.monotonic()

    async def _try(self, request: bytes, seen: Seen) -> str:
        parts = urlsplit(self.gateway_url)
        writer = None
        try:
            async with asyncio.timeout(self.timeout_seconds):
                reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
                writer.write(request)
                return await _read_answer(reader, seen)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
            return f"{type(error).__name__}: {error}"[:120]
        finally:
            if writer is not None:
                writer.close()

    def _request(self, *, is_stream: bool, rng: random.Random) -> bytes:
        words = " ".join(rng.choice(_WORDS) for _ in range(_PROMPT_WORDS))
        body = json.dumps(
            {
                "model": self.model,
                "messages": [{"role": "user", "content": f"{uuid.UUID(int=rng.getrandbits(128))} {words}"}],
                "max_tokens": self.answer_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": is_stream,
            }
        ).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n"
            f"authorization: Bearer {self.api_key}\r\ncontent-type: application/json\r\n"
            f"x-continue-stream: {str(self.continues).lower()}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


async def _read_answer(reader: asyncio.StreamReader, seen: Seen) -> str:
    """Read an answer to its end. Returns why it is no good, or nothing."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head)}
    status = int(head[0].split(" ")[1])
    if status != _OK:
        return f"{status} {(await reader.read(-1))[:100].decode(errors='replace')}"
    seen.replica_id = fields.get("x-exaops-replica", "")
    if not seen.is_stream:
        await reader.readexactly(int(fields["content-length"]))
        return ""
    while line := await reader.readline():
        if b'"content":"' in line and b'"content":""' not in line:
            seen.pieces_at.append(time.monotonic())
        elif line.startswith(b'data: {"error"'):
            return line[:200].decode(errors="replace")
        elif line.startswith(b"data: [DONE]"):
            return ""
    return "the stream ended without [DONE]"
