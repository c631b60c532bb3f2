"""Simulated replicas that answer HTTP, in lockstep with the simulation: real routers stand before them.

The simulation's clock stands still while bytes are under way: an arrival is sent through the router and
the clock goes on once it has come to a replica; a first token or an end goes on once the client has seen
it. So what is compared is where requests go, by routers that see nothing but their own traffic, and a
busy machine changes no figure. How fast a router itself is, `bench.gateway` says.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import threading
from array import array
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httptools
import msgspec

from bench.gateway.contenders import KEY, MODEL
from bench.gateway.programs import ProgramError
from bench.routing.world import Job, SimulatedReplica
from bench.traces import TraceRequest

TEXT_BYTES_PER_TOKEN = 4
_VOCABULARY = 128_000
_PATIENCE_SECONDS = 60.0
_LOOK_SECONDS = 0.05
_WAITING = "exaops_gateway_waiting_requests "
_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_CHAT = b"/v1/chat/completions"
_RENDER = b"/v1/chat/completions/render"
"""Where vllm-router has a prompt turned into tokens before it looks for a replica."""
_LAST_CHUNK = b"0\r\n\r\n"


class _Message(msgspec.Struct):
    content: str


class _Numbered(msgspec.Struct):
    """What these replicas read of a body: which request of the trace it is, and its text."""

    messages: list[_Message] = []
    seed: int | None = None


_decoder = msgspec.json.Decoder(_Numbered)


def make_body(request: TraceRequest, number: int) -> bytes:
    """Return a chat whose text has the trace's lengths; equal prefix ids are equal text."""
    block_bytes = request.block_tokens * TEXT_BYTES_PER_TOKEN
    text = "".join(_block_text(prefix_id, block_bytes) for prefix_id in request.prefix_ids)
    text = text[: request.prompt_tokens * TEXT_BYTES_PER_TOKEN]
    return json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": request.output_tokens,
            "seed": number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()


def _block_text(prefix_id: int, size: int) -> str:
    digest = hashlib.blake2b(prefix_id.to_bytes(8, "little")).hexdigest()
    return (digest * (size // len(digest) + 1))[:size]


def _tokens_of(asked: _Numbered) -> list[int]:
    """Return a token for each four characters; equal text is equal tokens."""
    text = "".join(message.content for message in asked.messages).encode()
    whole = len(text) - len(text) % TEXT_BYTES_PER_TOKEN
    return [token % _VOCABULARY for token in array("I", text[:whole])]


class _ReplicaConnection(asyncio.Protocol):
    """One connection of a router to one simulated replica."""

    def __init__(self, engines: SimulatedEngines, name: str) -> None:
        self._engines = engines
        self._name = name
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self._target = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - a stream's server makes no other
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # a router that tries HTTP/2 first
            self.hang_up()

    def on_url(self, target: bytes) -> None:
        self._target = target

    def on_body(self, part: bytes) -> None:
        self._body.append(part)

    def on_message_complete(self) -> None:
        body, self._body = b"".join(self._body), []
        asked = _decoder.decode(body) if body else _Numbered()
        if self._target == _RENDER:
            self._answer({"request_id": "r", "model": MODEL, "token_ids": _tokens_of(asked)})
        elif asked.seed is None or self._target != _CHAT:  # a check of health, a first try
            self._answer({"status": "ok", "object": "list", "data": [], "id": MODEL, "choices": []})
        else:
            self._engines.note_arrival(asked.seed, self._name, self)

    def _answer(self, content: dict[str, Any]) -> None:
        body = msgspec.json.encode(content)
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.send(head.encode() + body)

    def hang_up(self) -> None:
        """End the connection."""
        if self.transport is not None:
            self.transport.close()

    def send(self, data: bytes) -> None:
        """Write to the router."""
        if self.transport is not None:
            self.transport.write(data)


class SimulatedEngines:
    """The HTTP side of simulated replicas: an address each, one port for all."""

    def __init__(self) -> None:
        self._arrived: dict[int, asyncio.Future[str]] = {}
        self._connections: dict[int, _ReplicaConnection] = {}

    async def listen(self, hosts: Sequence[str], names: Sequence[str], port: int) -> list[asyncio.Server]:
        """Listen for each replica. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        return [
            await loop.create_server(lambda name=name: _ReplicaConnection(self, name), host, port)  # type: ignore[misc]  # bound early on purpose
            for host, name in zip(hosts, names, strict=True)
        ]

    def expect(self, number: int) -> asyncio.Future[str]:
        """Return what will name the replica that this request comes to."""
        arrived = self._arrived[number] = asyncio.get_running_loop().create_future()
        return arrived

    def note_arrival(self, number: int, name: str, connection: _ReplicaConnection) -> None:
        """A request has come to a replica."""
        self._connections[number] = connection
        arrived = self._arrived.pop(number, None)
        if arrived is not None and not arrived.done():
            arrived.set_result(name)

    def arrived(self, numbers: Iterable[int]) -> list[int]:
        """Which of these have come to a replica."""
        return [number for number in numbers if number not in self._arrived]

    def send_first(self, number: int) -> None:
        """Send an answer's head and its first token."""
        self._connections[number].send(_HEAD + _event({"choices": [_choice("a", None)]}))

    def send_rest(self, number: int, job: Job) -> None:
        """Send what is left of an answer, with its usage."""
        request = job.request
        usage = {
            "prompt_tokens": request.prompt_tokens,
            "completion_tokens": request.output_tokens,
            "total_tokens": request.prompt_tokens + request.output_tokens,
            "prompt_tokens_details": {"cached_tokens": job.cached_tokens},
        }
        self._connections.pop(number).send(
            _event({"choices": [_choice("b", "length")]})
            + _event({"choices": [], "usage": usage})
            + _chunk(b"data: [DONE]\n\n")
            + _LAST_CHUNK
        )


def _choice(text: str, finish: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": finish}


def _event(content: dict[str, Any]) -> bytes:
    whole = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL, **content}
    return _chunk(b"data: " + json.dumps(whole).encode() + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class _ClientConnection(asyncio.Protocol):
    """One connection of the client to the router: one request at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._refusal: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - a stream's client makes no other
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"the router hung up: {error!r}")

    def send(self, head: bytes, body: bytes) -> None:
        """Send a request; one was answered before, or none was sent."""
        loop = asyncio.get_running_loop()
        self.first, self.ended = loop.create_future(), loop.create_future()
        if self._transport is not None:
            self._transport.writelines([head, body])

    def close(self) -> None:
        """Hang up."""
        for waited in (self.first, self.ended):
            waited.cancel()
        if self._transport is not None:
            self._transport.abort()

    def on_body(self, part: bytes) -> None:
        if self._parser.get_status_code() != 200:  # noqa: PLR2004 - HTTP's
            self._refusal.append(part)
        elif not self.first.done():
            self.first.set_result(None)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() != 200:  # noqa: PLR2004 - HTTP's
            self._fail(
                f"the router answered {self._parser.get_status_code()}: {b''.join(self._refusal)[:200]!r}"
            )
        elif not self.ended.done():
            self.ended.set_result(None)
        self._parser = httptools.HttpResponseParser(self)

    def _fail(self, reason: str) -> None:
        for waited in (self.first, self.ended):
            if not waited.done():
                waited.set_exception(ProgramError(reason))
                waited.exception()  # looked at: whoever waits for it raises it still


@dataclass(slots=True)
class _Sent:
    number: int
    connection: _ClientConnection


@dataclass(slots=True)
class ThroughRouter:
    """A router as a policy: it is asked by sending it the request."""

    loop: asyncio.AbstractEventLoop
    engines: SimulatedEngines
    ports: Sequence[int]
    """One for each router; requests take turns."""
    sessions: Sequence[str] | None = None
    """Session of each request in the trace's order, sent in a header; `None`: requests are anonymous."""
    tells_waiting: bool = False
    """Whether it may hold requests back, and its page for Prometheus says how many."""
    tell: Callable[[Sequence[SimulatedReplica], float], None] = lambda _replicas, _now: None
    """Tells the router's store what replicas say of themselves, with the simulation's time."""
    _next: int = 0
    _held: dict[int, tuple[TraceRequest, asyncio.Future[str]]] = field(default_factory=dict)
    _replicas: dict[str, SimulatedReplica] = field(default_factory=dict)
    _open: dict[int, _Sent] = field(default_factory=dict)
    _idle: dict[int, list[_ClientConnection]] = field(default_factory=lambda: defaultdict(list))
    """By port."""

    def pick(
        self, request: TraceRequest, replicas: Sequence[SimulatedReplica], now: float
    ) -> SimulatedReplica | None:
        """Send the request and see where it comes out. Raises `ProgramError`."""
        self.tell(replicas, now)
        self._replicas = self._replicas or {replica.name: replica for replica in replicas}
        number, self._next = self._next, self._next + 1
        name = self._wait(self._ask(request, number))
        return None if name is None else self._replicas[name]

    def released(self) -> Sequence[tuple[TraceRequest, SimulatedReplica]]:
        """See which of those that the router held back it has sent. Raises `ProgramError`."""
        return self._wait(self._see_released()) if self._held else ()

    def on_first_token(self, replica: SimulatedReplica, job: Job) -> None:
        """Let the router see the first token."""
        del replica
        sent = self._open[id(job.request)]
        self._wait(self._show_first(sent))

    def on_end(self, replica: SimulatedReplica, job: Job) -> None:
        """Let the router see the end."""
        del replica
        sent = self._open.pop(id(job.request))
        self._wait(self._show_rest(sent, job))

    def close(self) -> None:
        """Hang up."""
        self._wait(self._hang_up())

    async def _show_first(self, sent: _Sent) -> None:
        self.engines.send_first(sent.number)
        await _settle(sent.connection.first)

    async def _show_rest(self, sent: _Sent, job: Job) -> None:
        self.engines.send_rest(sent.number, job)
        await _settle(sent.connection.ended)
        self._idle[self._port_of(sent.number)].append(sent.connection)

    async def _hang_up(self) -> None:
        idle = itertools.chain.from_iterable(self._idle.values())
        for connection in (*idle, *(sent.connection for sent in self._open.values())):
            connection.close()

    async def _see_released(self) -> list[tuple[TraceRequest, SimulatedReplica]]:
        waiting = await self._count_waiting()
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while len(gone := self.engines.arrived(self._held)) < len(self._held) - waiting:  # noqa: ASYNC110 - many arrivals are no one event
                await asyncio.sleep(_LOOK_SECONDS)
        released = [self._held.pop(number) for number in gone]
        return [(request, self._replicas[arrived.result()]) for request, arrived in released]

    async def _count_waiting(self) -> int:
        """Ask the routers how many requests they hold back."""
        return sum([await self._count_waiting_at(port) for port in self.ports])

    async def _count_waiting_at(self, port: int) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        page = (await reader.read(-1)).decode()
        writer.close()
        line = next(line for line in page.splitlines() if line.startswith(_WAITING))
        return int(float(line.rpartition(" ")[2]))

    async def _ask(self, request: TraceRequest, number: int) -> str | None:
        arrived = self.engines.expect(number)
        idle = self._idle[self._port_of(number)]
        connection = idle.pop() if idle else await self._connect(self._port_of(number))
        body = make_body(request, number)
        session = f"x-session-id: {self.sessions[number]}\r\n" if self.sessions else ""
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {KEY}\r\n"
            f"content-type: application/json\r\n{session}content-length: {len(body)}\r\n\r\n"
        )
        connection.send(head.encode(), body)
        self._open[id(request)] = _Sent(number, connection)
        seconds = _LOOK_SECONDS if self.tells_waiting else _PATIENCE_SECONDS
        for _ in range(int(_PATIENCE_SECONDS / seconds)):
            await asyncio.wait(
                (arrived, connection.first), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if connection.first.done():
                connection.first.result()  # raises: it was answered without a replica
            if arrived.done():
                return arrived.result()
            if self.tells_waiting and await self._count_waiting() > len(self._held) and not arrived.done():
                self._held[number] = request, arrived
                return None
        raise ProgramError(f"a request was lost in the router for {_PATIENCE_SECONDS:.0f} s")

    def _port_of(self, number: int) -> int:
        return self.ports[number % len(self.ports)]

    async def _connect(self, port: int) -> _ClientConnection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_ClientConnection, "127.0.0.1", port)
        return connection

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401 - what the work returns
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()


async def _settle(waited: asyncio.Future[Any]) -> Any:  # noqa: ANN401 - what was waited for
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            return await asyncio.shield(waited)
    except TimeoutError as error:
        raise ProgramError(f"a request was lost in the router for {_PATIENCE_SECONDS:.0f} s") from error


@contextmanager
def listening(
    hosts: Sequence[str], names: Sequence[str], port: int
) -> Iterator[tuple[asyncio.AbstractEventLoop, SimulatedEngines]]:
    """Have simulated replicas listen, in a thread, for as long as the block lasts. Raises `OSError`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="simulated-engines")
    thread.start()
    try:
        engines = SimulatedEngines()
        servers = asyncio.run_coroutine_threadsafe(engines.listen(hosts, names, port), loop).result()
        try:
            yield loop, engines
        finally:
            for server in servers:
                loop.call_soon_threadsafe(server.close)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
