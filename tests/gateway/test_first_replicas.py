"""Who asks for a model that nobody serves yet waits for longer where a replica is on its way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.fakes.upstream import CHAT, replies
from tests.gateway.harness import Gateway, Reply, World, eventually
from tests.gateway.test_gateway_process import at, can_connect, running

pytestmark = pytest.mark.asyncio
MODELS = frozenset({"m", "idle"})


@contextlib.asynccontextmanager
async def asking(gateway: Gateway, count: int) -> AsyncIterator[list[asyncio.Task[Reply]]]:
    """So many requests for the model that is to come, all of which wait."""
    before = len(gateway.shared.waiting)
    tasks = [asyncio.create_task(gateway.ask()) for _ in range(count)]
    await eventually(lambda: len(gateway.shared.waiting) == before + count)
    yield tasks
    await asyncio.gather(*tasks)


async def declared(world: World, **settings: Any) -> Gateway:
    """A gateway that waits for nothing but what is on its way."""
    world.writer.write_models(MODELS)
    world.writer.write_coming(frozenset({"m"}))
    gateway = await world.gateway(wait_seconds=0.1, **{"first_replica_seconds": 100.0} | settings)
    await eventually(lambda: gateway.shared.fleet.is_coming("m"))
    return gateway


async def test_request_waits_for_a_replica_that_is_on_its_way(world: World) -> None:
    gateway = await declared(world)
    async with asking(gateway, 3) as tasks:
        reply = await gateway.ask({"model": "idle"})
        assert (reply.status, reply.code) == (503, "no_replica"), "nobody is on the way there"
        assert not any(task.done() for task in tasks)
        await world.engine(replies(CHAT))
    assert [task.result().status for task in tasks] == [200, 200, 200]


async def test_one_that_cannot_be_reached_yet_is_on_its_way_too(world: World) -> None:
    gateway = await declared(world)
    sleeper = await world.engine(replies(CHAT), reached=False, sleeps=True)
    await eventually(gateway.shared.fleet.slots)
    async with asking(gateway, 1) as tasks:
        assert (await gateway.ask({"model": "idle"})).status == 503
        assert not tasks[0].done()
        world.put("r0", sleeper.port, reached=True)
    assert tasks[0].result().status == 200


async def test_what_never_comes_is_waited_for_no_longer_than_allowed(world: World) -> None:
    gateway = await declared(world, first_replica_seconds=0.3)
    reply = await gateway.ask()
    assert (reply.status, reply.code) == (503, "no_replica")


async def test_those_who_wait_for_long_leave_half_of_the_room_to_others(world: World) -> None:
    gateway = await declared(world, wait_requests=4)
    async with asking(gateway, 2) as tasks:
        assert (await gateway.ask()).status == 503, "its wait was the short one"
        assert not any(task.done() for task in tasks)
        await world.engine(replies(CHAT))
    assert [task.result().status for task in tasks] == [200, 200]


async def test_gateway_that_begins_refuses_nobody_for_want_of_a_table(world: World) -> None:
    """It does not listen before: connections go to others of its port, or are tried again."""
    engine = await world.engine(replies(CHAT))
    world.redis.flushall()
    known = len(world.redis.client_list())

    async def write_once_it_is_there() -> None:
        await eventually(lambda: len(world.redis.client_list()) > known, 60)
        world.allow("sk-test-key")
        world.writer.write_replicas(world.records)

    writing = asyncio.create_task(write_once_it_is_there())
    async with running(world.url, EXAOPS_GATEWAY_FIRST_TABLE_SECONDS="60") as (port, _):
        gateway = await at(port, world)
        assert (await gateway.ask()).status == 200
        assert writing.done()
    await writing
    assert len(engine.requests) == 1
    assert not can_connect(port)
