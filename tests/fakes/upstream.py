"""A small engine-shaped HTTP server on a real socket, whose answers a test chooses."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 4},
}


@dataclass(eq=False)
class Received:
    """One request as it arrived."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the peer closes before the answer is over."""

    def header(self, name: str) -> str | None:
        """First value of a header, by its name in lower case."""
        return next((value for header, value in self.headers if header == name), None)


Answer = Callable[[Received, asyncio.StreamWriter], Awaitable[None]]
"""Writes an answer. To break it, close the writer's transport."""


class StubEngine:
    """Listens on a free loopback port; keeps connections alive."""

    def __init__(self, answer: Answer, *, host: str = "127.0.0.1") -> None:
        self.answer = answer
        self.host = host
        self.port = 0
        self.requests: list[Received] = []
        self.connections = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self, port: int = 0) -> StubEngine:
        """Listen; the port is then known."""
        self._server = await asyncio.start_server(self._serve, self.host, port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        """Refuse connections from now on, and cut those that are open."""
        if self._server is not None:
            self._server.close()
            for writer in list(self._writers):
                writer.transport.abort()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while (request := await _read_request(reader)) is not None:
                self.requests.append(request)
                await self._answer(request, reader, writer)
                if writer.is_closing():
                    return
        except (OSError, asyncio.IncompleteReadError):
            return
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _answer(
        self, request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        work = asyncio.ensure_future(self.answer(request, writer))
        watch = asyncio.ensure_future(_wait_for_end(reader))
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            request.gone.set()
            work.cancel()
            writer.transport.abort()
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await work
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await watch


async def _wait_for_end(reader: asyncio.StreamReader) -> None:
    """Return when the peer has closed; nothing is read, so a next request stays in place."""
    while not reader.at_eof() and reader.exception() is None:  # noqa: ASYNC110 - streams have no event for it
        await asyncio.sleep(0.005)


async def _read_request(reader: asyncio.StreamReader) -> Received | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    lines = head.decode("latin-1").split("\r\n")
    method, path, _ = lines[0].split(" ")
    headers = [
        (name.lower(), value.strip())
        for name, _, value in (line.partition(":") for line in lines[1:] if line)
    ]
    size = int(dict(headers).get("content-length", "0"))
    return Received(method, path, headers, await reader.readexactly(size))


def replies(payload: object, status: int = 200, extra: str = "") -> Answer:
    """A JSON answer; `extra` are complete header lines."""
    body = json.dumps(payload).encode()

    async def answer(request: Received, writer: asyncio.StreamWriter) -> None:  # noqa: ARG001 - an Answer
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{extra}"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()

    return answer


def event(payload: object) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def token(text: str) -> bytes:
    """One event that carries a piece of a chat answer."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return event(
        {"id": "c", "object": "chat.completion.chunk", "model": "m", "created": 1, "choices": [choice]}
    )


DONE = b"data: [DONE]\n\n"


def chunk(payload: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def streams(
    events: Sequence[bytes],
    *,
    ends: bool = True,
    gap_seconds: float = 0.0,
    hold: asyncio.Event | None = None,
) -> Answer:
    """A stream, each event in a chunk of its own.

    Without `ends` the connection breaks after the events; with `hold` it stays open after them
    until the event is set.
    """

    async def answer(request: Received, writer: asyncio.StreamWriter) -> None:  # noqa: ARG001 - an Answer
        writer.write(STREAM_HEAD)
        for item in events:
            writer.write(chunk(item))
            await writer.drain()
            await asyncio.sleep(gap_seconds)
        if hold is not None:
            await hold.wait()
        if ends:
            writer.write(b"0\r\n\r\n")
        else:
            writer.close()

    return answer


async def never(request: Received, writer: asyncio.StreamWriter) -> None:  # noqa: ARG001 - an Answer
    """Take the request and say nothing."""
    await asyncio.Event().wait()


async def hang_up(request: Received, writer: asyncio.StreamWriter) -> None:  # noqa: ARG001 - an Answer
    """Take the request and close."""
    writer.close()


CHAT = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
    "usage": USAGE,
}
