"""Heads and bodies that somebody might read in two ways: the gateway reads them in one, or not at all.

A strict reader of RFC 9112, written for these tests, says what a stream of bytes means. Whatever the
gateway passes on must be just that, however the bytes were cut on their way, and what an engine gets must
be one request to anybody.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import h11
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exaserve_ops.adapters.api_key_table import key_digest
from exaserve_ops.gateway.client import ClientConnection
from exaserve_ops.gateway.fleet import ReplicaSlot
from exaserve_ops.gateway.settings import GatewaySettings
from exaserve_ops.gateway.shared import Shared
from exaserve_ops.gateway.upstream import UpstreamConnection
from exaserve_ops.routing.domain.records import KeyRecord, RouteRecord
from tests.fakes.transport import MemoryTransport
from tests.gateway.harness import KEY, SECRET

_BODY = b'{"model":"m"}'
_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
_TIMES_TO_LEARN = 2
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_START = re.compile(rb"([A-Z]+) +([\x21-\xff]+) HTTP/1\.([01])")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*?)[ \t]*")
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t\x20-\x7e\x80-\xff]*)?")


# ------------------------------------------------------------------------------------------------
# The reference
# ------------------------------------------------------------------------------------------------
class MalformedError(Exception):
    """No HTTP/1.1, or such that two readers might differ."""


class IncompleteError(Exception):
    """More must come."""


def read_strictly(data: bytes) -> list[bytes]:
    """Bodies of the requests in a stream, up to its end or to what is malformed."""
    bodies: list[bytes] = []
    while data:
        try:
            body, data = _read_request(data.lstrip(b"\r\n"))  # empty lines between requests are allowed
        except (MalformedError, IncompleteError):
            break
        bodies.append(body)
    return bodies


def _read_request(data: bytes) -> tuple[bytes, bytes]:
    line, data = _line(data)
    if not _START.fullmatch(line):
        raise MalformedError
    fields, data = _fields(data)
    lengths = [value for name, value in fields if name == b"content-length"]
    codings = [value.lower() for name, value in fields if name == b"transfer-encoding"]
    if codings:
        if codings != [b"chunked"] or lengths:
            raise MalformedError
        return _read_chunks(data)
    if len(lengths) > 1 or any(not value.isdigit() for value in lengths):
        raise MalformedError
    size = int(lengths[0]) if lengths else 0
    if len(data) < size:
        raise IncompleteError
    return data[:size], data[size:]


def _read_chunks(data: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        line, data = _line(data)
        match = _SIZE.fullmatch(line)
        if match is None:
            raise MalformedError
        size = int(match[1], 16)
        if size == 0:
            break
        if len(data) < size + 2:
            raise IncompleteError
        if data[size : size + 2] != b"\r\n":
            raise MalformedError
        body, data = body + data[:size], data[size + 2 :]
    return body, _fields(data)[1]


def _fields(data: bytes) -> tuple[list[tuple[bytes, bytes]], bytes]:
    fields: list[tuple[bytes, bytes]] = []
    while True:
        line, data = _line(data)
        if not line:
            return fields, data
        match = _FIELD.fullmatch(line)
        if match is None:
            raise MalformedError
        fields.append((match[1].lower(), match[2]))


def _line(data: bytes) -> tuple[bytes, bytes]:
    line, end, rest = data.partition(b"\r\n")
    if not end:
        raise IncompleteError
    if b"\n" in line or b"\r" in line:
        raise MalformedError
    return line, rest


# ------------------------------------------------------------------------------------------------
# The gateway, without sockets
# ------------------------------------------------------------------------------------------------
@dataclass
class Reading:
    """What the gateway made of a stream."""

    sent: list[bytes] = field(default_factory=list)
    """What engines got, one request each."""
    statuses: list[int] = field(default_factory=list)
    is_over: bool = False
    """Whether it hears no more of this client."""


async def read(pieces: Sequence[bytes], before: Sequence[bytes] = ()) -> Reading:
    """Let a gateway read these pieces; its one engine answers at once.

    What came before, each on a connection of its own, has taught it some heads and is not told of.
    """
    options = GatewaySettings(port=0, redis_url="unix:///nowhere", fleet_secret=SECRET)
    shared = Shared(options, clock=time.monotonic, wall_clock=time.monotonic)
    record = RouteRecord("r0", "n0", "node-0", 1, "m", "d", "127.0.0.1", 1, 1, 1)
    shared.fleet.replace({"r0": record}, time.monotonic())
    shared.keys.replace({key_digest(KEY): KeyRecord("id", "name")})
    slot = shared.fleet.slots()[0]
    for one in before:
        for _ in range(_TIMES_TO_LEARN):
            _converse(shared, slot, [one])
    return _converse(shared, slot, pieces)


def _converse(shared: Shared, slot: ReplicaSlot, pieces: Sequence[bytes]) -> Reading:
    upstream, engine = UpstreamConnection(slot.pool), MemoryTransport()
    upstream.connection_made(engine)
    slot.pool.give_back(upstream)
    connection, transport = ClientConnection(shared), MemoryTransport()
    connection.connection_made(transport)
    reading = Reading()
    for piece in pieces:
        if transport.is_cut:
            break
        connection.data_received(piece)
        while engine.written:
            reading.sent.append(bytes(engine.written))
            engine.written.clear()
            upstream.data_received(_ANSWER)
    reading.statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", bytes(transport.written))]
    reading.is_over = transport.is_cut or transport.is_ended
    connection.connection_lost(None)
    slot.pool.take()
    return reading


def body_that_anybody_reads(sent: bytes) -> bytes:
    """Body of exactly one request, as another library reads it."""
    server = h11.Connection(h11.SERVER)
    server.receive_data(sent)
    request = server.next_event()
    assert isinstance(request, h11.Request)
    names = [name for name, _ in request.headers]
    assert names.count(b"content-length") == 1
    assert b"transfer-encoding" not in names
    body = b""
    while not isinstance(event := server.next_event(), h11.EndOfMessage):
        assert isinstance(event, h11.Data)
        body += event.data
    assert server.trailing_data == (b"", False)
    return body


# ------------------------------------------------------------------------------------------------
# Streams
# ------------------------------------------------------------------------------------------------
_AUTHORISED = b"Host: g\r\nAuthorization: Bearer %b\r\n" % KEY.encode()
_CHUNKED = b"d\r\n%b\r\n0\r\n\r\n" % _BODY

_headers = st.sampled_from(
    [
        b"Content-Length: 13\r\n",
        b"Content-Length: 5\r\n",
        b"Content-Length: 0\r\n",
        b"content-length:13\r\n",
        b"Content-Length: +13\r\n",
        b"Content-Length: 13, 13\r\n",
        b"Content-Length: 0x0d\r\n",
        b"Content-Length : 13\r\n",
        b"Content-Length: 13 \r\n",
        b"Content_Length: 13\r\n",
        b"Content-Length: 99999999999999999999\r\n",
        b"Content-Length:\r\n",
        b"Content-Length: 1 3\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: CHUNKED\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Transfer-Encoding: identity\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Transfer-Encoding:\tchunked\r\n",
        b"Transfer-Encoding: chunked\x0b\r\n",
        b"Transfer-Encoding\r\n: chunked\r\n",
        b"Transfer-Encoding: \r\n chunked\r\n",
        b"X: y\r\n z\r\n",
        b"X: y\n",
        b"X: y\rz\r\n",
        b"X: y\0\r\n",
        b"\0: y\r\n",
        b"Connection: keep-alive\r\n",
        b"Connection: close\r\n",
        b"Connection: content-length\r\n",
        b"Expect: 100-continue\r\n",
        b"Trailer: content-length\r\n",
        b"X-Session-Id: s\r\n",
        b"Host: h\r\n",
        b"Upgrade: h2c\r\n",
        b": y\r\n",
        b"X\xff: y\r\n",
        b"X: \xff\r\n",
        b" X: y\r\n",
        b"X: y\r\n",
        b"\r\n",
    ]
)
_bodies = st.sampled_from(
    [
        _BODY,
        b"",
        _CHUNKED,
        b"0\r\n\r\n",
        b"D;x=y\r\n%b\r\n0\r\nX: y\r\n\r\n" % _BODY,
        b"d \r\n%b\r\n0\r\n\r\n" % _BODY,
        b"d\n%b\n0\n\n" % _BODY,
        b"0d\r\n%b\r\n0\r\n\r\n" % _BODY,
        b"-d\r\n%b\r\n0\r\n\r\n" % _BODY,
        b"d\r\n%bxx\r\n0\r\n\r\n" % _BODY,
        b"c\r\n%b\r\n0\r\n\r\n" % _BODY,
        b"d\r\n%b\r\n0\r\nContent-Length: 9\r\n\r\n" % _BODY,
        b'd;a="\n"\r\n%b\r\n0\r\n\r\n' % _BODY,
        b"ffffffffffffffffd\r\n%b\r\n0\r\n\r\n" % _BODY,
    ]
)
_lines = st.sampled_from(
    [
        b"POST /v1/chat/completions HTTP/1.1\r\n",
        b"POST /v1/chat/completions HTTP/1.0\r\n",
        b"POST  /v1/chat/completions HTTP/1.1\r\n",
        b"POST /v1/chat/completions\tHTTP/1.1\r\n",
        b"POST /v1/chat/completions HTTP/1.1\n",
        b"POST /v1/chat/completions?a=b HTTP/1.1\r\n",
        b"GET /v1/chat/completions HTTP/1.1\r\n",
        b"POST /v1/chat/completions HTTP/11.1\r\n",
        b"\r\nPOST /v1/chat/completions HTTP/1.1\r\n",
        b"post /v1/chat/completions HTTP/1.1\r\n",
        b"POST /v1/chat/completions HTTP/1.1 x\r\n",
        b"POST /v1/completions HTTP/1.1\r\n",
    ]
)
_good_request = b"POST /v1/chat/completions HTTP/1.1\r\n%bContent-Length: 13\r\n\r\n%b" % (_AUTHORISED, _BODY)


@st.composite
def _requests(draw: st.DrawFn) -> bytes:
    line = draw(st.one_of(st.just(b"POST /v1/chat/completions HTTP/1.1\r\n"), _lines))
    extra = b"".join(draw(st.lists(_headers, max_size=3)))
    return line + _AUTHORISED + extra + b"\r\n" + draw(_bodies)


@st.composite
def _streams(draw: st.DrawFn) -> bytes:
    data = b"".join(draw(st.lists(st.one_of(_requests(), st.just(_good_request)), min_size=1, max_size=3)))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(data)))
        width = draw(st.integers(0, 2))
        data = data[:at] + draw(st.sampled_from(_NASTY)) + data[at + width :]
    return data


_NASTY = [
    b"",
    b"\r",
    b"\n",
    b"\r\n",
    b" ",
    b"\t",
    b"\0",
    b":",
    b",",
    b";",
    b"0",
    b"\x0b",
    b"\x7f",
    b"\xff",
    b"\r\n\r\n",
]


def _cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    marks = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in itertools.pairwise(marks)]


@settings(max_examples=400, deadline=None)
@given(data=_streams(), places=st.lists(st.integers(0, 2000), max_size=6))
@example(data=_good_request * 3, places=[1, 40, 200])
def test_a_stream_means_one_thing_however_it_is_cut(data: bytes, places: list[int]) -> None:
    whole = asyncio.run(read([data]))
    bodies = [body_that_anybody_reads(sent) for sent in whole.sent]
    meant = read_strictly(data)
    passed = iter(meant)
    assert all(any(body == one for one in passed) for body in bodies), (bodies, meant)  # in their order
    parted = asyncio.run(read(_cut(data, places)))
    assert [body_that_anybody_reads(sent) for sent in parted.sent] == bodies
    assert parted.is_over == whole.is_over
    # The head's last byte may say more than its first: a refusal may come before or after a 100 Continue.
    assert [s for s in parted.statuses if s != 100] == [s for s in whole.statuses if s != 100]


@st.composite
def _alike(draw: st.DrawFn) -> bytes:
    """A request that is like the others but for its values, and perhaps a nasty byte in its head."""
    lines = draw(
        st.lists(
            st.sampled_from(
                [b"Content-Length: 13", b"content-length: 2", b"X-Session-Id: %b", b"x-session-id:%b"]
            )
            | st.sampled_from(
                [b"X-Request-Id: %b", b"Connection: keep-alive", b"X: y", b"Expect: 100-continue"]
            ),
            min_size=1,
            max_size=4,
        )
    )
    value = draw(st.sampled_from([b"a", b"b:1", b"12", b"013", b"a b", b"", b"z" * 129, b"e\xe9"]))
    head = b"POST /v1/chat/completions HTTP/1.1\r\n%b%b\r\n\r\n" % (
        _AUTHORISED,
        b"\r\n".join(line.replace(b"%b", value) for line in lines),
    )
    if draw(st.booleans()):
        at = draw(st.integers(len(head) - 60, len(head)))
        head = head[:at] + draw(st.sampled_from(_NASTY)) + head[at + draw(st.integers(0, 1)) :]
    return head + draw(st.sampled_from([_BODY, _BODY, b"{}", b""]))


def _without_request_ids(reading: Reading) -> list[list[bytes]]:
    """What engines got, its lines in an order of their own: it may be another one."""
    return [
        sorted(re.sub(rb"(x-request-id: [0-9a-f]{16})-[0-9a-f]+", rb"", sent).split(b"\r\n"))
        for sent in reading.sent
    ]


@settings(max_examples=400, deadline=None)
@given(
    requests=st.lists(_alike(), min_size=1, max_size=3),
    before=st.lists(_alike() | st.just(_good_request), max_size=4),
    are_together=st.booleans(),
)
@example(requests=[_good_request] * 3, before=[_good_request], are_together=False)
def test_heads_that_were_learnt_mean_what_they_mean_to_a_gateway_that_knows_none(
    requests: list[bytes], before: list[bytes], are_together: bool
) -> None:
    pieces = [b"".join(requests)] if are_together else requests
    strange, familiar = asyncio.run(read(pieces)), asyncio.run(read(pieces, [*before, *requests]))
    assert _without_request_ids(familiar) == _without_request_ids(strange)
    assert familiar.statuses == strange.statuses
    assert familiar.is_over == strange.is_over


@settings(max_examples=60, deadline=None)
@given(
    chunked=st.lists(st.booleans(), min_size=1, max_size=5),
    places=st.lists(st.integers(0, 4000), max_size=8),
    padding=st.integers(0, 200),
)
def test_good_requests_are_all_answered_however_they_are_cut(
    chunked: list[bool], places: list[int], padding: int
) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\n%bX-Pad: %b\r\n" % (_AUTHORISED, b"x" * padding)
    data = b"".join(
        head
        + (b"Transfer-Encoding: chunked\r\n\r\n" + _CHUNKED if one else b"Content-Length: 13\r\n\r\n" + _BODY)
        for one in chunked
    )
    reading = asyncio.run(read(_cut(data, places)))
    assert [body_that_anybody_reads(sent) for sent in reading.sent] == [_BODY] * len(chunked)
    assert reading.statuses == [200] * len(chunked)
    assert not reading.is_over


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(32 * 1024 + 300, 80_000),
    places=st.lists(st.integers(0, 90_000), max_size=5),
    shape=st.sampled_from(["target", "value", "name", "many", "endless"]),
)
def test_oversize_head_is_refused_however_it_is_cut(size: int, places: list[int], shape: str) -> None:
    first = b"POST /v1/chat/completions HTTP/1.1\r\n"
    filling = {
        "target": b"POST /" + b"x" * size + b" HTTP/1.1\r\n" + _AUTHORISED,
        "value": first + _AUTHORISED + b"X: " + b"y" * size + b"\r\n",
        "name": first + _AUTHORISED + b"X" * size + b": y\r\n",
        "many": first + _AUTHORISED + b"X: y\r\n" * (size // 6 + 60),
        "endless": first + _AUTHORISED + b"X: " + b"y" * size,
    }[shape]
    end = b"" if shape == "endless" else b"Content-Length: 13\r\n\r\n" + _BODY
    reading = asyncio.run(read(_cut(filling + end, places)))
    assert reading.sent == []
    assert reading.statuses[-1:] in ([431], [400])  # llhttp itself refuses some
    assert reading.is_over
