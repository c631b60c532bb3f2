"""Servers whose engines have died behind them, and answers that only quote such words."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.fakes.upstream import (
    CHAT,
    DONE,
    STREAM_HEAD,
    Answer,
    Received,
    chunk,
    event,
    replies,
    streams,
    token,
)
from tests.gateway.harness import Gateway, World

pytestmark = pytest.mark.asyncio

STREAM = {"model": "m", "stream": True}


def in_flight(gateway: Gateway) -> int:
    return sum(slot.in_flight for slot in gateway.shared.fleet.slots())


DEAD = {
    "error": {
        "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        "type": "InternalServerError",
        "code": 500,
    }
}
"""Of vLLM's API server, which outlives its EngineCore for a moment."""


async def says_so_in_two_pieces(request: Received, writer: asyncio.StreamWriter) -> None:  # noqa: ARG001 - an Answer
    body = json.dumps(DEAD).encode()
    writer.write(
        b"HTTP/1.1 500 X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    )
    await writer.drain()
    await asyncio.sleep(0.05)  # the head comes alone, as with uvicorn
    writer.write(body)
    await writer.drain()


@pytest.mark.parametrize("body", [{"model": "m"}, STREAM])
@pytest.mark.parametrize("answer", [replies(DEAD, status=500), says_so_in_two_pieces])
async def test_server_whose_engine_has_died_costs_no_request(
    world: World, body: dict[str, object], answer: Answer
) -> None:
    dead = await world.engine(answer, node_id="n0")
    await world.engine(streams([token("a"), DONE]) if body is STREAM else replies(CHAT), node_id="n1")
    gateway = await world.gateway()
    assert [(await gateway.ask(body)).status for _ in range(10)] == [200] * 10
    assert 1 <= len(dead.requests) <= 2  # left alone at once, not after three
    assert gateway.shared.counters.outcomes == {"ok": 10}
    assert in_flight(gateway) == 0


async def test_stream_that_begins_with_the_death_of_its_engine_begins_elsewhere(world: World) -> None:
    async def answer(request: Received, writer: asyncio.StreamWriter) -> None:  # noqa: ARG001 - an Answer
        writer.write(STREAM_HEAD + chunk(event(DEAD)) + chunk(DONE) + b"0\r\n\r\n")
        await writer.drain()

    dead = await world.engine(answer, node_id="n0")
    await world.engine(streams([token("a"), DONE]), node_id="n1")
    gateway = await world.gateway()
    answers = [await gateway.ask(STREAM) for _ in range(10)]
    assert {reply.body for reply in answers} == {token("a") + DONE}
    assert 1 <= len(dead.requests) <= 2


async def test_request_that_kills_every_engine_is_not_sent_to_all_of_them(world: World) -> None:
    engines = [await world.engine(replies(DEAD, status=500), node_id=f"n{number}") for number in range(5)]
    gateway = await world.gateway()
    reply = await gateway.ask()
    assert (reply.status, reply.code) == (503, "no_replica_reachable")
    assert sum(len(engine.requests) for engine in engines) == 3


async def test_error_without_a_body_reaches_the_client(world: World) -> None:
    async def answer(request: Received, writer: asyncio.StreamWriter) -> None:  # noqa: ARG001 - an Answer
        writer.write(b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()

    await world.engine(answer)
    gateway = await world.gateway()
    reply = await gateway.ask()
    assert (reply.status, reply.body, reply.complete) == (500, b"", True)


@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize(
    "error",
    [
        {"error": {"message": f"temperature: not a number: '{DEAD['error']['message']}'"}},
        {"error": {"message": "bad input", "input": DEAD["error"]["message"]}},
        {"detail": [{"input": DEAD["error"]["message"]}]},
    ],
)
async def test_nobody_is_passed_over_for_an_error_that_quotes_what_was_sent(
    world: World, status: int, error: dict[str, object]
) -> None:
    engines = [await world.engine(replies(error, status=status), node_id=f"n{number}") for number in range(3)]
    gateway = await world.gateway()
    for body in ({"model": "m"}, STREAM):
        reply = await gateway.ask(body)
        assert (reply.status, json.loads(reply.body)) == (status, error)
    assert sum(len(engine.requests) for engine in engines) == 2


async def test_request_that_is_wrong_kills_nobody_by_saying_so(world: World) -> None:
    engine = await world.engine(replies(DEAD, status=400))
    gateway = await world.gateway()
    assert (await gateway.ask()).status == 400
    assert len(engine.requests) == 1


async def test_text_that_quotes_a_dead_engine_is_an_answer(world: World) -> None:
    quoted = token("EngineCore encountered an issue")
    engine = await world.engine(streams([quoted, DONE]))
    gateway = await world.gateway()
    assert (await gateway.ask(STREAM)).body == quoted + DONE
    assert len(engine.requests) == 1
