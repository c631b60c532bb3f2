"""An open-loop load of short chats through a gateway: what is due is asked, whatever became of the last."""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from bench.failing.record import Asked

_OK = 200
_SESSIONS = 64
_TURNS = (4, 24)
_ANSWER_TOKENS = 12


@dataclass
class Talk:
    """One client of one gateway; keeps a record of everything that it asked."""

    gateway_url: str
    api_key: str
    model: str
    timeout_seconds: float = 60.0
    asked: list[Asked] = field(default_factory=list)

    async def ask(self, kind: str, *, session_id: str = "", death: str = "") -> Asked:
        """Stream one short answer to its end, on a connection of its own. Never raises for a failure."""
        reading = _Reading(time.monotonic())
        try:
            async with asyncio.timeout(self.timeout_seconds):
                await self._exchange(reading, session_id)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
            reading.error = type(error).__name__
        asked = Asked(
            kind=kind,
            started_at=reading.started_at,
            first_byte_at=reading.first_byte_at,
            ended_at=time.monotonic(),
            status=reading.status,
            node_id=reading.node_id,
            error=reading.error,
            death=death,
        )
        self.asked.append(asked)
        return asked

    async def _exchange(self, reading: _Reading, session_id: str) -> None:
        parts = urlsplit(self.gateway_url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write(self._request(session_id))
            head = await reader.readuntil(b"\r\n\r\n")
            reading.take_head(head)
            reading.take_body(await reader.read(-1))
        finally:
            writer.close()

    def _request(self, session_id: str) -> bytes:
        content = f"{session_id or uuid.uuid4()}: tell me of the sea."
        body = json.dumps(
            {
                "model": self.model,
                "messages": [{"role": "user", "content": content}],
                "max_tokens": _ANSWER_TOKENS,
                "stream": True,
            }
        ).encode()
        session = f"x-session-id: {session_id}\r\n" if session_id else ""
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n"
            f"authorization: Bearer {self.api_key}\r\ncontent-type: application/json\r\n{session}"
            f"content-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


@dataclass
class _Reading:
    """An answer, as far as it has come."""

    started_at: float
    first_byte_at: float | None = None
    status: int = 0
    node_id: str = ""
    error: str = ""

    def take_head(self, head: bytes) -> None:
        self.first_byte_at = time.monotonic()
        lines = head.decode("latin-1").split("\r\n")
        self.status = int(lines[0].split(" ")[1])
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.node_id = fields.get("x-exaops-node", "")

    def take_body(self, body: bytes) -> None:
        if self.status != _OK:
            self.error = f"{self.status} {body[:120].decode(errors='replace')}"
        elif b"data: [DONE]" not in body:
            self.error = "the stream ended without [DONE]"


async def keep_asking(
    talk: Talk, *, per_second: float, may_go_on: Callable[[], bool], rng: random.Random
) -> None:
    """Ask new questions and turns of sessions, by turns, until told to stop; then wait for all answers."""
    sessions = [_Session(rng) for _ in range(_SESSIONS)]
    tasks: set[asyncio.Task[Asked]] = set()
    due = time.monotonic()
    number = 0
    while may_go_on():
        number += 1
        if number % 2:
            task = asyncio.create_task(talk.ask("new"))
        else:
            task = asyncio.create_task(talk.ask("turn", session_id=rng.choice(sessions).next_turn()))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        due += rng.expovariate(per_second)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
    if tasks:
        await asyncio.wait(tasks)


class _Session:
    """A conversation that ends after some turns and makes room for a new one."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._left = 0
        self._name = ""

    def next_turn(self) -> str:
        if self._left == 0:
            self._name, self._left = (
                str(uuid.UUID(int=self._rng.getrandbits(128))),
                self._rng.randint(*_TURNS),
            )
        self._left -= 1
        return self._name
