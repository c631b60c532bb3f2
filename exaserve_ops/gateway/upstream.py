"""Connections to engines: one protocol object for each, and a pool of idle ones for each replica."""

from __future__ import annotations

import asyncio
import enum
import functools
import socket
import time
from dataclasses import dataclass
from typing import Protocol, cast

import httptools

from exaserve_ops.gateway import headers
from exaserve_ops.gateway.framing import ChunkedFrame, CloseFrame, Frame, FramingError, LengthFrame
from exaserve_ops.gateway.outbox import Outbox

_LONGEST_HEAD_BYTES = 64 * 1024
_HEAD_END = b"\r\n\r\n"
_FIRST_FINAL_STATUS = 200
_BODILESS_STATUSES = frozenset({204, 304})
_JOINED_BODY_BYTES = 64 * 1024
"""Up to this size head and body leave in one write; beyond it, copying costs more than a call."""
_DEAD_HOST_MILLISECONDS = 2500
"""What a host's kernel does not acknowledge for so long was sent to nobody. Engines take no part in it:
a busy one is never taken for dead."""
_KEEPALIVE_SECONDS = 1
_REMEMBERED_HEADS = 1024
_REMEMBERED_HEAD_BYTES = 1024


class Framing(enum.Enum):
    """How an answer's body is delimited."""

    LENGTH = "length"
    CHUNKED = "chunked"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """Head of an engine's answer."""

    status: int
    opening: bytes
    """Status line and header lines that the client gets."""
    framing: Framing
    length_bytes: int = 0
    is_stream: bool = False
    keep_alive: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is a success that is no stream, of a known length, on a connection that stays."""
        return (
            self.status == _FIRST_FINAL_STATUS
            and self.framing is Framing.LENGTH
            and self.length_bytes > 0
            and self.keep_alive
            and not self.is_stream
        )

    def frame(self, *, whole_events: bool = True) -> Frame:
        """A frame for the body, at its start. `whole_events`: of a stream, pass no half of one."""
        if self.framing is Framing.LENGTH:
            return LengthFrame(self.length_bytes)
        if self.framing is Framing.CHUNKED:
            return ChunkedFrame(whole_chunks=self.is_stream and whole_events)
        return CloseFrame()


class Listener(Protocol):
    """Who gets an answer. Exactly one of `on_answer`, `on_complete` and `on_lost` ends it."""

    takes_whole: bool
    """Whether `on_answer` may be called."""

    def on_answer(self, head: AnswerHead, body: bytes) -> None:
        """All of a plain answer came at once; nothing else is called for it."""

    def on_head(self, head: AnswerHead) -> Frame:
        """The answer began; returns what its body is to be read by."""

    def on_body(self, passed: bytes, payload: bytes) -> None:
        """Bytes for the client, and the part of the body that is in them."""

    def on_read_done(self) -> None:
        """All of one read was handed over."""

    def on_complete(self) -> None:
        """The answer is whole."""

    def on_lost(self, reason: str, *, any_received: bool) -> None:
        """The connection died, or what came was no HTTP, before the answer was whole."""


class UpstreamConnection(asyncio.Protocol):
    """One connection to an engine, with at most one request on it."""

    __slots__ = (
        "_any_received",
        "_frame",
        "_is_paused",
        "_keep_alive",
        "_listener",
        "_pool",
        "_read",
        "_transport",
        "_unsent",
        "idle_since_seconds",
        "is_reused",
    )

    def __init__(self, pool: UpstreamPool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)  # until connected
        self._listener: Listener | None = None
        self._frame: Frame | None = None
        self._read = b""
        self._unsent = b""
        self._any_received = False
        self._keep_alive = False
        self._is_paused = False
        self.is_reused = False
        self.idle_since_seconds = 0.0

    # ------------------------------------------------------------------ what exchanges call
    def send(self, listener: Listener, head: bytes, body: bytes) -> None:
        """Send a request; its answer goes to the listener."""
        self._listener = listener
        self._frame = None
        self._read = b""
        self._unsent = b""
        self._any_received = False
        if self._transport.is_closing():
            return  # closed since it was taken; `connection_lost` is about to say so
        if len(body) <= _JOINED_BODY_BYTES:
            self._unsent = head + body
            self._pool.outbox.add(self)
        else:
            # An engine that is too busy to read keeps its window shut, which its kernel says at once.
            # To the time-out that is the same as a host that is gone.
            notice_dead_host(self._transport, after_milliseconds=0)
            self._transport.write(head)
            self._transport.write(body)

    def flush(self) -> None:
        """Hand the request to the transport."""
        request, self._unsent = self._unsent, b""
        if request and not self._transport.is_closing():
            self._transport.write(request)

    def pause(self) -> None:
        """Read no more until `resume`: the client is slower than the engine."""
        if not self._is_paused and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Go on reading."""
        if self._is_paused and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once, which tells the engine to stop; the listener hears nothing more."""
        self._listener = None
        self._transport.abort()

    @property
    def has_spoken(self) -> bool:
        """Whether a byte came back since the request was sent."""
        return self._any_received

    def is_usable(self) -> bool:
        """Whether an idle connection may carry a request."""
        return not self._transport.is_closing()

    # ------------------------------------------------------------------ what the event loop calls
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        set_no_delay(self._transport)
        notice_dead_host(self._transport)

    def data_received(self, data: bytes) -> None:
        listener = self._listener
        if listener is None or self._unsent:
            self._transport.abort()  # an engine that speaks without being asked is not to be trusted
            return
        self._any_received = True
        try:
            if self._frame is None and self._take_whole(listener, data):
                return
            rest = data if self._frame else self._read_head(listener, data)
            if rest and self._frame and self._listener is listener:
                passed = self._frame.feed(rest)
                listener.on_body(passed, self._frame.payload)
        except (FramingError, httptools.HttpParserError) as error:
            self.abort()
            listener.on_lost(f"bad answer: {error}", any_received=True)
            return
        if self._listener is not listener:
            return  # it gave up while it was being told
        listener.on_read_done()
        if self._frame and self._frame.complete:
            self._complete(listener)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        listener, self._listener = self._listener, None
        if listener is None:
            return
        if self._frame is not None:
            self._frame.eof()
            if self._frame.complete:
                listener.on_complete()
                return
        listener.on_lost(repr(exc) if exc else "closed", any_received=self._any_received)

    def _take_whole(self, listener: Listener, data: bytes) -> bool:
        """Take an answer that is all in this read, as most are that are no streams. Returns whether it is.

        In one step instead of by head, body and end: that saves a twelfth of a request's own time.
        """
        end = data.find(_HEAD_END, 0, _REMEMBERED_HEAD_BYTES)
        if end < 0 or self._read or not listener.takes_whole:
            return False
        end += len(_HEAD_END)
        head = _remembered_head(data[:end])
        if not head.is_plain or len(data) - end != head.length_bytes:
            return False
        if self._transport.get_write_buffer_size():
            return False
        self._listener = None
        self.is_reused = True
        self._pool.give_back(self)
        listener.on_answer(head, data[end:])
        return True

    def _read_head(self, listener: Listener, data: bytes) -> bytes:
        """Collect and read the head. Returns what follows it, which is nothing until it is whole."""
        if self._read:
            data = self._read + data
        while (end := data.find(_HEAD_END)) >= 0:
            end += len(_HEAD_END)
            raw = data[:end]
            head = _remembered_head(raw) if end <= _REMEMBERED_HEAD_BYTES else read_answer_head(raw)
            data = data[end:]
            if head.status < _FIRST_FINAL_STATUS:
                continue  # 100 Continue and the like are for us
            self._keep_alive = head.keep_alive
            self._read = b""
            self._frame = listener.on_head(head)
            return data
        if len(data) > _LONGEST_HEAD_BYTES:
            raise FramingError("head is too large")
        self._read = data
        return b""

    def _complete(self, listener: Listener) -> None:
        self._listener = None
        # A request that the engine did not read to its end would become the next one's beginning.
        if self._keep_alive and self._transport.get_write_buffer_size() == 0:
            self.is_reused = True
            self.resume()
            self._pool.give_back(self)
        else:
            self._transport.close()
        listener.on_complete()


class UpstreamPool:
    """Connections to one replica at one address."""

    __slots__ = (
        "_connect_seconds",
        "_idle",
        "_idle_limit",
        "_idle_seconds",
        "_retired",
        "host",
        "outbox",
        "port",
    )

    def __init__(
        self,
        host: str,
        port: int,
        *,
        outbox: Outbox,
        connect_seconds: float,
        idle_seconds: float,
        idle_limit: int,
    ) -> None:
        self.outbox = outbox
        self.host = host.removeprefix("[").removesuffix("]")
        self.port = port
        self._connect_seconds = connect_seconds
        self._idle_seconds = idle_seconds
        self._idle_limit = idle_limit
        self._idle: list[UpstreamConnection] = []
        self._retired = False

    def take(self) -> UpstreamConnection | None:
        """Return the connection that was used last, if one is idle."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable():
                return connection
        return None

    async def connect(self) -> UpstreamConnection:
        """Open a fresh connection. Raises `OSError` or `TimeoutError`."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_seconds):
            _, connection = await loop.create_connection(
                lambda: UpstreamConnection(self), self.host, self.port
            )
        return connection

    def give_back(self, connection: UpstreamConnection) -> None:
        """Keep an idle connection for the next request, or close it if there are enough."""
        if self._retired or len(self._idle) >= self._idle_limit:
            connection.abort()
            return
        connection.idle_since_seconds = time.monotonic()
        self._idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        """The engine closed this connection."""
        if connection in self._idle:
            self._idle.remove(connection)

    def close_idle(self, now: float) -> None:
        """Close what has been idle for too long."""
        while self._idle and now - self._idle[0].idle_since_seconds > self._idle_seconds:
            self._idle.pop(0).abort()

    def retire(self) -> None:
        """The replica is gone from here: keep nothing idle; open requests end by themselves."""
        self._retired = True
        while self._idle:
            self._idle.pop().abort()


class _HeadReader:
    """Collects what the parser finds in a head."""

    __slots__ = ("codings", "content_length", "headers", "is_stream")

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.content_length: int | None = None
        self.codings = b""
        self.is_stream = False

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self.headers.append((name, value))
        if name == b"content-length":
            self.content_length = int(value)
        elif name == b"transfer-encoding":
            self.codings = value.strip().lower()
        elif name == b"content-type":
            self.is_stream = value.lower().startswith(b"text/event-stream")


def read_answer_head(data: bytes) -> AnswerHead:
    """Read one whole head. Raises `FramingError` or `httptools.HttpParserError`."""
    reader = _HeadReader()
    parser = httptools.HttpResponseParser(reader)
    parser.feed_data(data)
    status = parser.get_status_code()
    opening = headers.status_line(status) + headers.client_lines(reader.headers)
    keep_alive = parser.should_keep_alive()
    if status in _BODILESS_STATUSES or status < _FIRST_FINAL_STATUS:
        return AnswerHead(status, opening, Framing.LENGTH, 0, reader.is_stream, keep_alive)
    if reader.codings:
        if reader.codings != b"chunked":
            raise FramingError("unknown transfer coding")
        return AnswerHead(status, opening, Framing.CHUNKED, 0, reader.is_stream, keep_alive)
    if reader.content_length is not None:
        length = reader.content_length
        return AnswerHead(status, opening, Framing.LENGTH, length, reader.is_stream, keep_alive)
    return AnswerHead(status, opening, Framing.CLOSE, 0, reader.is_stream, keep_alive=False)


_remembered_head = functools.lru_cache(maxsize=_REMEMBERED_HEADS)(read_answer_head)
"""Engines say much the same again and again: equal bytes have equal meaning."""


def authority(host: str, port: int) -> bytes:
    """`host:port` for a Host header; an IPv6 address in brackets and without its zone."""
    host = host.removeprefix("[").removesuffix("]")
    if ":" in host:
        host = f"[{host.partition('%')[0]}]"
    return f"{host}:{port}".encode()


def set_no_delay(transport: asyncio.BaseTransport) -> None:
    """Send small pieces at once: waiting for more costs a stream's reader 40 ms."""
    connected = transport.get_extra_info("socket")
    if connected is not None and connected.family in {socket.AF_INET, socket.AF_INET6}:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def notice_dead_host(
    transport: asyncio.BaseTransport, *, after_milliseconds: int = _DEAD_HOST_MILLISECONDS
) -> None:
    """Have a connection end whose host went without a word, also while nothing is sent on it; 0: never."""
    connected = transport.get_extra_info("socket")
    if connected is None or connected.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, after_milliseconds)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_SECONDS)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_SECONDS)
