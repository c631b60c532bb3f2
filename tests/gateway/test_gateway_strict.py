"""What the gateway refuses: malformed requests, strangers, anything off the list."""

from __future__ import annotations

import asyncio
import functools

import pytest

from tests.fakes.upstream import CHAT, replies
from tests.gateway.harness import KEY, World, eventually, request_bytes

pytestmark = pytest.mark.asyncio

_AUTH = f"Authorization: Bearer {KEY}\r\n".encode()
_LINE = b"POST /v1/chat/completions HTTP/1.1\r\n"
_HEAD = _LINE + b"Host: g\r\n" + _AUTH
_BODY = b'{"model":"m"}'
_CHUNKED = _HEAD + b"Transfer-Encoding: chunked\r\n"

MALFORMED = {
    "bare_lf_lines": (_HEAD + b"Content-Length: 13\r\n\r\n" + _BODY).replace(b"\r\n", b"\n"),
    "bare_lf_in_head": _HEAD + b"X: y\nContent-Length: 13\r\n\r\n" + _BODY,
    "bare_cr_in_value": _HEAD + b"X: y\rz\r\nContent-Length: 13\r\n\r\n" + _BODY,
    "nul_in_value": _HEAD + b"X: y\0z\r\nContent-Length: 13\r\n\r\n" + _BODY,
    "folded_header": _HEAD + b"X: y\r\n z\r\nContent-Length: 13\r\n\r\n" + _BODY,
    "space_before_first_header": _LINE + b" Host: g\r\n\r\n",
    "space_before_colon": _HEAD + b"Content-Length : 13\r\n\r\n" + _BODY,
    "bad_name": _HEAD + b"X(y: z\r\nContent-Length: 13\r\n\r\n" + _BODY,
    "no_name": _HEAD + b": z\r\nContent-Length: 13\r\n\r\n" + _BODY,
    "two_lengths": _HEAD + b"Content-Length: 13\r\nContent-Length: 5\r\n\r\n" + _BODY,
    "two_equal_lengths": _HEAD + b"Content-Length: 13\r\nContent-Length: 13\r\n\r\n" + _BODY,
    "listed_lengths": _HEAD + b"Content-Length: 13, 13\r\n\r\n" + _BODY,
    "signed_length": _HEAD + b"Content-Length: +13\r\n\r\n" + _BODY,
    "hex_length": _HEAD + b"Content-Length: 0xd\r\n\r\n" + _BODY,
    "length_and_chunked": _CHUNKED + b"Content-Length: 13\r\n\r\n0\r\n\r\n",
    "chunked_and_length": _HEAD + b"Content-Length: 13\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two_codings": _CHUNKED + b"Transfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "chunk_size_with_space": _CHUNKED + b"\r\n2 \r\nhi\r\n0\r\n\r\n",
    "chunk_size_bare_lf": _CHUNKED + b"\r\n2\nhi\n0\n\n",
    "chunk_size_overflow": _CHUNKED + b"\r\nfffffffffffffffff\r\nhi\r\n0\r\n\r\n",
    "chunk_longer_than_size": _CHUNKED + b"\r\n2\r\nhixx\r\n0\r\n\r\n",
    "no_host": _LINE + _AUTH + b"Content-Length: 13\r\n\r\n" + _BODY,
    "two_hosts": _HEAD + b"Host: h\r\nContent-Length: 13\r\n\r\n" + _BODY,
    "upgrade": _HEAD + b"Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 0\r\n\r\n",
    "connect": b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n",
    "http2_preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "space_in_target": b"GET /health x HTTP/1.1\r\nHost: g\r\n\r\n",
    "tls_hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64,
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_request_is_refused_and_never_reaches_an_engine(world: World, name: str) -> None:
    engine = await world.engine(replies(CHAT))
    gateway = await world.gateway()
    smuggled = request_bytes({"model": "m"}, headers={"x-smuggled": "1"})
    wire = await gateway.send(MALFORMED[name] + smuggled)
    reply = await wire.reply()
    assert reply.status == 400
    assert reply.code == "malformed_request"
    assert await wire.rest() == b""  # one answer, then the end
    assert engine.requests == []


@pytest.mark.parametrize(
    ("line", "extra", "status"),
    [
        (b"POST /v1/chat/completions HTTP/1.0\r\n", b"", 505),
        (b"POST /v1/chat/completions HTTP/2.0\r\n", b"", 505),
        (_LINE, b"Transfer-Encoding: gzip, chunked\r\n", 501),
        (_LINE, b"Transfer-Encoding: xchunked\r\n", 501),
        (_LINE, b"Expect: 200-maybe\r\n", 417),
    ],
)
async def test_request_that_cannot_be_relayed_faithfully_is_refused(
    world: World, line: bytes, extra: bytes, status: int
) -> None:
    engine = await world.engine(replies(CHAT))
    gateway = await world.gateway()
    length = b"" if b"chunked" in extra else b"Content-Length: 0\r\n"
    end = b"0\r\n\r\n" if b"chunked" in extra else b""
    wire = await gateway.send(line + b"Host: g\r\n" + _AUTH + extra + length + b"\r\n" + end)
    assert (await wire.reply()).status == status
    assert engine.requests == []


async def test_good_requests_before_a_malformed_one_are_still_answered(world: World) -> None:
    await world.engine(replies(CHAT))
    gateway = await world.gateway()
    wire = await gateway.send(request_bytes({"model": "m"}) * 2 + b"nonsense\r\n\r\n")
    assert [(await wire.reply()).status for _ in range(3)] == [200, 200, 400]
    assert await wire.rest() == b""


async def test_head_over_the_bound_is_refused_even_if_it_never_ends(world: World) -> None:
    gateway = await world.gateway()
    for data in (
        _HEAD + b"X: " + b"y" * 40_000 + b"\r\nContent-Length: 0\r\n\r\n",
        _HEAD + b"X: " + b"y" * 40_000,
        b"GET /" + b"y" * 40_000,
        _HEAD + b"".join(b"X-%d: y\r\n" % number for number in range(4000)),
    ):
        wire = await gateway.send(data)
        assert (await wire.reply()).status == 431
        wire.close()


async def test_body_over_the_bound_is_refused_before_it_is_read(world: World) -> None:
    gateway = await world.gateway(body_bytes=1000)
    wire = await gateway.send(_HEAD + b"Content-Length: 1001\r\n\r\n")
    assert (await wire.reply()).status == 413
    piece = b"400\r\n" + b"x" * 1024 + b"\r\n"
    wire = await gateway.send(_CHUNKED + b"\r\n" + piece)
    assert (await wire.reply()).status == 413


async def test_refused_upload_still_gets_its_answer(world: World) -> None:
    gateway = await world.gateway(body_bytes=1000)
    wire = await gateway.connect()
    wire.writer.write(_HEAD + b"Content-Length: 500000\r\n\r\n" + b"x" * 500_000)
    assert (await wire.reply()).status == 413


async def test_slow_requests_and_idle_connections_end(world: World) -> None:
    gateway = await world.gateway(head_seconds=0.3, body_seconds=0.3, idle_seconds=0.3)
    half_head = await gateway.send(_LINE)
    half_body = await gateway.send(_HEAD + b"Content-Length: 13\r\n\r\n{")
    silent = await gateway.connect()
    idle = await gateway.send(request_bytes(b"", method="GET", path="/health"))
    assert (await half_head.reply()).status == 408
    assert (await half_body.reply()).status == 408
    assert (await idle.reply()).status == 200
    for wire in (half_head, half_body, silent, idle):
        assert await wire.rest() == b""


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/invocations", 404),
        ("POST", "/tokenize", 404),
        ("POST", "/pause", 404),
        ("POST", "/v1/load_lora_adapter", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/other", 404),
        ("POST", "/v1/models/m", 405),
        ("POST", "/v1/chat/completions/", 404),
        ("POST", "/v1/../metrics", 404),
        ("POST", "//v1/chat/completions", 404),
        ("POST", "http://gateway/v1/chat/completions", 404),
        ("POST", "/v1/chat%2fcompletions", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
    ],
)
async def test_nothing_off_the_list_is_served_or_passed_on(
    world: World, method: str, path: str, status: int
) -> None:
    engine = await world.engine(replies(CHAT))
    gateway = await world.gateway()
    reply = await gateway.ask({"model": "m"}, method=method, path=path)
    assert reply.status == status
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert engine.requests == []


@pytest.mark.parametrize("key", [None, "", "wrong", KEY + "x", KEY.upper()])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/models"])
async def test_without_a_valid_key_nothing_is_answered(world: World, key: str | None, path: str) -> None:
    engine = await world.engine(replies(CHAT))
    gateway = await world.gateway()
    method = "GET" if path == "/v1/models" else "POST"
    reply = await gateway.ask({"model": "m"}, key=key, path=path, method=method)
    assert reply.status == 401
    assert reply.json()["error"]["type"] == "authentication_error"
    assert engine.requests == []


async def test_revoked_key_stops_working_on_every_gateway(world: World) -> None:
    await world.engine(replies(CHAT))
    gateways = [await world.gateway() for _ in range(2)]
    world.allow(KEY, "sk-other")
    for gateway in gateways:
        await eventually(functools.partial(gateway.shared.keys.find, b"sk-other"))
        assert (await gateway.ask(key="sk-other")).status == 200
    world.allow(KEY)
    for gateway in gateways:
        find = functools.partial(gateway.shared.keys.find, b"sk-other")
        await eventually(lambda find=find: not find())  # type: ignore[misc] # mypy cannot type defaults
        assert (await gateway.ask(key="sk-other")).status == 401
        assert (await gateway.ask()).status == 200


async def test_health_says_nothing_but_that_the_gateway_lives(world: World) -> None:
    gateway = await world.gateway()
    reply = await gateway.ask(b"", method="GET", path="/health", key=None)
    assert (reply.status, reply.body) == (200, b'{"status":"ok"}')


async def test_metrics_are_for_loopback_or_a_key_and_name_no_person(world: World) -> None:
    await world.engine(replies(CHAT))
    gateway = await world.gateway()
    await gateway.ask(headers={"x-session-id": "somebody"})
    page = (await gateway.ask(b"", method="GET", path="/metrics", key=None)).body.decode()
    assert 'exaops_gateway_requests_total{outcome="ok"} 1' in page
    assert 'exaops_gateway_in_flight{node="n0",replica="r0"} 0' in page
    assert "exaops_gateway_route_table_stale 0" in page
    assert not any(private in page for private in ("somebody", KEY, f"id-{KEY}"))
    for proxied in ({"x-forwarded-for": "203.0.113.9"}, {"forwarded": "for=203.0.113.9"}, {"via": "1.1 p"}):
        reply = await gateway.ask(b"", method="GET", path="/metrics", key=None, headers=proxied)
        assert reply.status == 401, f"a proxy on this host opened it to everybody: {proxied}"
    for connection in gateway.shared.connections:
        connection.abort()  # type: ignore[attr-defined] # the one class that is in there
    wire = await gateway.connect()
    await eventually(lambda: gateway.shared.connections)
    (connection,) = gateway.shared.connections
    connection._is_loopback = False  # type: ignore[attr-defined] # a peer from elsewhere
    await wire.send(request_bytes(b"", method="GET", path="/metrics", key=None))
    assert (await wire.reply()).status == 401
    await wire.send(request_bytes(b"", method="GET", path="/metrics"))
    assert (await wire.reply()).status == 200


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b"[" * 100_000, 400, "invalid_request"),
        (b"[]", 400, "invalid_request"),
        (b"{}", 400, "invalid_request"),
        (b'{"model": 1}', 400, "invalid_request"),
        (b'{"model": "m", "stream": "yes"}', 400, "invalid_request"),
        (b'{"model": "m", "x": ' + b"[" * 100_000, 400, "invalid_json"),
        (b'{"model": "other"}', 404, "model_not_found"),
    ],
)
async def test_bad_bodies_are_explained_in_the_apis_shape(
    world: World, body: bytes, status: int, code: str
) -> None:
    await world.engine(replies(CHAT))
    gateway = await world.gateway()
    reply = await gateway.ask(body)
    assert (reply.status, reply.code) == (status, code)


@pytest.mark.parametrize("session", ["", "a b", "a/b", "x" * 129, "a\x7f", "é", "a%0a"])
async def test_bad_session_id_is_refused(world: World, session: str) -> None:
    await world.engine(replies(CHAT))
    gateway = await world.gateway()
    reply = await gateway.ask(headers={"x-session-id": session})
    assert (reply.status, reply.code) in {(400, "invalid_session_id"), (400, "malformed_request")}


async def test_models_come_from_the_gateways_own_table(world: World) -> None:
    world.put("r0", 1, model="b")  # nothing listens there
    world.put("r1", 1, model="a")
    gateway = await world.gateway()
    reply = await gateway.ask(b"", method="GET", path="/v1/models")
    assert [model["id"] for model in reply.json()["data"]] == ["a", "b"]


async def test_one_model_is_described_in_the_shape_of_the_list(world: World) -> None:
    world.put("r0", 1, model="org/a b")
    gateway = await world.gateway()
    listed = await gateway.ask(b"", method="GET", path="/v1/models")
    for path in ("/v1/models/org/a%20b", "/v1/models/org%2Fa%20b"):
        one = await gateway.ask(b"", method="GET", path=path)
        assert [one.json()] == listed.json()["data"]
    unknown = await gateway.ask(b"", method="GET", path="/v1/models/a")
    assert (unknown.status, unknown.code) == (404, "model_not_found")
    stranger = await gateway.ask(b"", method="GET", path="/v1/models/org/a%20b", key=None)
    assert stranger.status == 401


async def test_more_clients_than_allowed_are_turned_away(world: World) -> None:
    gateway = await world.gateway(connections=2)
    wires = [await gateway.connect() for _ in range(2)]
    await eventually(lambda: len(gateway.shared.connections) == 2)
    assert await (await gateway.connect()).rest() == b""
    wires[0].close()
    await eventually(lambda: len(gateway.shared.connections) == 1)
    await asyncio.sleep(0)
    assert (await gateway.ask(b"", method="GET", path="/health")).status == 200
