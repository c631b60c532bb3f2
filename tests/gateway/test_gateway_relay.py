"""What passes between a client and an engine, and what does not."""

from __future__ import annotations

import pytest

from tests.fakes.upstream import CHAT, DONE, replies, streams, token
from tests.gateway.harness import SECRET, World
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
    token_text = engine_api_key(node_key(SECRET, "n0", 1), "r0", 1)
    assert engine.requests[0].header("authorization") == f"Bearer {token_text}"
    assert engine.requests[0].header("host") == f"127.0.0.1:{engine.port}"


async def test_stream_passes_byte_for_byte(world: World) -> None:
    events = [token("a"), token("b"), DONE]
    await world.engine(streams(events))
    gateway = await world.gateway()
    reply = await gateway.ask({"model": "m", "stream": True})
    assert reply.complete
    assert reply.body == b"".join(events)
