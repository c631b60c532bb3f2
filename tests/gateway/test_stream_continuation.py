"""Streams that go on at another replica when theirs breaks off, and those that do not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from exaserve_ops.gateway.continuation import NO_TOKEN_IDS, TOO_LONG, TOO_OFTEN
from exaserve_ops.gateway.refusals import INTERRUPTED_EVENT
from exaserve_ops.routing.domain import markdown
from tests.fakes.token_engine import CHAT_PATH, FIRST_ID, PIECES, PROMPT, TokenEngine
from tests.fakes.upstream import (
    DONE,
    STREAM_HEAD,
    Answer,
    Received,
    StubEngine,
    chunk,
    event,
    never,
    replies,
    streams,
    token,
)
from tests.gateway.harness import Gateway, Reply, World, eventually, request_bytes

pytestmark = pytest.mark.asyncio

CONTINUE = {"x-continue-stream": "true"}
CHAT: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "messages": [{"role": "user", "content": "Say it."}],
    "stream_options": {"include_usage": True},
    "temperature": 0,
}
TEXT: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "prompt": "Say it.",
    "stream_options": {"include_usage": True},
    "max_tokens": 50,
}
TEXT_PATH = "/v1/completions"


def events_of(reply: Reply) -> list[Any]:
    """What the client got: JSON of each event, and text for what is none."""
    assert reply.complete
    assert reply.body.endswith(b"\n\n")
    data = [part.removeprefix(b"data: ") for part in reply.body.split(b"\n\n")[:-1]]
    return [json.loads(part) if part.startswith(b"{") else part for part in data]


def text_of(events: list[Any]) -> str:
    choices = [event["choices"][0] for event in events if isinstance(event, dict) and event.get("choices")]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices
    )


def breaking(*cuts: int, **kwargs: Any) -> list[TokenEngine]:
    """Two engines; whoever is asked breaks off after so many bytes, until there are no more such numbers."""
    shared = list(cuts)
    return [TokenEngine(name, cuts=shared, **kwargs) for name in "ab"]


async def two(world: World, *engines: Answer, **settings: Any) -> Gateway:
    """A gateway before engines on nodes of their own."""
    for number, engine in enumerate(engines):
        await world.engine(engine, node_id=f"n{number}")
    return await world.gateway(**settings)


def forget_failures(gateway: Gateway) -> None:
    for slot in gateway.shared.fleet.slots():
        slot.mark = markdown.CLEAR


def nothing_is_left(gateway: Gateway) -> bool:
    shared = gateway.shared
    return (
        not shared.open_requests
        and not shared.continuations.budget.kept
        and not any(slot.in_flight for slot in shared.fleet.slots())
    )


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
        ({"return_token_ids": True}, "return_token_ids"),
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
    assert reply.body.count(b'"error"') == 1
    assert reply.body.endswith(INTERRUPTED_EVENT)
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


def error_of(reply: Reply) -> dict[str, str]:
    """The one error event, which is the last event."""
    events = events_of(reply)
    assert [("error" in one) for one in events if isinstance(one, dict)].count(True) == 1
    error: dict[str, str] = events[-1]["error"]
    return error


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
