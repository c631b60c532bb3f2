"""What engines say while a stream may be continued: errors, odd events, comments, and how fast it is read."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.fakes.token_engine import PIECES, TokenEngine
from tests.fakes.upstream import (
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
from tests.gateway.continued_streams import (
    CHAT,
    CONTINUE,
    events_of,
    text_of,
    two,
)
from tests.gateway.harness import World, eventually, request_bytes

pytestmark = pytest.mark.asyncio

ENGINE_ERROR = event(
    {"error": {"message": "The engine failed.", "type": "server_error", "code": "engine_failed"}}
)
VLLM_ERROR = event({"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}})
CALLERS_ERROR = event({"error": {"message": "no", "type": "BadRequestError", "code": 400}})


def saying(error: bytes, *, ends: bytes = b"") -> Answer:
    """An engine that ends its first part with an error, and continues others well."""

    async def answer(request: Received, writer: asyncio.StreamWriter) -> None:
        if b'"prompt"' in request.body:
            await TokenEngine("b")(request, writer)
            return
        events = list(TokenEngine("a").events(request.path, json.loads(request.body)))[:4]
        writer.write(STREAM_HEAD + b"".join(map(chunk, [*events, error, ends] if ends else [*events, error])))
        writer.write(b"0\r\n\r\n")

    return answer


@pytest.mark.parametrize(("error", "ends"), [(ENGINE_ERROR, b""), (VLLM_ERROR, DONE)])
async def test_engine_that_says_it_failed_is_replaced(world: World, error: bytes, ends: bytes) -> None:
    gateway = await two(world, saying(error, ends=ends), saying(error, ends=ends))
    events = events_of(await gateway.ask(CHAT, headers=CONTINUE))
    assert text_of(events) == b"".join(PIECES).decode()
    assert not any("error" in one for one in events if isinstance(one, dict))


async def test_error_that_is_the_callers_passes_unchanged(world: World) -> None:
    gateway = await two(world, saying(CALLERS_ERROR, ends=DONE), saying(CALLERS_ERROR, ends=DONE))
    reply = await gateway.ask(CHAT, headers=CONTINUE)
    assert CALLERS_ERROR in reply.body
    assert sum(len(engine.requests) for engine in world.engines) == 1
    assert gateway.shared.counters.outcomes == {"engine_error": 1}


async def test_last_engines_own_error_is_the_one_that_the_client_gets(world: World) -> None:
    gateway = await two(world, saying(ENGINE_ERROR), continuations=0)
    reply = await gateway.ask(CHAT, headers=CONTINUE)
    assert reply.body.endswith(ENGINE_ERROR)
    assert reply.body.count(b'"error"') == 1


@pytest.mark.parametrize(
    "odd",
    [
        event({"id": "c", "choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "token_ids": [5]}]}),
        event({"id": "c", "choices": [{"index": 0, "delta": {}}, {"index": 1, "delta": {}}]}),
        event({"id": "c", "choices": [{"index": 0, "delta": {"content": "x"}, "token_ids": ["5"]}]}),
        event({"id": "c", "choices": [{"index": 0, "delta": {"content": "x"}, "token_ids": [-5]}]}),
        event(["no", "object"]),
        b"data: {no json\n\n",
    ],
)
async def test_events_of_another_kind_pass_and_rule_it_out(world: World, odd: bytes) -> None:
    first = event({"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    engines = [streams([first, odd], ends=False) for _ in range(2)]
    gateway = await two(world, *engines)
    reply = await gateway.ask(CHAT, headers=CONTINUE)
    assert sum(len(engine.requests) for engine in world.engines) == 1
    assert reply.body.count(b'"error"') == 1
    assert b"not continued: " in reply.body
    assert not gateway.shared.continuations.budget.kept
    if b"token_ids" not in odd:
        assert odd in reply.body


async def test_comments_pass(world: World) -> None:
    await world.engine(streams([b": ping\n\n", token("a"), b": ping\r\n\r\n", DONE]))
    gateway = await world.gateway()
    reply = await gateway.ask(CHAT, headers=CONTINUE)
    assert reply.body.count(b": ping\n\n") == 2
    assert reply.body.endswith(DONE)


async def test_slow_client_is_not_read_ahead_of_after_a_break(world: World) -> None:
    """What the next replica says waits for the client, too."""
    sent = 0

    async def answer(request: Received, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        if b'"prompt"' not in request.body:
            await TokenEngine("a", cuts=[600])(request, writer)
            return
        writer.write(STREAM_HEAD)
        for number in range(600):
            choice = {"index": 0, "text": "x" * 65_536, "token_ids": [number]}
            writer.write(chunk(event({"id": "c", "choices": [choice]})))
            await writer.drain()
            sent += 65_536
        writer.write(chunk(DONE) + b"0\r\n\r\n")

    gateway = await two(world, answer, answer)
    wire = await gateway.connect()
    await wire.send(request_bytes(CHAT, headers=CONTINUE))
    wire.set_reading(reading=False)
    await eventually(lambda: sent > 0)
    before = -1
    async with asyncio.timeout(20):
        while before != sent:
            before = sent
            await asyncio.sleep(0.3)
    assert sent < 30_000_000
    wire.set_reading(reading=True)
    reply = await wire.reply()
    assert reply.complete
    assert len(text_of(events_of(reply))) > 600 * 65_536
    wire.close()


async def test_body_too_deep_to_read_is_left_to_the_engine(world: World) -> None:
    await world.engine(replies({"error": {"message": "too deep"}}, 400))
    gateway = await world.gateway()
    deep = b"[" * 5000 + b"]" * 5000
    body = b'{"model": "m", "stream": true, "messages": [], "tools": ' + deep + b"}"
    reply = await gateway.ask(body, headers=CONTINUE)
    assert reply.status == 400
