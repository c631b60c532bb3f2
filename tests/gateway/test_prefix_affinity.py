"""Prompts that begin alike meet at one replica, unless it is too busy."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.upstream import CHAT, Received, replies
from tests.gateway.harness import Gateway, World, eventually

pytestmark = pytest.mark.asyncio

SYSTEM = "You are a careful assistant of a shipping company. " * 60


def chat(question: str) -> dict[str, object]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return {"model": "m", "messages": messages}


async def place(gateway: Gateway, question: str, **headers: str) -> tuple[str, str]:
    reply = await gateway.ask(chat(question), headers=headers)
    assert reply.status == 200
    return reply.headers["x-exaops-replica"], reply.headers["x-exaops-route"]


async def test_anonymous_prompts_with_one_beginning_reach_one_replica(world: World) -> None:
    for number in range(6):
        await world.engine(replies(CHAT), node_id=f"n{number // 2}")
    gateway = await world.gateway()
    home, why = await place(gateway, "Where is my parcel?")
    assert why == "new"
    for number in range(12):
        assert await place(gateway, f"Question {number}") == (home, "prefix")
    assert all(slot.pending_tokens == pytest.approx(0.0) for slot in gateway.shared.fleet.slots())


async def test_new_session_begins_where_its_prompt_is_and_stays_there(world: World) -> None:
    for number in range(6):
        await world.engine(replies(CHAT), node_id=f"n{number // 2}")
    gateway = await world.gateway()
    home, _ = await place(gateway, "first")
    assert (await place(gateway, "second", **{"x-session-id": "s"}))[0] == home
    assert await place(gateway, "third", **{"x-session-id": "s"}) == (home, "sticky")


async def test_busy_holder_is_passed_over_and_the_beginning_spreads(world: World) -> None:
    go = asyncio.Event()

    async def slow(request: Received, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        await replies(CHAT)(request, writer)

    for number in range(2):
        await world.engine(slow, node_id=f"n{number}")
    gateway = await world.gateway()
    asked = [asyncio.ensure_future(place(gateway, f"q{number}")) for number in range(24)]
    await eventually(lambda: sum(len(engine.requests) for engine in world.engines) == 24)
    shares = sorted(len(engine.requests) for engine in world.engines)
    go.set()
    await asyncio.gather(*asked)
    assert shares[0] >= 6, "what is queued at one outweighs what it has"


async def test_short_prompts_go_by_load_and_a_dead_holder_costs_one_retry(world: World) -> None:
    for number in range(4):
        await world.engine(replies(CHAT), node_id=f"n{number}")
    gateway = await world.gateway()
    short = await gateway.ask({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    assert short.headers["x-exaops-route"] == "new"
    home, _ = await place(gateway, "first")
    await world.engines[int(home[1:])].stop()
    other, why = await place(gateway, "second")
    assert (other != home, why) == (True, "retry")
    assert await place(gateway, "third") == (other, "prefix")
