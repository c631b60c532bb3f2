"""A replica that sessions are leaving keeps those it has, and gets no new ones while others have room."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.fakes.upstream import CHAT, Answer, Received, replies
from tests.gateway.harness import Gateway, World, eventually

pytestmark = pytest.mark.asyncio


async def turn(gateway: Gateway, session: str) -> tuple[str, str]:
    reply = await gateway.ask(headers={"x-session-id": session})
    assert reply.status == 200
    return reply.headers["x-exaops-replica"], reply.headers["x-exaops-route"]


def held(gate: asyncio.Event) -> Answer:
    """Answers once the gate opens."""

    async def answer(request: Received, writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        await replies(CHAT)(request, writer)

    return answer


async def mark(world: World, gateway: Gateway, replica: str, **record: Any) -> None:
    """Change a replica's record, and wait until the gateway has it."""
    known = world.records[replica]
    world.put(replica, known.port, node_id=known.node_id, **record)

    def is_known() -> bool:
        slot = gateway.shared.fleet.find(replica)
        return slot is not None and slot.record == world.records[replica]

    await eventually(is_known)


async def test_sessions_stay_until_they_are_moved_and_first_turns_go_elsewhere(world: World) -> None:
    for node in range(3):
        await world.engine(replies(CHAT), node_id=f"n{node}")
    gateway = await world.gateway()
    home, _ = await turn(gateway, "s")
    await mark(world, gateway, home, is_left=True)
    assert await turn(gateway, "s") == (home, "sticky")
    first_turns = {(await turn(gateway, f"new-{number}"))[0] for number in range(30)}
    assert first_turns == {"r0", "r1", "r2"} - {home}
    anonymous = {(await gateway.ask()).headers["x-exaops-replica"] for _ in range(20)}
    assert home not in anonymous


async def test_session_of_a_draining_replica_is_served_there_until_it_is_handed_over(world: World) -> None:
    for node in range(2):
        await world.engine(replies(CHAT), node_id=f"n{node}")
    gateway = await world.gateway()
    home, _ = await turn(gateway, "s")
    await mark(world, gateway, home, accepts_new=False, keeps_sessions=True)
    assert await turn(gateway, "s") == (home, "sticky")
    assert (await turn(gateway, "another"))[0] != home
    await mark(world, gateway, home, accepts_new=False)
    elsewhere, why = await turn(gateway, "s")
    assert (elsewhere != home, why) == (True, "repinned")


async def test_first_turns_go_to_one_that_is_left_rather_than_nowhere(world: World) -> None:
    await world.engine(replies(CHAT), node_id="n0")
    gateway = await world.gateway()
    await mark(world, gateway, "r0", is_left=True)
    assert (await turn(gateway, "s"))[0] == "r0"
    assert "m" in gateway.shared.fleet.models()


async def test_first_turns_go_to_one_that_is_left_where_the_others_are_full(world: World) -> None:
    gate = asyncio.Event()
    await world.engine(held(gate), node_id="n0")
    await world.engine(replies(CHAT), node_id="n1")
    gateway = await world.gateway(in_flight_per_replica=1)
    await mark(world, gateway, "r1", is_left=True)
    waiting = asyncio.create_task(gateway.ask())
    slot = gateway.shared.fleet.find("r0")
    assert slot is not None
    await eventually(lambda: slot.in_flight == 1)
    assert (await turn(gateway, "s"))[0] == "r1"
    gate.set()
    assert (await waiting).headers["x-exaops-replica"] == "r0"
