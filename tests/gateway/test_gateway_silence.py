"""A replica that falls silent without a word: its requests go elsewhere, its streams end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from dataclasses import replace

import pytest

from exaserve_ops.routing.domain import silence
from exaserve_ops.routing.domain.silence import Silence, why_elsewhere, why_over
from tests.fakes.upstream import CHAT, Received, never, replies, streams, token
from tests.gateway.harness import World, eventually, request_bytes

pytestmark = pytest.mark.asyncio

STREAM = {"model": "m", "stream": True}
SESSION = {"x-session-id": "s"}
QUIET = Silence(3.0, withdrawn=False, suspect=False)


async def test_request_leaves_a_silent_replica_that_was_withdrawn(world: World) -> None:
    mute = await world.engine(never, node_id="n0")
    gateway = await world.gateway()
    wire = await gateway.send(request_bytes({"model": "m"}))
    await eventually(lambda: mute.requests)
    other = await world.engine(replies(CHAT), node_id="n1")
    world.remove("r0")
    reply = await wire.reply()
    assert (reply.status, reply.headers["x-exaops-replica"]) == (200, "r1")
    assert len(other.requests) == 1
    async with asyncio.timeout(1):
        await mute.requests[0].gone.wait()


async def test_request_leaves_a_silent_replica_of_a_suspect_node(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "MOVE_AFTER_SECONDS", 0.2)
    mute = await world.engine(never, node_id="n0")
    gateway = await world.gateway()
    wire = await gateway.send(request_bytes({"model": "m"}, headers=SESSION))
    await eventually(lambda: mute.requests)
    await world.engine(replies(CHAT), node_id="n1")
    suspect(world, "r0")
    reply = await wire.reply()
    assert (reply.status, reply.headers["x-exaops-replica"]) == (200, "r1")
    # The session lives there now.
    again = await gateway.ask(headers=SESSION)
    assert (again.headers["x-exaops-replica"], again.headers["x-exaops-route"]) == ("r1", "sticky")


async def test_silent_replica_that_nothing_is_held_against_keeps_its_request(world: World) -> None:
    slow = await world.engine(never, node_id="n0")
    gateway = await world.gateway()
    await gateway.send(request_bytes({"model": "m"}))
    await eventually(lambda: slow.requests)
    await world.engine(replies(CHAT), node_id="n1")
    await eventually(lambda: len(gateway.shared.fleet.slots()) == 2)
    far = time.monotonic() + 60.0
    for request in list(gateway.shared.open_requests):
        request.sweep(far)  # type: ignore[attr-defined] # the one class that is in there
    assert gateway.shared.counters.retries == 0
    assert len(gateway.shared.open_requests) == 1


async def test_request_stays_with_a_suspect_replica_while_there_is_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "MOVE_AFTER_SECONDS", 0.0)
    answer = asyncio.Event()

    async def late(request: Received, writer: asyncio.StreamWriter) -> None:
        await answer.wait()
        await replies(CHAT)(request, writer)

    engine = await world.engine(late, node_id="n0")
    suspect(world, "r0")
    gateway = await world.gateway()
    wire = await gateway.send(request_bytes({"model": "m"}))
    await eventually(lambda: engine.requests)
    far = time.monotonic() + 60.0
    for request in list(gateway.shared.open_requests):
        request.sweep(far)  # type: ignore[attr-defined] # the one class that is in there
    answer.set()
    assert (await wire.reply()).status == 200


async def test_stream_of_a_withdrawn_replica_ends_with_an_error_once_it_is_silent(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "OVER_AFTER_SECONDS", 0.2)
    await world.engine(streams([token("a")], hold=asyncio.Event()))
    gateway = await world.gateway()
    wire = await gateway.send(request_bytes(STREAM))
    async with asyncio.timeout(5):
        await wire.reader.readuntil(token("a"))
    assert len(gateway.shared.open_requests) == 1
    world.remove("r0")
    assert b'"error"' in await wire.rest()


async def test_new_requests_avoid_suspect_nodes_unless_most_are(world: World) -> None:
    for number in range(4):
        await world.engine(replies(CHAT), node_id=f"n{number}")
    gateway = await world.gateway()
    suspect(world, "r0")
    await eventually(lambda: len(gateway.shared.fleet.groups("m")) == 3)
    served = {(await gateway.ask()).headers["x-exaops-node"] for _ in range(30)}
    assert served == {"n1", "n2", "n3"}
    for name in ("r1", "r2"):
        suspect(world, name)
    await eventually(lambda: len(gateway.shared.fleet.groups("m")) == 4)


async def test_session_stays_with_a_suspect_node_that_answers(world: World) -> None:
    for number in range(2):
        await world.engine(replies(CHAT), node_id=f"n{number}")
    gateway = await world.gateway()
    home = (await gateway.ask(headers=SESSION)).headers["x-exaops-replica"]
    suspect(world, home)
    await eventually(lambda: len(gateway.shared.fleet.groups("m")) == 1)
    assert (await gateway.ask(headers=SESSION)).headers["x-exaops-replica"] == home


async def test_host_that_does_not_even_refuse_is_left_after_a_moment(world: World) -> None:
    with contextlib.ExitStack() as stack:
        port = port_that_drops(stack)
        world.put("r0", port, node_id="n0")
        await world.engine(replies(CHAT), node_id="n1")
        gateway = await world.gateway(connect_seconds=0.3)
        for _ in range(10):
            reply = await gateway.ask()
            assert (reply.status, reply.headers["x-exaops-replica"]) == (200, "r1")
        assert gateway.shared.counters.retries >= 1


async def test_connections_to_engines_end_when_the_host_is_gone(world: World) -> None:
    await world.engine(replies(CHAT))
    gateway = await world.gateway()
    await gateway.ask()
    [slot] = gateway.shared.fleet.slots()
    connection = slot.pool.take()
    assert connection is not None
    connected = connection._transport.get_extra_info("socket")
    assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2500
    assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    connection.abort()


async def test_what_is_known_decides_and_time_alone_does_not() -> None:
    assert why_elsewhere(QUIET) == why_elsewhere(replace(QUIET, seconds=1e6)) == ""
    assert why_elsewhere(replace(QUIET, withdrawn=True, seconds=0.0))
    assert why_elsewhere(replace(QUIET, suspect=True, seconds=1.0))
    assert not why_elsewhere(replace(QUIET, suspect=True, seconds=0.9))
    assert not why_over(replace(QUIET, suspect=True, seconds=1e6))
    assert not why_over(replace(QUIET, withdrawn=True, seconds=4.9))
    assert why_over(replace(QUIET, withdrawn=True, seconds=5.0))


def port_that_drops(stack: contextlib.ExitStack) -> int:
    """A port whose queue of connections is full: the kernel drops every further one without a word."""
    listener = stack.enter_context(socket.socket())
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    for _ in range(4):
        waiting = stack.enter_context(socket.socket())
        waiting.setblocking(False)  # noqa: FBT003 - the socket's own signature
        waiting.connect_ex(listener.getsockname())
    return int(listener.getsockname()[1])


def suspect(world: World, replica_id: str) -> None:
    """Have the node of a replica miss signs of life."""
    world.records[replica_id] = replace(world.records[replica_id], node_suspect=True)
    world.writer.write_replicas(world.records)
