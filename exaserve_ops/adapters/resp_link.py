"""One connection to Redis for many small commands: no task and no object for each, a write for each tick.

Commands of one turn of the event loop leave together; answers come to call-backs, in order. Every call
is bounded: what is not answered in time fails, and the connection with it, because answers behind a late
one would be late too. A lost connection is made again when it is next needed.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, cast

from redis.asyncio.connection import SSLConnection, parse_url

Reply = bytes | int | None
OnReply = Callable[["Reply | LinkError"], None]

CONNECT_SECONDS = 1.0
RETRY_SECONDS = 0.2
"""After a failure to connect, calls fail at once for so long."""
_LINE_END = b"\r\n"
_CLIENT_NAME = b"exaops-link"

_log = logging.getLogger(__name__)


class LinkError(Exception):
    """Redis is away, slow or refused the command. Passed to call-backs, not raised."""


def word(raw: bytes) -> bytes:
    """Encode one word of a command."""
    return b"$%d\r\n%b\r\n" % (len(raw), raw)


def command(*words: bytes | str | int) -> bytes:
    """Encode one command."""
    raws = (one if isinstance(one, bytes) else str(one).encode() for one in words)
    return b"*%d\r\n%b" % (len(words), b"".join(map(word, raws)))


class RespLink:
    """The connection. All of it happens in the event loop that first calls it."""

    def __init__(self, url: str, *, answer_seconds: float) -> None:
        self._options: dict[str, Any] = dict(parse_url(url))
        self._answer_seconds = answer_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wire: _Wire | None = None
        self._unsent: list[bytes] = []
        self._waiting: collections.deque[tuple[float, OnReply]] = collections.deque()
        """Who waits, and until when; in the order of the answers."""
        self._connecting: asyncio.Task[None] | None = None
        self._retry_at = 0.0
        self._is_watched = False
        self._is_closed = False

    def call(self, encoded: bytes, on_reply: OnReply) -> None:
        """Send a command that `command` encoded; its answer, or a `LinkError`, comes to the call-back."""
        loop = self._loop = self._loop or asyncio.get_running_loop()
        if self._wire is None and not self._may_connect(loop):
            loop.call_soon(on_reply, LinkError("not connected"))
            return
        if not self._unsent and self._wire is not None:
            loop.call_soon(self._flush)
        self._unsent.append(encoded)
        self._waiting.append((loop.time() + self._answer_seconds, on_reply))
        if not self._is_watched:
            self._is_watched = True
            loop.call_later(self._answer_seconds, self._watch, loop)

    async def close(self) -> None:
        """Hang up for good; whoever waits is told. Returns when nothing of it is left in the loop."""
        self._is_closed = True
        self._fail("closed")
        if self._connecting is not None:
            await asyncio.wait({self._connecting})  # it has a bound of its own

    # ------------------------------------------------------------------ sending
    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and self._wire is not None:
            self._wire.write(b"".join(unsent))

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fail what is late; look again when the next one would be."""
        self._is_watched = False
        if not self._waiting:
            return
        left = self._waiting[0][0] - loop.time()
        if left <= 0:
            self._fail("no answer in time")
        else:
            self._is_watched = True
            loop.call_later(left, self._watch, loop)

    # ------------------------------------------------------------------ what the wire calls
    def take(self, reply: Reply | LinkError) -> None:
        """The next answer."""
        if not self._waiting:
            self._fail("an answer that nobody asked for")
            return
        self._waiting.popleft()[1](reply)

    def lost(self, wire: _Wire, reason: str) -> None:
        """The connection ended."""
        if wire is self._wire:
            self._fail(reason)

    def _fail(self, reason: str) -> None:
        wire, self._wire = self._wire, None
        self._unsent.clear()
        if wire is not None:
            wire.abort()
        waiting, self._waiting = self._waiting, collections.deque()
        for _, on_reply in waiting:
            on_reply(LinkError(reason))

    # ------------------------------------------------------------------ connecting
    def _may_connect(self, loop: asyncio.AbstractEventLoop) -> bool:
        if self._connecting is not None:
            return True
        if self._is_closed or loop.time() < self._retry_at:
            return False
        self._connecting = loop.create_task(self._connect(loop))
        return True

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> None:
        wire: _Wire | None = None
        reason = "closed"
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                wire = await self._open(loop)
                await wire.greet(_greeting(self._options))
                if not self._is_closed:
                    self._wire = wire
        except (OSError, TimeoutError, LinkError, ssl.SSLError) as error:
            reason = repr(error)
            self._retry_at = loop.time() + RETRY_SECONDS
            _log.debug("event=redis_link_failed error=%s", reason)
        finally:
            self._connecting = None
            if self._wire is None and wire is not None:
                wire.abort()
        if self._wire is None:
            self._fail(reason)
        else:
            self._flush()

    async def _open(self, loop: asyncio.AbstractEventLoop) -> _Wire:
        options = self._options
        if "path" in options:
            _, wire = await loop.create_unix_connection(lambda: _Wire(self), options["path"])
            return wire
        is_secure = options.get("connection_class") is SSLConnection
        _, wire = await loop.create_connection(
            lambda: _Wire(self),
            options.get("host", "localhost"),
            options.get("port", 6379),
            ssl=_tls_context(options) if is_secure else None,
        )
        return wire


class _Wire(asyncio.Protocol):
    """Reads answers as they come; until it is greeted they are the greeting's."""

    def __init__(self, link: RespLink) -> None:
        self._link = link
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)  # until connected
        self._read = b""
        self._greeting: asyncio.Future[None] | None = None
        self._greetings_left = 0

    async def greet(self, commands: Sequence[bytes]) -> None:
        """Introduce ourselves. Raises `LinkError` where Redis refuses."""
        if not commands:
            return
        self._greeting = asyncio.get_running_loop().create_future()
        self._greetings_left = len(commands)
        self.write(b"".join(commands))
        try:
            await self._greeting
        finally:
            self._greeting = None

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def abort(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        connected = transport.get_extra_info("socket")
        if connected is not None and connected.family in {socket.AF_INET, socket.AF_INET6}:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._greeting is not None and not self._greeting.done():
            self._greeting.set_exception(LinkError(repr(exc)))
        self._link.lost(self, repr(exc) if exc else "closed")

    def data_received(self, data: bytes) -> None:
        if self._read:
            data = self._read + data
        position = 0
        while True:
            reply, after = read_reply(data, position)
            if after == position:
                break
            position = after
            self._hand_over(reply)
        self._read = data[position:]

    def _hand_over(self, reply: Reply | LinkError) -> None:
        greeting = self._greeting
        if greeting is None:
            self._link.take(reply)
        elif not greeting.done():
            self._greetings_left -= 1
            if isinstance(reply, LinkError):
                greeting.set_exception(reply)
            elif not self._greetings_left:
                greeting.set_result(None)


def read_reply(data: bytes, position: int) -> tuple[Reply | LinkError, int]:
    """Read one answer. Returns it and where it ends: at `position` if it is not all there.

    What our commands are answered by is understood: status, error, number, string and null.
    """
    line_end = data.find(_LINE_END, position)
    if line_end < 0:
        return None, position
    after = line_end + len(_LINE_END)
    kind, line = data[position : position + 1], data[position + 1 : line_end]
    if kind == b"$":
        return _read_string(data, after, int(line), position)
    if kind == b"+":
        return line, after
    if kind == b":":
        return int(line), after
    return LinkError(line.decode(errors="replace") if kind == b"-" else "an answer of an unknown kind"), after


def _read_string(data: bytes, start: int, size: int, position: int) -> tuple[Reply, int]:
    if size < 0:
        return None, start
    end = start + size
    if len(data) < end + len(_LINE_END):
        return None, position
    return data[start:end], end + len(_LINE_END)


def _greeting(options: dict[str, Any]) -> list[bytes]:
    commands: list[bytes] = []
    if options.get("password"):
        names = [options["username"]] if options.get("username") else []
        commands.append(command("AUTH", *names, options["password"]))
    commands.append(command("CLIENT", "SETNAME", _CLIENT_NAME))
    if options.get("db"):
        commands.append(command("SELECT", int(options["db"])))
    return commands


def _tls_context(options: dict[str, Any]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
    if options.get("ssl_certfile"):
        context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"))
    if options.get("ssl_cert_reqs") in {"none", ssl.CERT_NONE}:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
