"""Two real engines: what the second says after a break is, token for token, what the first would have."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import pytest_asyncio
from safetensors.numpy import load_file, save_file

from tests.engines.conftest import MODEL_NAME, EngineProcess, engine_starter, free_port
from tests.fakes.breaking_wire import BreakingWire
from tests.gateway.continued_streams import (
    CONTINUE,
    TEXT_PATH,
    events_of,
    forget_failures,
    nothing_is_left,
    prompt_ids_of,
    text_of,
    token_ids_of,
)
from tests.gateway.harness import KEY, SECRET, Gateway, Reply, World, eventually, request_bytes
from workers.engines.demo_model import HIDDEN, build_tokenizer, make_demo_model
from workers.protocol.digests import engine_api_key, node_key

pytestmark = pytest.mark.asyncio

TOKENS = 20
IDS_TOKENS = 12


@pytest.fixture(scope="module")
def byte_salad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, but it says bytes of longer characters, whole and broken, among a few words."""
    folder = tmp_path_factory.mktemp("models") / "salad"
    make_demo_model(folder)
    tokenizer = build_tokenizer()
    symbols = [tokenizer.encode(text).ids for text in ("é", "ü", "🙂", " the", " and", ".")]
    wanted = sorted({token for ids in symbols for token in ids})
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"]
    head[:, 1:] = 0
    head[:, 0] = -20.0
    random = np.random.Generator(np.random.PCG64(3))
    head[wanted] = random.standard_normal((len(wanted), HIDDEN), dtype=np.float32) * 3 / np.sqrt(HIDDEN)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def engines(byte_salad: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    with engine_starter(tmp_path_factory.mktemp("engines")) as start:
        started = []
        for number in range(2):
            key = engine_api_key(node_key(SECRET, f"n{number}", 1), f"r{number}", 1)
            started.append(start("torch", byte_salad, port=free_port(), api_key=key, num_blocks=128))
        for engine in started:
            engine.wait_ready()
        yield started


@pytest_asyncio.fixture
async def wires(engines: list[EngineProcess]) -> AsyncIterator[list[BreakingWire]]:
    """A wire to each engine; a break is for whoever is asked first."""
    breaks: list[int] = []
    made = [await BreakingWire(int(e.address.rpartition(":")[2]), breaks).start() for e in engines]
    yield made
    for wire in made:
        await wire.stop()


async def before(world: World, wires: list[BreakingWire]) -> Gateway:
    for number, wire in enumerate(wires):
        world.put(f"r{number}", wire.port, node_id=f"n{number}", model=MODEL_NAME)
    return await world.gateway()


def asked(**fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": TOKENS,
        "ignore_eos": True,
        **fields,
    }


def said(reply: Reply) -> tuple[str, Any, Any]:
    """Text, reason of its end, and usage but for what was in cache."""
    events = events_of(reply)
    assert events[-1] == b"[DONE]"
    usage = events[-2]["usage"]
    counts = {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return text_of(events), events[-3]["choices"][0]["finish_reason"], counts


CHAT = {"messages": [{"role": "user", "content": "Tell me something."}]}
SEEDED = {"temperature": 1.2, "top_p": 0.9, "seed": 11}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", asked(**CHAT, temperature=0)),
        ("/v1/chat/completions", asked(**CHAT, **SEEDED)),
        (TEXT_PATH, asked(prompt="Once", **SEEDED)),
    ],
)
async def test_break_after_any_token_changes_nothing(
    world: World, wires: list[BreakingWire], path: str, body: dict[str, Any]
) -> None:
    """Also where a character or a stop string has begun."""
    gateway = await before(world, wires)
    whole = await gateway.ask(body, path=path, headers=CONTINUE)
    text, _, _ = said(whole)
    assert any(ord(letter) > 127 for letter in text)
    breaks = 0
    for stop in (None, text[-6:-2]):
        body = {**body, "stop": stop}
        twin = said(await gateway.ask(body, path=path))
        count = twin[2]["completion_tokens"]
        assert (twin[1] == "stop") == (stop is not None)
        for place in range(count + 1):
            wires[0].breaks[:] = [place]
            forget_failures(gateway)
            broken = await gateway.ask(body, path=path, headers=CONTINUE)
            assert said(broken) == twin, (stop, place)
            assert not wires[0].breaks
            begun = gateway.shared.counters.continuations["begun"]
            assert begun == breaks + (place < count), "only the end was missing, if it was not continued"
            breaks = begun
    assert gateway.shared.counters.continuations["resumed"] == breaks


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", asked(**CHAT, temperature=0)),
        ("/v1/chat/completions", asked(**CHAT, **SEEDED)),
        (TEXT_PATH, asked(prompt="Once", temperature=0)),
        (TEXT_PATH, asked(prompt="Once", **SEEDED)),
    ],
)
async def test_break_after_any_token_changes_no_event_of_clients_that_ask_for_ids(
    world: World, wires: list[BreakingWire], path: str, body: dict[str, Any]
) -> None:
    """Each piece is that of a twin that the gateway only passed on: its text, its ids, its end."""
    gateway = await before(world, wires)
    body = {**body, "max_tokens": IDS_TOKENS, "return_token_ids": True}
    text = text_of(events_of(await gateway.ask(body, path=path)))
    for stop in (None, text[-4:-1]):
        body = {**body, "stop": stop}
        twin = pieces_of(await gateway.ask(body, path=path))
        ids = token_ids_of(twin)
        assert len(prompt_ids_of(twin)) == 1
        for place in range(len(ids) + 1):
            wires[0].breaks[:] = [place]
            forget_failures(gateway)
            broken = await gateway.ask(body, path=path, headers=CONTINUE)
            assert broken.headers["x-exaops-continuation"] == "ready"
            assert pieces_of(broken) == twin, (stop, place)
            assert not wires[0].breaks


def pieces_of(reply: Reply) -> list[Any]:
    """Events without what differs between two answers to one request, and what was in cache."""
    events = [one for one in events_of(reply) if isinstance(one, dict)]
    assert len({(one.pop("id"), one.pop("created")) for one in events}) == 1
    events[-1]["usage"].pop("prompt_tokens_details", None)
    return events


async def test_official_client_runs_unchanged_before_real_engines(
    world: World, engines: list[EngineProcess], wires: list[BreakingWire]
) -> None:
    """Chat, completions, streams (a broken one, too), errors, and leaving in the middle."""
    gateway = await before(world, wires)
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hello."}]
    own: dict[str, Any] = {"ignore_eos": True}
    address = f"http://127.0.0.1:{gateway.port}/v1"
    async with openai.AsyncOpenAI(base_url=address, api_key=KEY, max_retries=0, timeout=30) as client:
        chat = client.chat.completions
        whole = await chat.create(
            model=MODEL_NAME, messages=messages, max_tokens=TOKENS, temperature=0, extra_body=own
        )
        assert whole.usage is not None
        assert whole.usage.completion_tokens == TOKENS
        wires[0].breaks[:] = [7]
        stream = await chat.create(
            model=MODEL_NAME,
            messages=messages,
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=own,
            extra_headers=CONTINUE,
        )
        pieces = [piece async for piece in stream]
        choices = [choice for piece in pieces for choice in piece.choices]
        assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
        assert len({(piece.id, piece.created, piece.model, piece.object) for piece in pieces}) == 1
        assert [choice.delta.role for choice in choices if choice.delta.role] == ["assistant"]
        assert (pieces[-1].usage and pieces[-1].usage.completion_tokens) == TOKENS
        assert gateway.shared.counters.continuations == {"begun": 1, "resumed": 1}
        text = await client.completions.create(model=MODEL_NAME, prompt="Once", max_tokens=5, extra_body=own)
        assert text.choices[0].finish_reason == "length"
        with pytest.raises(openai.BadRequestError, match="context"):
            await client.completions.create(model=MODEL_NAME, prompt="Once", max_tokens=100_000)
        with pytest.raises(openai.NotFoundError):
            await chat.create(model="other", messages=messages)
        for headers in ({}, CONTINUE):
            left = await chat.create(
                model=MODEL_NAME, messages=messages, stream=True, extra_body=own, extra_headers=headers
            )
            await anext(aiter(left))
            await left.close()
        await eventually(lambda: nothing_is_left(gateway))
        for engine in engines:
            await eventually(lambda engine=engine: engine.sample().requests_running == 0)  # type: ignore[misc] # mypy cannot type defaults


async def test_engine_killed_in_the_middle_changes_nothing(
    world: World, engines: list[EngineProcess], wires: list[BreakingWire]
) -> None:
    gateway = await before(world, wires)
    body = asked(**CHAT, temperature=0, max_tokens=300)
    twin = said(await gateway.ask(body, headers=CONTINUE))
    wire = await gateway.connect()
    seen = b""
    await wire.send(request_bytes(body, headers=CONTINUE))
    async with asyncio.timeout(20):
        while seen.count(b'"content"') < 12:
            seen += await wire.reader.readuntil(b"\n\n")
    first = next(n for n in (0, 1) if f"x-exaops-replica: r{n}".encode() in seen)
    engines[first].process.kill()
    async with asyncio.timeout(20):
        while not seen.endswith(b"data: [DONE]\n\n"):
            seen += await wire.reader.readuntil(b"\n\n")
    events = [json.loads(part[6:]) for part in seen.split(b"\n") if part.startswith(b"data: {")]
    assert text_of(events) == twin[0]
    assert gateway.shared.counters.continuations == {"begun": 1, "resumed": 1}
    wire.close()
