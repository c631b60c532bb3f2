"""What passes between a client and an engine, and what does not."""

from __future__ import annotations

import asyncio
import json
import socket

import msgspec
import pytest

from exaserve_ops.adapters.turn_log import TurnLogReader
from tests.fakes.upstream import CHAT, DONE, STREAM_HEAD, Received, chunk, replies, streams, token
from tests.gateway.harness import SECRET, World, eventually, request_bytes
from workers.protocol.digests import engine_api_key, node_key

pytestmark = pytest.mark.asyncio


async def test_plain_answer_passes_with_its_route_named(world: World) -> None:
    engine = await world.engine(replies(CHAT))
    gateway = await world.gateway()
    body = b'{"model": "m",   "messages": [], "unknown_to_us": 1e400}'
    reply = await gateway.ask(body)
    assert reply.status == 200
    assert reply.json() == CHAT
    assert reply.headers["x-exaops-replica"] == "r0"
    assert reply.headers["x-exaops-node"] == "n0"
    assert reply.headers["x-exaops-route"] == "new"
    assert engine.requests[0].body == body


async def test_engine_gets_its_own_token_and_address(world: World) -> None:
    engine = await world.engine(replies(CHAT), attempt=4, key_epoch=2)
    gateway = await world.gateway()
    await gateway.ask()
    expected = engine_api_key(node_key(SECRET, "n0", 2), "r0", 4)
    assert engine.requests[0].header("authorization") == f"Bearer {expected}"
    assert engine.requests[0].header("host") == f"127.0.0.1:{engine.port}"


async def test_stream_passes_byte_for_byte(world: World) -> None:
    events = [token("a"), token("b"), DONE]
    await world.engine(streams(events))
    gateway = await world.gateway()
    reply = await gateway.ask({"model": "m", "stream": True})
    assert reply.complete
    assert reply.body == b"".join(events)


async def test_first_event_reaches_the_client_before_the_second_exists(world: World) -> None:
    hold = asyncio.Event()
    await world.engine(streams([token("a")], hold=hold, ends=False))
    gateway = await world.gateway()
    wire = await gateway.send(request_bytes({"model": "m", "stream": True}))
    async with asyncio.timeout(5):
        await wire.reader.readuntil(token("a"))
    hold.set()
    wire.close()


async def test_hop_by_hop_and_credentials_stop_at_the_gateway(world: World) -> None:
    engine = await world.engine(
        replies(
            CHAT,
            extra="connection: X-Inner\r\nx-inner: 1\r\nset-cookie: a=b\r\nx-outer: 2\r\n"
            "proxy-authenticate: Basic\r\nkeep-alive: timeout=5\r\nx-exaops-replica: forged\r\n",
        )
    )
    gateway = await world.gateway()
    reply = await gateway.ask(
        headers={
            "connection": "close, X-Secret",
            "x-secret": "1",
            "proxy-authorization": "Basic x",
            "te": "trailers",
            "trailer": "x",
            "keep-alive": "timeout=5",
            "cookie": "a=b",
            "forwarded": "for=1.2.3.4",
            "x-forwarded-for": "1.2.3.4",
            "x-forwarded-host": "evil",
            "accept-encoding": "gzip",
            "x-exaops-node": "forged",
            "x-passes": "yes",
        }
    )
    sent = {name for name, _ in engine.requests[0].headers}
    assert sent == {
        "host",
        "authorization",
        "content-type",
        "content-length",
        "x-request-id",
        "x-passes",
    }
    assert reply.headers["connection"] == "close"
    assert reply.headers["x-outer"] == "2"
    assert reply.headers["x-exaops-replica"] == "r0"
    absent = {"x-inner", "set-cookie", "proxy-authenticate", "keep-alive"}
    assert not absent & reply.headers.keys()


async def test_chunked_body_reaches_the_engine_whole_with_its_length(world: World) -> None:
    engine = await world.engine(replies(CHAT))
    gateway = await world.gateway()
    body = json.dumps({"model": "m", "text": "x" * 5000}).encode()
    head = request_bytes(b"", headers={"transfer-encoding": "chunked"})
    head = head.replace(b"content-length: 0\r\n", b"")
    chunks = chunk(body[:100]) + chunk(body[100:]) + b"0\r\nx-trailer: 1\r\n\r\n"
    wire = await gateway.send(head + chunks)
    assert (await wire.reply()).status == 200
    assert engine.requests[0].body == body
    assert engine.requests[0].header("content-length") == str(len(body))
    assert engine.requests[0].header("transfer-encoding") is None
    assert engine.requests[0].header("x-trailer") is None
    wire.close()


async def test_large_bodies_pass_both_ways(world: World) -> None:
    engine = await world.engine(replies({"text": "y" * 3_000_000}))
    gateway = await world.gateway()
    reply = await gateway.ask({"model": "m", "text": "x" * 3_000_000})
    assert len(reply.json()["text"]) == 3_000_000
    assert len(engine.requests[0].body) > 3_000_000


async def test_one_connection_carries_many_requests_to_one_upstream_connection(
    world: World,
) -> None:
    engine = await world.engine(replies(CHAT))
    gateway = await world.gateway()
    wire = await gateway.connect()
    for _ in range(5):
        await wire.send(request_bytes({"model": "m"}))
        assert (await wire.reply()).status == 200
    wire.close()
    assert engine.connections == 1
    assert len(engine.requests) == 5


async def test_pipelined_requests_are_answered_in_order(world: World) -> None:
    await world.engine(replies(CHAT))
    gateway = await world.gateway()
    requests = [request_bytes({"model": "m"}, headers={"x-request-id": f"n{number}"}) for number in range(40)]
    requests[7] = request_bytes(b"", method="GET", path="/health", headers={"x-request-id": "n7"})
    wire = await gateway.send(b"".join(requests))
    seen = [(await wire.reply()).headers["x-request-id"] for _ in requests]
    assert seen == [f"n{number}" for number in range(40)]
    wire.close()


async def test_request_id_is_kept_only_if_it_is_safe(world: World) -> None:
    engine = await world.engine(replies(CHAT))
    gateway = await world.gateway()
    good = await gateway.ask(headers={"x-request-id": "abc-1.2_3"})
    assert good.headers["x-request-id"] == "abc-1.2_3"
    assert engine.requests[0].header("x-request-id") == "abc-1.2_3"
    for bad in ("a%0aERROR fake", "a b", "x" * 10_000, "a\tb", "é"):
        reply = await gateway.ask(headers={"x-request-id": bad})
        assert reply.status == 200
        assert reply.headers["x-request-id"] != bad
        assert engine.requests[-1].header("x-request-id") == reply.headers["x-request-id"]


async def test_body_of_unannounced_length_is_chunked_for_the_client(world: World) -> None:
    async def answer(request: Received, writer: asyncio.StreamWriter) -> None:  # noqa: ARG001 - an Answer
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{}")
        writer.close()

    await world.engine(answer)
    gateway = await world.gateway()
    reply = await gateway.ask()
    assert (reply.complete, reply.body) == (True, b"{}")


async def test_interim_answers_are_not_passed_on(world: World) -> None:
    async def answer(request: Received, writer: asyncio.StreamWriter) -> None:  # noqa: ARG001 - an Answer
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    await world.engine(answer)
    gateway = await world.gateway()
    reply = await gateway.ask()
    assert (reply.status, reply.body) == (200, b"{}")


async def test_expect_100_continue_is_answered_before_the_body(world: World) -> None:
    await world.engine(replies(CHAT))
    gateway = await world.gateway()
    whole = request_bytes({"model": "m"}, headers={"expect": "100-continue"})
    head, _, body = whole.partition(b"\r\n\r\n")
    wire = await gateway.send(head + b"\r\n\r\n")
    async with asyncio.timeout(5):
        assert await wire.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    await wire.send(body)
    assert (await wire.reply()).status == 200
    wire.close()


async def test_slow_client_does_not_fill_the_gateway(world: World) -> None:
    sent = 0

    async def answer(request: Received, writer: asyncio.StreamWriter) -> None:  # noqa: ARG001 - an Answer
        nonlocal sent
        writer.write(STREAM_HEAD)
        for _ in range(1000):
            writer.write(chunk(b"data: " + b"x" * 65_536 + b"\n\n"))
            await writer.drain()
            sent += 65_536
        writer.write(chunk(DONE) + b"0\r\n\r\n")

    await world.engine(answer)
    gateway = await world.gateway()
    wire = await gateway.connect()
    await wire.send(request_bytes({"model": "m", "stream": True}))
    wire.set_reading(reading=False)
    await eventually(lambda: sent > 0)
    before = -1
    async with asyncio.timeout(10):
        while before != sent:  # the engine is stopped once all buffers between are full
            before = sent
            await asyncio.sleep(0.3)
    assert sent < 30_000_000
    wire.set_reading(reading=True)
    reply = await wire.reply()
    assert reply.complete
    assert len(reply.body) > 65_000_000
    wire.close()


async def test_every_socket_sends_small_pieces_at_once(world: World) -> None:
    hold = asyncio.Event()
    await world.engine(streams([token("a")], hold=hold, ends=False))
    gateway = await world.gateway()
    wire = await gateway.send(request_bytes({"model": "m", "stream": True}))
    async with asyncio.timeout(5):
        await wire.reader.readuntil(token("a"))
    (exchange,) = gateway.shared.open_requests
    for side in (exchange._client, exchange._upstream):  # type: ignore[attr-defined] # one class is in there
        connected = side._transport.get_extra_info("socket")
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    hold.set()
    wire.close()


async def test_ipv6_replica_is_reached_and_named_in_brackets(world: World) -> None:
    engine = await world.engine(replies(CHAT))
    await engine.stop()
    engine.host = "::1"
    await engine.start()
    gateway = await world.gateway()
    for host in ("::1", "[::1]"):
        world.put("r0", engine.port, host=host)
        await eventually(lambda: gateway.shared.fleet.slots()[0].record == world.records["r0"])
        assert (await gateway.ask()).status == 200
        assert engine.requests[-1].header("host") == f"[::1]:{engine.port}"


@pytest.mark.parametrize("pieces", [1, 2, 7])
async def test_answer_that_comes_at_once_is_passed_on_and_written_down_like_one_in_pieces(
    world: World, pieces: int
) -> None:
    body = msgspec.json.encode(CHAT)
    whole = (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-own: 1\r\ncontent-length: %d\r\n\r\n%b"
        % (
            len(body),
            body,
        )
    )
    size = -(-len(whole) // pieces)

    async def answer(request: Received, writer: asyncio.StreamWriter) -> None:  # noqa: ARG001 - an Answer
        for start in range(0, len(whole), size):
            writer.write(whole[start : start + size])
            await asyncio.sleep(0.01)  # apart, as far as it is up to us; right however they come

    await world.engine(answer)
    gateway = await world.gateway()
    reader = TurnLogReader(world.redis, "c1")
    wire = await gateway.connect()
    for _ in range(2):
        await wire.send(request_bytes({"model": "m"}, headers={"x-session-id": "s", "x-request-id": "r"}))
        reply = await wire.reply()
        assert (reply.status, reply.json(), reply.headers["x-own"]) == (200, CHAT, "1")
        assert (reply.headers["x-request-id"], reply.headers["content-length"]) == ("r", str(len(body)))
    slot = gateway.shared.fleet.slots()[0]
    assert (slot.in_flight, slot.pending_tokens) == (0, 0.0)
    await gateway.shared.turns.flush()
    turns = [turn for _, turn in reader.read(1.0)]
    assert [(turn.outcome, turn.status, turn.prompt_tokens) for turn in turns] == [("ok", 200, 7)] * 2
    assert all(turn.ttft_seconds is not None for turn in turns)
