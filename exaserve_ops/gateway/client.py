"""Connections of clients: HTTP/1.1 as llhttp reads it, strictly, one answer after the other."""

from __future__ import annotations

import asyncio
import collections
import ipaddress
from typing import cast
from urllib.parse import unquote_to_bytes

import httptools

from exaserve_ops.gateway import headers, refusals
from exaserve_ops.gateway.admission import Endpoint, endpoint_of
from exaserve_ops.gateway.continued_exchange import ContinuedExchange
from exaserve_ops.gateway.exchange import Exchange
from exaserve_ops.gateway.refusals import Refusal
from exaserve_ops.gateway.requests import Request, read_fields
from exaserve_ops.gateway.shared import Shared
from exaserve_ops.gateway.upstream import set_no_delay

_WRITE_BUFFER_BYTES = 64 * 1024
_PIPELINE_LIMIT = 8
"""Requests read ahead; a client that sends more is not read until it has had answers."""
_LINGER_SECONDS = 2.0
_LINGER_BYTES = 1024 * 1024
"""What is read and thrown away after a refusal: closing at once could destroy the answer."""
_MOST_FRAMING = 8
"""A chunked body may take so many times its bound on the wire: one byte in a chunk takes six."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_JSON = b"application/json"
_TEXT = b"text/plain; version=0.0.4; charset=utf-8"


class ClientConnection(asyncio.Protocol):
    """One client's connection. Reads ahead a little, answers in order."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._roles = shared.roles
        self._heads = shared.heads
        self._outbox = shared.outbox
        self._unsent = b""
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)  # until connected
        self._parser = httptools.HttpRequestParser(self)
        self._is_loopback = False
        self._reading: Request | None = None
        self._is_between = True  # the parser has read the last message to its end, and may get another one
        self._new_head = b""  # what was read, if it begins with a head that may be worth learning
        self._head_is_read = False
        self._head_bytes = 0
        self._body_bytes = 0
        self._read_bytes = 0  # of an unfinished head, in earlier reads
        self._counts_head = False
        self._head_limit_bytes = shared.settings.head_bytes
        self._now = 0.0  # when the present read began
        self._is_first_in_read = False  # no other message ended in what is being read
        self._is_reading_paused = False
        self._pending: collections.deque[Request] = collections.deque()
        self._current: Exchange | None = None
        self._is_serving = False
        self._is_deaf = False  # what arrives from now on is thrown away
        self._deaf_bytes = 0
        self._is_closing = False
        self._deadline_seconds = 0.0
        self.is_paused = False

    # ------------------------------------------------------------------ what the event loop calls
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        set_no_delay(transport)
        self._transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        self._is_loopback = _is_loopback(transport.get_extra_info("peername"))
        self._deadline_seconds = self._shared.clock() + self._shared.settings.head_seconds
        if not self._shared.add_connection(self):
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._shared.drop_connection(self)
        self._pending.clear()
        self._is_closing = True
        current, self._current = self._current, None
        if current is not None:
            current.client_gone()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            self._deaf_bytes += len(data)
            if self._deaf_bytes > _LINGER_BYTES:
                self._transport.abort()
            return
        if self._is_between:
            if (request := self._heads.read(data)) is not None:
                self._accept(request)
                self._read_ahead_no_further()
                return
            self._new_head = data
        self._now = self._shared.clock()
        size_bytes = len(data)
        self._is_first_in_read = True
        self._counts_head = self._read_bytes + size_bytes > self._head_limit_bytes
        self._head_bytes = self._read_bytes  # of a head that began in an earlier read
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._refuse_connection(refusals.MALFORMED)
        else:
            if self._reading is not None:
                self._count_unfinished(size_bytes)
        self._new_head = b""
        self._read_ahead_no_further()

    def _read_ahead_no_further(self) -> None:
        if len(self._pending) >= _PIPELINE_LIMIT and not self._transport.is_closing():
            self._is_reading_paused = True
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self.is_paused = True
        if self._current is not None:
            self._current.pause()

    def resume_writing(self) -> None:
        self.is_paused = False
        if self._current is not None:
            self._current.resume()

    # ------------------------------------------------------------------ what the parser calls
    def on_message_begin(self) -> None:
        self._reading = Request()
        self._is_between = False
        self._head_is_read = False
        self._head_bytes = self._body_bytes = self._read_bytes = 0
        self._deadline_seconds = self._now + self._shared.settings.head_seconds

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        if self._reading is not None:
            self._reading.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._counts_head:  # a head within a small read cannot be too large
            self._head_bytes += len(name) + len(value) + 4
        if self._head_is_read or self._reading is None:  # trailers are dropped
            return
        known_as, prefix, is_understood = self._roles[name]
        if prefix:
            self._reading.lines.append(prefix + value + b"\r\n")
        if is_understood:
            self._reading.note(known_as, value)

    def on_headers_complete(self) -> None:
        request = self._reading
        if request is None or self._is_deaf:
            return
        self._head_is_read = True
        if self._head_bytes > self._head_limit_bytes:
            self._refuse_connection(refusals.HEAD_TOO_LARGE)
            return
        request.method = self._parser.get_method()
        request.version = self._parser.get_http_version()
        request.keep_alive = self._parser.should_keep_alive()
        self._deadline_seconds = self._now + self._shared.settings.body_seconds
        request.refusal = self._shared.admission.check(request, is_loopback=self._is_loopback)
        if self._parser.should_upgrade():  # CONNECT too
            request.refusal = refusals.MALFORMED
        waits = b"expect" in request.known
        if request.refusal and (waits or request.refusal in refusals.CLOSING):
            self._refuse_connection(request.refusal, request)
        elif waits and self._current is None and not self._pending:
            self.write(_CONTINUE)

    def on_body(self, body: bytes) -> None:
        request = self._reading
        if request is None or self._is_deaf:
            return
        self._body_bytes += len(body)
        if self._body_bytes > self._shared.settings.body_bytes:
            self._refuse_connection(refusals.BODY_TOO_LARGE, request)
        elif request.refusal is None:
            request.body_parts.append(body)

    def on_message_complete(self) -> None:
        request, self._reading = self._reading, None
        self._is_first_in_read = False
        self._read_bytes = 0
        if request is None or self._is_deaf:
            return
        self._is_between = request.keep_alive
        if self._new_head:
            self._heads.learn(self._new_head, request)
            self._new_head = b""
        self._accept(request)

    def _accept(self, request: Request) -> None:
        """It is whole: answer it in its turn."""
        self._deadline_seconds = 0.0
        self._pending.append(request)
        self._serve()

    # ------------------------------------------------------------------ what exchanges call
    def must_close(self, request: Request) -> bool:
        """Whether the connection ends with this answer."""
        return not request.keep_alive or self._shared.is_draining

    def write(self, data: bytes) -> None:
        """Send bytes of the answer, unless the client has just left."""
        if self._unsent:
            self._unsent += data
            if len(self._unsent) > _WRITE_BUFFER_BYTES:
                self.flush()  # a client that is slow has to be known to be
        else:
            self._unsent = data
            self._outbox.add(self)

    def flush(self) -> None:
        """Hand what was written in this turn of the loop to the transport."""
        data, self._unsent = self._unsent, b""
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def refuse(self, request: Request, refusal: Refusal) -> None:
        """Send an error as the whole answer."""
        self._shared.counters.refused[refusal.code] += 1
        extra = b""
        if refusal.retry_after_seconds is not None:
            extra += b"retry-after: %d\r\n" % refusal.retry_after_seconds
        if refusal in {refusals.NO_KEY, refusals.BAD_KEY}:
            extra += b"www-authenticate: Bearer\r\n"
        self._answer(request, refusal.status, _JSON, refusal.body(), extra)

    def finish(self, *, keep_alive: bool) -> None:
        """The answer is over; close after it unless kept alive."""
        self._current = None
        if not keep_alive:
            self._close()
            return
        self._serve()

    def abort(self) -> None:
        """Cut the connection, so that the answer cannot be taken for a whole one."""
        self._transport.abort()

    # ------------------------------------------------------------------ what the data plane calls
    def sweep(self, now: float) -> None:
        """End what takes too long."""
        if self._current is not None and not self._is_closing:
            self._current.sweep(now)
        elif self._deadline_seconds and now > self._deadline_seconds:
            if self._reading is not None and not self._is_deaf:
                self._refuse_connection(refusals.TOO_SLOW)
            else:
                self._transport.abort() if self._is_closing else self._close()

    def drain(self) -> None:
        """No request is to come any more: close now if idle, else after the answer."""
        if self._current is None and not self._pending:
            self._close()

    # ------------------------------------------------------------------ one answer after the other
    def _serve(self) -> None:
        if self._is_serving:
            return  # the loop below goes on; answers that are ready at once must not nest
        self._is_serving = True
        while self._pending and self._current is None and not self._is_closing:
            self._serve_one(self._pending.popleft())
        self._is_serving = False
        if self._current is None and not self._is_closing and not self._transport.is_closing():
            if self._is_reading_paused:
                self._is_reading_paused = False
                self._transport.resume_reading()
            if self._reading is None:
                self._deadline_seconds = self._shared.clock() + self._shared.settings.idle_seconds

    def _serve_one(self, request: Request) -> None:
        if request.refusal is not None:
            self.refuse(request, request.refusal)
            return
        endpoint = endpoint_of(request.path)
        if endpoint is Endpoint.CHAT or endpoint is Endpoint.COMPLETIONS:
            self._serve_inference(request)
            return
        match endpoint:
            case Endpoint.HEALTH:
                self._answer(request, 200, _JSON, b'{"status":"ok"}')
            case Endpoint.METRICS:
                self._answer(request, 200, _TEXT, self._shared.render_metrics())
            case Endpoint.MODELS:
                self._answer(request, 200, _JSON, self._shared.render_models())
            case Endpoint.MODEL:
                self._show_model(request)
            case _:  # its head was refused
                raise AssertionError(request.path)

    def _show_model(self, request: Request) -> None:
        name = unquote_to_bytes(request.path.removeprefix(Endpoint.MODEL.path)).decode(errors="replace")
        body = self._shared.render_model(name)
        if body is None:
            self.refuse(request, refusals.unknown_model(name))
        else:
            self._answer(request, 200, _JSON, body)

    def _serve_inference(self, request: Request) -> None:
        fields = read_fields(request.body)
        if isinstance(fields, Refusal):
            self.refuse(request, fields)
        elif not self._shared.fleet.may_exist(fields.model):
            self.refuse(request, refusals.unknown_model(fields.model))
        else:
            kept, line, why_not = self._shared.continuations.open(request, fields)
            if kept is None:
                self._current = Exchange(
                    self._shared, self, request, fields, answer_line=line, why_not_continued=why_not
                )
            else:
                self._current = ContinuedExchange(self._shared, self, request, fields, kept, answer_line=line)
            self._current.start()

    def _answer(
        self, request: Request, status: int, content_type: bytes, body: bytes, extra: bytes = b""
    ) -> None:
        must_close = self.must_close(request)
        if must_close:
            extra += b"connection: close\r\n"
        self.write(
            b"%bcontent-type: %b\r\ncontent-length: %d\r\nx-request-id: %b\r\n%b\r\n%b"
            % (
                headers.STATUS_LINES[status],
                content_type,
                len(body),
                request.request_id or b"none",
                extra,
                body,
            )
        )
        self.finish(keep_alive=not must_close)

    # ------------------------------------------------------------------ closing
    def _refuse_connection(self, refusal: Refusal, request: Request | None = None) -> None:
        """Nothing after this can be understood: answer what came before, then this, then close."""
        self._is_deaf = True
        self._reading = None
        request = request or Request()
        request.refusal = refusal
        request.keep_alive = False
        self._pending.append(request)
        self._serve()

    def _count_unfinished(self, size_bytes: int) -> None:
        """Bound what is not whole yet: the parser keeps a header or trailer to itself until it is."""
        if self._is_first_in_read:  # else an unknown part of this read belongs to what ended in it
            self._read_bytes += size_bytes
        if self._is_deaf:
            return
        if not self._head_is_read:
            if max(self._read_bytes, self._head_bytes) > self._head_limit_bytes:
                self._refuse_connection(refusals.HEAD_TOO_LARGE)
        elif self._read_bytes > _MOST_FRAMING * self._shared.settings.body_bytes:
            self._refuse_connection(refusals.BODY_TOO_LARGE, self._reading)

    def _close(self) -> None:
        if self._is_closing or self._transport.is_closing():
            return
        self.flush()
        self._is_closing = True
        if not self._is_deaf:
            self._deadline_seconds = self._shared.clock() + self._shared.settings.client_stall_seconds
            self._transport.close()
            return
        self._deadline_seconds = self._shared.clock() + _LINGER_SECONDS
        self._transport.resume_reading()
        if self._transport.can_write_eof():  # TLS cannot: it is closed when the client does, or in time
            self._transport.write_eof()


def _is_loopback(peer: object) -> bool:
    if not isinstance(peer, tuple):
        return False
    try:
        return ipaddress.ip_address(str(peer[0]).partition("%")[0]).is_loopback
    except ValueError:
        return False
