"""A new replica gets requests once it was connected to, by this gateway or by another."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.fakes.upstream import CHAT, StubEngine, replies
from tests.gateway.harness import World, eventually

pytestmark = pytest.mark.asyncio


async def test_new_replica_is_tried_at_once_and_then_serves(world: World) -> None:
    gateway = await world.gateway(wait_seconds=5.0)
    await world.engine(replies(CHAT), reached=False)
    reply = await gateway.ask()
    assert reply.status == 200
    [slot] = gateway.shared.fleet.slots()
    assert slot.reach is True
    assert not slot.record.reached, "nobody else had to say so"


async def test_replica_behind_a_firewall_gets_no_request_until_its_port_opens(world: World) -> None:
    gateway = await world.gateway(wait_seconds=0.3)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        world.put("r0", port, reached=False)
        await eventually(lambda: len(gateway.shared.fleet.slots()) == 1)
        assert (await gateway.ask()).status == 503
        [slot] = gateway.shared.fleet.slots()
        assert slot.failed_at_seconds == 0, "no request was sent there to find out"
    engine = StubEngine(replies(CHAT))

    world.engines.append(await engine.start(port))
    async with asyncio.timeout(10):
        while (await gateway.ask()).status != 200:
            continue


async def test_what_another_gateway_reached_serves_before_this_one_has_tried(world: World) -> None:
    await world.engine(replies(CHAT), reached=True)
    gateway = await world.gateway()
    [slot] = gateway.shared.fleet.slots()
    slot.reach = None
    assert slot.is_open, "a gateway that starts anew must not move every conversation"
    assert (await gateway.ask()).status == 200


async def test_sleeper_whose_port_is_open_gets_no_request_until_the_record_says_it_is_awake(
    world: World,
) -> None:
    sleeper = await world.engine(replies(CHAT), reached=False, sleeps=True)
    awake = await world.engine(replies(CHAT))
    gateway = await world.gateway(wait_seconds=5.0)
    slots = gateway.shared.fleet.slots
    await eventually(lambda: all(slot.reach for slot in slots()))
    for _ in range(8):
        assert (await gateway.ask()).status == 200
    assert (len(sleeper.requests), len(awake.requests)) == (0, 8)

    world.remove("r1")
    await eventually(lambda: len(slots()) == 1)
    waiting = asyncio.create_task(gateway.ask())
    world.put("r0", sleeper.port, reached=True)
    assert (await waiting).status == 200
    assert len(sleeper.requests) == 1
