"""Long prompts take turns, so that short ones find replicas that are not computing them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from exaserve_ops.gateway.waiting import Queue, WaitingRoom
from tests.fakes.upstream import CHAT, Received, replies
from tests.gateway.harness import Gateway, Wire, World, eventually, request_bytes

pytestmark = pytest.mark.asyncio

LONG_TOKENS = 1000
SETTINGS: dict[str, Any] = {"long_prompt_tokens": LONG_TOKENS}


@dataclass
class Held:
    """Engines that answer when they are let."""

    go: asyncio.Event = field(default_factory=asyncio.Event)
    texts: list[str] = field(default_factory=list)
    """First letters of what has come to an engine, in order."""

    async def __call__(self, request: Received, writer: asyncio.StreamWriter) -> None:
        self.texts.append(msgspec.json.decode(request.body)["messages"][0]["content"][0])
        await self.go.wait()
        await replies(CHAT)(request, writer)


def prompt(letter: str, tokens: int) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": letter * tokens * 4}]}


async def send(gateway: Gateway, letter: str, tokens: int, **headers: str) -> Wire:
    return await gateway.send(request_bytes(prompt(letter, tokens), headers=headers))


async def begin(world: World, engines: int, **settings: Any) -> tuple[Gateway, Held]:
    held = Held()
    for number in range(engines):
        await world.engine(held, node_id=f"n{number}")
    return await world.gateway(**SETTINGS, **settings), held


def places(gateway: Gateway) -> int:
    return sum(slot.long_prompts for slot in gateway.shared.fleet.slots())


async def test_second_long_prompt_waits_for_the_first_and_short_ones_pass(world: World) -> None:
    gateway, held = await begin(world, 1)
    wires = [await send(gateway, "a", 2000)]
    await eventually(lambda: held.texts == ["a"])
    wires.append(await send(gateway, "b", 2000))
    await eventually(lambda: gateway.shared.waiting.waiting_in(Queue.LONG) == 1)
    wires.append(await send(gateway, "c", 500))
    await eventually(lambda: held.texts == ["a", "c"])
    page = (await gateway.ask(b"", path="/metrics", method="GET")).body.decode()
    assert "exaops_gateway_waiting_long_prompts 1" in page
    held.go.set()
    assert [(await wire.reply()).status for wire in wires] == [200, 200, 200]
    assert held.texts == ["a", "c", "b"]
    assert places(gateway) == 0


async def test_a_quarter_of_the_replicas_is_left_to_short_prompts(world: World) -> None:
    gateway, held = await begin(world, 4)
    wires = [await send(gateway, letter, 2000) for letter in "abcd"]
    await eventually(lambda: gateway.shared.waiting.waiting_in(Queue.LONG) == 1)
    assert sorted(len(engine.requests) for engine in world.engines) == [0, 1, 1, 1]
    held.go.set()
    assert {(await wire.reply()).status for wire in wires} == {200}
    assert places(gateway) == 0


async def test_prompt_that_is_known_where_it_goes_is_not_long(world: World) -> None:
    gateway, held = await begin(world, 1)
    held.go.set()
    assert (await gateway.ask(prompt("a", 2000))).status == 200
    held.go.clear()
    wires = [await send(gateway, "b", 2000)]
    await eventually(lambda: held.texts == ["a", "b"])
    wires.append(await send(gateway, "a", 2100))
    await eventually(lambda: held.texts == ["a", "b", "a"])
    held.go.set()
    assert [(await wire.reply()).status for wire in wires] == [200, 200]


async def test_request_may_say_that_it_is_long(world: World) -> None:
    gateway, held = await begin(world, 1)
    wires = [await send(gateway, "a", 10, **{"x-traffic-class": "long-context"})]
    await eventually(lambda: held.texts == ["a"])
    wires.append(await send(gateway, "b", 10, **{"x-traffic-class": "long-context"}))
    await eventually(lambda: len(gateway.shared.waiting) == 1)
    held.go.set()
    assert [(await wire.reply()).status for wire in wires] == [200, 200]


async def test_place_of_a_long_prompt_is_free_again_however_it_ended(world: World) -> None:
    gateway, held = await begin(world, 1)
    gone = await send(gateway, "a", 2000)
    await eventually(lambda: held.texts == ["a"])
    wire = await send(gateway, "b", 2000)
    await eventually(lambda: len(gateway.shared.waiting) == 1)
    gone.close()
    await eventually(lambda: held.texts == ["a", "b"])
    held.go.set()
    assert (await wire.reply()).status == 200
    assert places(gateway) == 0


async def test_long_prompt_is_told_that_others_keep_it_waiting(world: World) -> None:
    gateway, held = await begin(world, 1, long_wait_seconds=0.3)
    wire = await send(gateway, "a", 2000)
    await eventually(lambda: held.texts == ["a"])
    reply = await gateway.ask(prompt("b", 2000))
    assert (reply.status, reply.code, reply.headers["retry-after"]) == (429, "overloaded", "5")
    held.go.set()
    assert (await wire.reply()).status == 200


@dataclass(eq=False)
class Waiting:
    """Somebody in the line who cannot go yet."""

    queue: Queue
    tries: int = 0
    model: str = "m"

    def wake(self) -> bool:
        self.tries += 1
        return False


async def test_long_line_that_stands_costs_few_tries_however_many_wait() -> None:
    room = WaitingRoom(200)
    line = [Waiting(Queue.LONG) for _ in range(100)]
    assert all(room.add(waiter) for waiter in line)
    assert not room.add(Waiting(Queue.LONG)), "the other half is for those that are quick"
    assert room.add(Waiting(Queue.INTERACTIVE))
    room.wake_long("m")
    room.wake_all()
    assert sum(waiter.tries for waiter in line) <= 8
    assert line[0].tries == 2
