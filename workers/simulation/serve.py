"""The HTTP face of simulated replicas: chats in the time that the engine model says they take.

Every node has a loopback address of its own and all nodes use the same ports, so one socket for
each port, bound to the loopback interface, serves a thousand nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

import httptools
import msgspec
import uvloop

from workers.simulation.engine import EngineModel, Request
from workers.simulation.fleet import SimulatedFleet
from workers.simulation.replica import SimulatedReplica

_CHARACTERS_PER_TOKEN = 4
_DEFAULT_ANSWER_TOKENS = 64
_QUEUE_POLL_SECONDS = 0.01
_LISTEN_BACKLOG = 512
_STOP_SECONDS = 5.0
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 503: "Service Unavailable"}
_WORDS = ("simulated", "words", "without", "any", "meaning", "follow", "one", "another")


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Message(msgspec.Struct):
    role: str = "user"
    content: Any = ""


class ChatRequest(msgspec.Struct):
    """What of a chat request matters to the model; other fields are ignored."""

    messages: list[_Message]
    model: str = "simulated"
    stream: bool = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream_options: _StreamOptions | None = None

    def as_request(self, now: float, context_tokens: int) -> Request:
        """The same as the engine model sees it. Equal beginnings share a session's cache."""
        sizes = [len(str(message.content)) // _CHARACTERS_PER_TOKEN + 4 for message in self.messages]
        wanted = self.max_completion_tokens or self.max_tokens or _DEFAULT_ANSWER_TOKENS
        prompt = min(sum(sizes), context_tokens - 1)
        answer = max(1, min(wanted, context_tokens - prompt))
        first = next((str(m.content) for m in self.messages if m.role != "system"), "")
        return Request(now, prompt, answer, f"chat:{first}")


class EngineServer:
    """Listens in a thread of its own; `lock` guards the fleet."""

    def __init__(self, fleet: SimulatedFleet, lock: threading.Lock, ports: Sequence[int]) -> None:
        self.fleet = fleet
        self.lock = lock
        self._ports = ports
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._sockets: list[socket.socket] = []
        self._stopping = asyncio.Event()
        self.connections: set[asyncio.Transport] = set()

    def start(self) -> None:
        """Listen. Raises `OSError` where a port is taken or the loopback interface is out of reach."""
        self._sockets = [_listen(port) for port in self._ports]
        self._thread.start()

    def stop(self) -> None:
        """Close everything."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        servers = [
            await self._loop.create_server(lambda: _Connection(self), sock=listener, backlog=_LISTEN_BACKLOG)
            for listener in self._sockets
        ]
        await self._stopping.wait()
        for server in servers:
            server.close()
        for transport in list(self.connections):
            transport.abort()
        for server in servers:
            await server.wait_closed()


class _Connection(asyncio.Protocol):
    """One connection to one simulated engine; one request at a time."""

    def __init__(self, server: EngineServer) -> None:
        self._server = server
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)  # until connected
        self._address = ("", 0)
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._token = ""
        self._body = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._is_deaf = False
        """The machine went without a word: what is sent here is heard by nobody, now and later."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._server.connections.add(self._transport)
        self._address = transport.get_extra_info("sockname")
        with self._server.lock:
            found = self._server.fleet.find_replica(*self._address[:2])
        if self._turns_deaf():
            return
        if found is None or not found[1].is_serving:
            self._transport.abort()  # as near to a refused connection as an open port can be

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        self._server.connections.discard(self._transport)
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._turns_deaf():
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def _turns_deaf(self) -> bool:
        with self._server.lock:
            self._is_deaf = self._is_deaf or self._server.fleet.is_mute(self._address[0])
        return self._is_deaf

    # ------------------------------------------------------------------ what the parser calls
    def on_message_begin(self) -> None:
        self._path, self._token = b"", ""
        self._body.clear()

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"authorization":
            self._token = value.decode(errors="replace").removeprefix("Bearer ")

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._path == b"/health":
            self._answer(200, {"status": "ready"})
        elif self._path.startswith(b"/v1/chat/completions"):
            self._chat()
        else:
            self._fail(404, "simulated engines answer /health and /v1/chat/completions")

    # ------------------------------------------------------------------ answers
    def _chat(self) -> None:
        try:
            chat = msgspec.json.decode(bytes(self._body), type=ChatRequest)
        except msgspec.DecodeError as error:
            self._fail(400, str(error))
            return
        now = time.monotonic()
        with self._server.lock:
            found = self._server.fleet.find_replica(*self._address[:2])
            engine = found[1].engine if found else None
            if found is None or engine is None:
                self._transport.abort()
                return
            node, replica = found
            if not hmac.compare_digest(self._token.encode(), node.engine_token(replica).encode()):
                self._fail(401, "wrong token")
                return
            request = chat.as_request(now, engine.shape.context_tokens)
            engine.submit(request)
        self._task = asyncio.get_running_loop().create_task(self._serve(chat, request, replica, engine))

    async def _serve(
        self, chat: ChatRequest, request: Request, replica: SimulatedReplica, engine: EngineModel
    ) -> None:
        while not request.first_token_at:
            await asyncio.sleep(_QUEUE_POLL_SECONDS)
            with self._server.lock:
                engine.advance(time.monotonic())
        if chat.stream:
            self._transport.write(_STREAM_HEAD)
        for number in range(request.answer_tokens):
            due = request.first_token_at + number * request.token_seconds
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if replica.engine is not engine:
                if not self._turns_deaf():
                    self._transport.abort()  # the engine died under the request
                return
            if chat.stream:
                self._send_event(_chunk(chat.model, {"content": _word(number)}, None))
        if chat.stream:
            self._end_stream(chat, request)
        else:
            self._answer(200, _whole(chat.model, request))

    def _end_stream(self, chat: ChatRequest, request: Request) -> None:
        self._send_event(_chunk(chat.model, {}, "length"))
        if chat.stream_options is not None and chat.stream_options.include_usage:
            self._send_event(
                _head(chat.model, "chat.completion.chunk") | {"choices": [], "usage": _usage(request)}
            )
        done = b"data: [DONE]\n\n"
        self._transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(done), done))

    def _send_event(self, content: dict[str, Any]) -> None:
        event = b"data: " + msgspec.json.encode(content) + b"\n\n"
        self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = msgspec.json.encode(content)
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self._transport.write(head.encode() + body)

    def _fail(self, status: int, message: str) -> None:
        self._answer(status, {"error": {"message": message, "type": "simulated", "code": status}})


_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # All addresses of the loopback interface, and of no other one.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", port))
        listener.listen(_LISTEN_BACKLOG)
        listener.setblocking(False)  # noqa: FBT003 - the socket's own signature
    except OSError:
        listener.close()
        raise
    return listener


def _head(model: str, kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-simulated", "object": kind, "created": 0, "model": model}


def _chunk(model: str, delta: dict[str, str], finish: str | None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return _head(model, "chat.completion.chunk") | {"choices": [choice]}


def _whole(model: str, request: Request) -> dict[str, Any]:
    text = "".join(_words(request.answer_tokens))
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}
    return _head(model, "chat.completion") | {"choices": [choice], "usage": _usage(request)}


def _usage(request: Request) -> dict[str, Any]:
    return {
        "prompt_tokens": request.prompt_tokens,
        "completion_tokens": request.answer_tokens,
        "total_tokens": request.prompt_tokens + request.answer_tokens,
        "prompt_tokens_details": {"cached_tokens": request.cached_tokens},
    }


def _words(count: int) -> Iterator[str]:
    return (_word(number) for number in range(count))


def _word(number: int) -> str:
    return f"{_WORDS[number % len(_WORDS)]} "
