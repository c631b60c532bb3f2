"""Streams that go on at another replica when theirs breaks off, and those that do not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from exaserve_ops.gateway.continuation import NO_TOKEN_IDS, TOO_LONG, TOO_OFTEN
from exaserve_ops.gateway.refusals import INTERRUPTED_EVENT
from tests.fakes.token_engine import CHAT_PATH, FIRST_ID, PIECES, PROMPT, TokenEngine
from tests.fakes.upstream import (
    Received,
    StubEngine,
    never,
    replies,
)
from tests.gateway.continued_streams import (
    CHAT,
    CONTINUE,
    TEXT,
    TEXT_PATH,
    breaking,
    error_of,
    events_of,
    forget_failures,
    nothing_is_left,
    text_of,
    two,
)
from tests.gateway.harness import World, eventually, request_bytes

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("knows_what_was_before", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT_PATH, CHAT), (CHAT_PATH, {**CHAT, "stop": "END"}), (TEXT_PATH, {**TEXT, "stop": ["END", "x"]})],
)
async def test_break_at_any_byte_is_not_seen(
    world: World, path: str, body: dict[str, Any], *, knows_what_was_before: bool
) -> None:
    """Between events and within, also within characters and stop strings, before the text and behind."""
    cuts: list[int] = []
    engines = [TokenEngine(name, knows_what_was_before, cuts=cuts) for name in ("a", "bb")]
    gateway = await two(world, *engines)
    whole = await gateway.ask(body, path=path, headers=CONTINUE)
    expected = events_of(whole)
    assert text_of(expected) == ("Hi 😀, the " if "stop" in body else b"".join(PIECES).decode())
    first_id = expected[0]["id"]
    sent = {**body, "return_token_ids": True, "include_stop_str_in_output": True}
    size = engines[0].size(path, sent)
    for cut in (*range(0, size, 7), size):  # no event is so small that one could be missed
        cuts[:] = [cut]
        forget_failures(gateway)
        seen = events_of(await gateway.ask(body, path=path, headers=CONTINUE))
        name = {"id": seen[0]["id"], "created": seen[0]["created"]}
        assert name["id"].removesuffix("bb").removesuffix("a") == first_id.removesuffix("bb").removesuffix(
            "a"
        )
        assert _without_details(seen) == [
            {**one, **name} if isinstance(one, dict) else one for one in _without_details(expected)
        ], cut
    await eventually(lambda: nothing_is_left(gateway))


def _without_details(events: list[Any]) -> list[Any]:
    """Drop what a gateway that ends a stream itself does not know: what was in cache."""
    for one in events:
        if isinstance(one, dict) and one.get("usage"):
            one["usage"].pop("prompt_tokens_details", None)
    return events


async def test_next_replica_gets_exactly_the_tokens_that_there_are(world: World) -> None:
    engines = [TokenEngine(name, cut_each_after_tokens=3) for name in ("a", "bb", "ccc")]
    gateway = await two(world, *engines)
    body = {**CHAT, "max_tokens": 8, "seed": 7, "top_p": 0.9, "metadata": {"a": "b"}, "tools": []}
    events = events_of(await gateway.ask(body, headers={**CONTINUE, "x-session-id": "s1"}))
    requests = [request for engine in world.engines for request in engine.requests]
    assert len(requests) == 3
    assert all(request.header("x-continue-stream") is None for request in requests)
    assert all(request.header("x-session-id") == "s1" for request in requests)
    first, *rest = sorted(
        (json.loads(request.body) for request in requests), key=lambda body: "prompt" in body
    )
    assert first == {**body, "return_token_ids": True}
    rest.sort(key=lambda body: len(body["prompt"]))
    for count, asked in zip((3, 6), rest, strict=True):
        assert asked == {
            **{
                name: body[name]
                for name in ("model", "stream", "stream_options", "temperature", "seed", "top_p")
            },
            "prompt": [*PROMPT, *range(FIRST_ID, FIRST_ID + count)],
            "max_tokens": 8 - count,
            "continued_tokens": count,
            "return_token_ids": True,
        }
    # The third breaks off after the usage, so that only the last event was missing.
    counts = {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    assert events[-2]["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 3}}
    assert events[-1] == b"[DONE]"
    assert text_of(events) == b"".join(PIECES[:8]).decode()


@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, CHAT), (TEXT_PATH, TEXT)])
async def test_unbroken_stream_is_the_one_that_others_get(
    world: World, path: str, body: dict[str, Any]
) -> None:
    await world.engine(TokenEngine("a"))
    gateway = await world.gateway()
    plain = await gateway.ask({**body, "stop": "no", "include_stop_str_in_output": True}, path=path)
    kept = await gateway.ask({**body, "stop": "no"}, path=path, headers=CONTINUE)
    assert events_of(kept) == events_of(plain)
    assert b"token_ids" not in kept.body
    assert (kept.headers["x-exaops-continuation"], plain.headers.get("x-exaops-continuation")) == (
        "ready",
        None,
    )


async def test_turn_says_that_it_was_continued_and_its_session_follows(world: World) -> None:
    engines = breaking(600)
    gateway = await two(world, *engines)
    turns = gateway.shared.turns._buffer
    await gateway.ask(CHAT, headers={**CONTINUE, "x-session-id": "s1"})
    await eventually(lambda: nothing_is_left(gateway))
    (first,) = [one for one in ("r0", "r1") if engines[int(one[1])].asked[0].get("messages")]
    second = "r1" if first == "r0" else "r0"
    again = await gateway.ask(TEXT, path=TEXT_PATH, headers={"x-session-id": "s1"})
    assert (again.headers["x-exaops-replica"], again.headers["x-exaops-route"]) == (second, "sticky")
    page = (await gateway.ask(b"", method="GET", path="/metrics", key=None)).body
    assert b'exaops_gateway_continuations_total{step="begun"} 1' in page
    assert b'exaops_gateway_continuations_total{step="resumed"} 1' in page
    assert b"exaops_gateway_continuation_tokens_kept 0" in page
    del turns
    await gateway.shared.turns.flush()


async def test_without_being_asked_nothing_is_continued(world: World) -> None:
    engines = breaking(600, 600)
    gateway = await two(world, *engines)
    for headers in ({}, {"x-continue-stream": "False"}):
        reply = await gateway.ask(CHAT, headers=headers)
        assert reply.body.endswith(INTERRUPTED_EVENT)
        assert "x-exaops-continuation" not in reply.headers
    assert not gateway.shared.counters.continuations
    assert all("return_token_ids" not in body for engine in engines for body in engine.asked)


async def test_gateway_may_continue_what_does_not_say(world: World) -> None:
    engines = breaking(600)
    gateway = await two(world, *engines, continue_streams=True)
    assert events_of(await gateway.ask(CHAT))[-1] == b"[DONE]"
    forget_failures(gateway)
    engines[0].cuts.append(600)
    assert (await gateway.ask(CHAT, headers={"x-continue-stream": "false"})).body.endswith(INTERRUPTED_EVENT)


@pytest.mark.parametrize("value", ["yes", "", "1", "true, true"])
async def test_header_that_is_neither_true_nor_false_is_refused(world: World, value: str) -> None:
    gateway = await world.gateway()
    reply = await gateway.ask(CHAT, headers={"x-continue-stream": value})
    assert (reply.status, reply.code) == (400, "invalid_continue_header")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"guided_json": {}}, "guided_json"),
        ({"return_token_ids": "yes"}, "body"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"min_tokens": 4}, "min_tokens"),
        ({"messages": "no list"}, "body"),
        ({"max_tokens": "many"}, "body"),
        ({"a\r\nx-evil: 1": 1}, "unknown field"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ],
)
async def test_what_cannot_be_put_together_ends_with_one_error(
    world: World, fields: dict[str, Any], named: str
) -> None:
    gateway = await two(world, *breaking(400))
    reply = await gateway.ask({**CHAT, **fields}, headers=CONTINUE)
    assert reply.headers["x-exaops-continuation"] == f"refused ({named})"
    assert "x-evil" not in reply.headers
    assert f"It was not continued: refused ({named}), since " in error_of(reply)["message"]
    assert sum(len(engine.requests) for engine in world.engines) == 1
    assert gateway.shared.counters.not_continued == {"field": 1}


@pytest.mark.parametrize(
    "fields",
    [
        {
            "n": 1,
            "tools": None,
            "response_format": {"type": "text"},
            "logprobs": False,
            "frequency_penalty": 0.0,
        },
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Say it."}]}],
            "tool_choice": "none",
        },
        {"user": "u", "stop": None, "max_completion_tokens": 40, "modalities": ["text"]},
    ],
)
async def test_fields_that_say_nothing_rule_nothing_out(world: World, fields: dict[str, Any]) -> None:
    gateway = await two(world, *breaking(400))
    reply = await gateway.ask({**CHAT, **fields}, headers=CONTINUE)
    assert reply.headers["x-exaops-continuation"] == "ready"
    assert text_of(events_of(reply)) == b"".join(PIECES).decode()


async def test_plain_request_is_not_touched(world: World) -> None:
    engine = await world.engine(replies({"ok": True}))
    gateway = await world.gateway(continue_streams=True)
    reply = await gateway.ask(b'{"model":  "m", "n": 3}', headers=CONTINUE)
    assert "x-exaops-continuation" not in reply.headers
    assert engine.requests[0].body == b'{"model":  "m", "n": 3}'


async def test_stream_that_breaks_again_and_again_is_given_up(world: World) -> None:
    gateway = await two(world, *(TokenEngine(n, cut_each_after_tokens=2) for n in "abcd"))
    reply = await gateway.ask(CHAT, headers=CONTINUE)
    assert TOO_OFTEN in error_of(reply)["message"]
    assert text_of(events_of(reply)) == "Hi 😀, the E"[: len(text_of(events_of(reply)))]
    assert sum(len(engine.requests) for engine in world.engines) == 3
    assert gateway.shared.counters.not_continued == {TOO_OFTEN: 1}
    assert gateway.shared.counters.outcomes == {"interrupted": 1}
    await eventually(lambda: nothing_is_left(gateway))


async def test_stream_without_another_replica_ends_with_one_error(world: World) -> None:
    gateway = await two(world, TokenEngine("a", cuts=[600]), continuation_seconds=0.5)
    reply = await gateway.ask(CHAT, headers=CONTINUE)
    assert "not continued: no_replica_reachable" in error_of(reply)["message"]
    assert len(world.engines[0].requests) == 1, "never the same replica"
    await eventually(lambda: nothing_is_left(gateway))


async def test_stream_waits_for_a_replica_that_cannot_be_reached_for_a_moment(world: World) -> None:
    late = await StubEngine(TokenEngine("b")).start()
    await late.stop()
    gateway = await two(world, TokenEngine("a", cuts=[600]))
    world.put("late", late.port, node_id="late")
    await eventually(lambda: len(gateway.shared.fleet.slots()) == 2)
    wire = await gateway.send(request_bytes(CHAT, headers=CONTINUE))
    await eventually(lambda: gateway.shared.counters.retries > gateway.shared.settings.attempts)
    world.engines.append(await late.start(late.port))
    assert text_of(events_of(await wire.reply())) == b"".join(PIECES).decode()
    assert gateway.shared.counters.continuations == {"begun": 1, "resumed": 1}
    wire.close()


async def test_longer_stream_than_is_kept_is_not_continued_and_says_so(world: World) -> None:
    gateway = await two(world, *breaking(900), continuation_tokens=4)
    reply = await gateway.ask(CHAT, headers=CONTINUE)
    assert TOO_LONG in error_of(reply)["message"]
    assert not gateway.shared.continuations.budget.kept


async def test_engine_without_token_ids_is_not_continued(world: World) -> None:
    gateway = await two(world, *breaking(600, gives_token_ids=False))
    assert NO_TOKEN_IDS in error_of(await gateway.ask(CHAT, headers=CONTINUE))["message"]


async def test_replica_that_refuses_the_rest_is_passed_over(world: World) -> None:
    async def refuse(request: Received, writer: asyncio.StreamWriter) -> None:
        if b'"prompt"' in request.body:
            await replies({"error": {"message": "draining"}}, 503)(request, writer)
        else:
            await TokenEngine("a", cuts=[600])(request, writer)

    gateway = await two(world, refuse, refuse, TokenEngine("c", cuts=[]))
    assert text_of(events_of(await gateway.ask(CHAT, headers=CONTINUE))) == b"".join(PIECES).decode()


async def test_rest_that_is_refused_as_wrong_ends_with_one_error(world: World) -> None:
    async def refuse(request: Received, writer: asyncio.StreamWriter) -> None:
        if b'"prompt"' in request.body:
            await replies({"error": {"message": "too long"}}, 400)(request, writer)
        else:
            await TokenEngine("a", cuts=[600])(request, writer)

    gateway = await two(world, refuse, refuse, refuse)
    reply = await gateway.ask(CHAT, headers=CONTINUE)
    assert "not continued: upstream_broken" in error_of(reply)["message"]
    assert sum(len(engine.requests) for engine in world.engines) == 2


async def test_silent_replica_is_waited_for_no_longer_than_allowed(world: World) -> None:
    async def be_silent(request: Received, writer: asyncio.StreamWriter) -> None:
        await (never if b'"prompt"' in request.body else TokenEngine("a", cuts=[600]))(request, writer)

    gateway = await two(world, be_silent, be_silent, continuation_seconds=0.3)
    assert "first_byte_timeout" in error_of(await gateway.ask(CHAT, headers=CONTINUE))["message"]
    await eventually(lambda: nothing_is_left(gateway))


async def test_client_that_leaves_in_between_leaves_nothing(world: World) -> None:
    async def be_silent(request: Received, writer: asyncio.StreamWriter) -> None:
        await (never if b'"prompt"' in request.body else TokenEngine("a", cuts=[600]))(request, writer)

    gateway = await two(world, be_silent, be_silent)
    wire = await gateway.send(request_bytes(CHAT, headers=CONTINUE))
    await eventually(lambda: sum(len(engine.requests) for engine in world.engines) == 2)
    wire.close()
    await eventually(lambda: nothing_is_left(gateway))
    assert gateway.shared.counters.outcomes == {"client_gone": 1}
