"""Heads that differ from learnt ones in their values alone are read without the parser, others are not."""

from __future__ import annotations

import random
import time

import pytest

from exaserve_ops.adapters.api_key_table import key_digest
from exaserve_ops.gateway.client import ClientConnection
from exaserve_ops.gateway.requests import Request
from exaserve_ops.gateway.settings import GatewaySettings
from exaserve_ops.gateway.shared import Shared
from exaserve_ops.routing.domain.records import BATCH, KeyRecord
from tests.fakes.transport import MemoryTransport
from tests.gateway.harness import KEY, SECRET, request_bytes


def taught(*requests: bytes) -> Shared:
    """A gateway that has read these before; nobody serves their model, which is all the same to heads."""
    options = GatewaySettings(port=0, redis_url="unix:///nowhere", fleet_secret=SECRET)
    shared = Shared(options, clock=time.monotonic, wall_clock=time.monotonic)
    shared.fleet.declare_models(frozenset({"m"}))
    shared.fleet.replace({}, time.monotonic())
    shared.keys.replace({key_digest(KEY): KeyRecord("id", "name")})
    for request in requests:
        for _ in range(2):
            connection, transport = ClientConnection(shared), MemoryTransport()
            connection.connection_made(transport)
            connection.data_received(request)
            connection.connection_lost(None)
    return shared


def chat(session: str = "s", body: bytes = b'{"model":"none"}', **more: str) -> bytes:
    headers = {"x-session-id": session, "X-Request-Id": "call-1"}
    return request_bytes(
        body, headers=headers | {name.replace("_", "-"): value for name, value in more.items()}
    )


def test_familiar_head_is_read_with_its_own_values() -> None:
    shared = taught(chat(x_pass="100% {of} it"))
    request = shared.heads.read(
        chat("another:1", b'{"model":"a longer one"}', x_pass="100% {of} it", X_Request_Id="call-2")
    )
    assert request is not None
    assert (request.session_id, request.request_id) == ("another:1", b"call-2")
    assert request.body == b'{"model":"a longer one"}'
    assert (request.path, request.keep_alive, request.refusal) == (b"/v1/chat/completions", True, None)
    assert request.key == KeyRecord("id", "name")
    assert sorted(b"".join(request.lines).split(b"\r\n")) == sorted(
        [b"content-type: application/json", b"x-session-id: another:1", b"x-pass: 100% {of} it", b""]
    )


@pytest.mark.parametrize(
    "stranger",
    [
        pytest.param(chat(accept="text/plain"), id="another header"),
        pytest.param(chat("not a session"), id="value outside the alphabet"),
        pytest.param(chat(content_length="15"), id="shorter than the read"),
        pytest.param(chat(content_length="17"), id="longer than the read"),
        pytest.param(chat(content_length="1_6"), id="no number"),
        pytest.param(chat() * 2, id="two at once"),
        pytest.param(chat(connection="close"), id="the connection's last"),
        pytest.param(chat().replace(b"HTTP/1.1", b"HTTP/1.0"), id="another version"),
        pytest.param(chat().replace(b"POST", b"PUT"), id="another method"),
        pytest.param(chat().replace(b"x-session-id: s", b"x-session-id: s\r\n t"), id="folded"),
        pytest.param(
            chat().replace(b"x-session-id: s", b"x-session-id: s\r\nx-session-id: t"), id="repeated"
        ),
        pytest.param(chat().replace(KEY.encode(), b"sk-other"), id="another key"),
    ],
)
def test_whatever_else_is_different_goes_the_long_way(stranger: bytes) -> None:
    shared = taught(chat())
    assert shared.heads.read(chat()) is not None
    assert shared.heads.read(stranger) is None


@pytest.mark.parametrize(
    "peculiar", [chat(connection="close"), chat(expect="100-continue"), chat(connection="x-pass", x_pass="y")]
)
def test_heads_that_ask_something_of_the_connection_are_never_learnt(peculiar: bytes) -> None:
    assert taught(peculiar).heads.read(peculiar) is None


def test_head_that_was_seen_once_is_not_learnt_yet() -> None:
    shared = taught()
    connection = ClientConnection(shared)
    connection.connection_made(MemoryTransport())
    connection.data_received(chat())
    assert shared.heads.read(chat()) is None


def test_key_that_is_revoked_or_changed_is_so_for_familiar_heads_too() -> None:
    shared = taught(chat())
    shared.keys.replace({key_digest(KEY): KeyRecord("id", "name", traffic_class=BATCH)})
    request = shared.heads.read(chat())
    assert request is not None
    assert request.is_batch
    shared.keys.replace({})
    assert shared.heads.read(chat()) is None


SPELLINGS = (
    "content-length: {size}",
    "Content-Length: 0{size}",
    "content-length:{size}",
    "content-length: {size} ",
    "x-session-id: {value}",
    "X-SESSION-ID:{value}",
    "x-session-id:  {value}",
    "x-smg-routing-key: {value}",
    "x-smg-routing-key: {value}/",
    "x-conversation-id: {value}",
    "x-request-id: {value}",
    "X-Request-ID:{value}",
    "x-request-id: {value}\t",
    "x-request-id: {value}!",
    "x-traffic-class: batch",
    "X-Traffic-Class: Long-Context",
    "x-traffic-class: btach",
    "x-continue-stream: true",
    "connection: keep-alive",
    "connection: x-pass",
    "connection: close",
    "x-pass: {value}",
    "x-exaops-owner: {value}",
    "transfer-encoding: chunked",
    "cookie: {value}",
)


def drawn_head(draw: random.Random) -> str:
    lines = [f"authorization: Bearer {KEY}", "host: gateway", *draw.sample(SPELLINGS, draw.randint(1, 8))]
    if not any("ontent" in line for line in lines):
        lines.append(SPELLINGS[0])
    draw.shuffle(lines)
    target = draw.choice(["/v1/chat/completions", "/v1/completions?x=1", "/v1/models"])
    return "\r\n".join([f"POST {target} HTTP/1.1", *lines, "", ""])


class Listener(ClientConnection):
    """Keeps what requests were read as, and answers none."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self.heard: list[Request] = []

    def _serve_one(self, request: Request) -> None:
        self.heard.append(request)


def meaning(shared: Shared, data: bytes, value: str) -> list[object]:
    """What a gateway makes of what it reads, on whichever way."""
    connection = Listener(shared)
    connection.connection_made(MemoryTransport())
    connection.data_received(data)
    connection.connection_lost(None)
    return [
        (
            request.path,
            request.session_id,
            request.request_id == value.encode(),
            (request.is_batch, request.is_long, request.is_continued, request.keep_alive),
            request.refusal or sorted(b"".join(request.lines).split(b"\r\n")),
            request.refusal or request.body,
        )
        for request in connection.heard
    ]


def test_both_ways_make_the_same_of_drawn_heads() -> None:
    learnt, draw = taught(), random.Random(20)  # noqa: S311 - test data
    read_at_once = 0
    for _ in range(700):
        head = drawn_head(draw)
        values = [draw.choice(["a", "call-1.2", "x:y", "z" * 128]) for _ in range(4)]
        for value in values:
            body = b"{" + b" " * draw.randrange(30) + b"}"
            data = head.format(size=len(body), value=value).encode() + body
            read_at_once += learnt.heads.read(data) is not None
            assert meaning(learnt, data, value) == meaning(taught(), data, value), data
    assert read_at_once > 50
