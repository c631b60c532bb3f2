"""What is written in one turn of the loop leaves at its end, in its order and before anything is closed."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from exaserve_ops.gateway.client import ClientConnection
from exaserve_ops.gateway.outbox import FEW_REQUESTS
from exaserve_ops.gateway.settings import GatewaySettings
from exaserve_ops.gateway.shared import Shared
from exaserve_ops.gateway.upstream import UpstreamConnection
from exaserve_ops.routing.domain.records import RouteRecord
from tests.fakes.transport import MemoryTransport
from tests.fakes.upstream import CHAT, replies
from tests.gateway.harness import SECRET, World, request_bytes

pytestmark = pytest.mark.asyncio


class CountingTransport(MemoryTransport):
    """Counts what would be system calls."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0

    def write(self, data: Any) -> None:
        self.writes += 1
        super().write(data)


class Idle:
    """An open request that does nothing."""

    def give_up_at_exit(self) -> None:
        """It has nothing to end."""


def gateway(*, is_busy: bool) -> Shared:
    settings = GatewaySettings(port=0, redis_url="unix:///nowhere", fleet_secret=SECRET)
    shared = Shared(settings, clock=time.monotonic, wall_clock=time.monotonic)
    if is_busy:
        shared.open_requests.update(Idle() for _ in range(FEW_REQUESTS))
    return shared


def client(shared: Shared) -> tuple[ClientConnection, CountingTransport]:
    connection, transport = ClientConnection(shared), CountingTransport()
    connection.connection_made(transport)
    return connection, transport


async def test_pieces_for_one_client_leave_by_one_call_at_the_end_of_the_turn() -> None:
    shared = gateway(is_busy=True)
    (one, first), (other, second) = client(shared), client(shared)
    for piece in (b"a", b"b", b"c"):
        one.write(piece)
        other.write(piece.upper())
    assert first.writes == second.writes == 0
    await asyncio.sleep(0)
    assert (bytes(first.written), first.writes) == (b"abc", 1)
    assert (bytes(second.written), second.writes) == (b"ABC", 1)
    one.write(b"d")  # a turn later it works as before
    await asyncio.sleep(0)
    assert bytes(first.written) == b"abcd"


async def test_nothing_waits_where_hardly_anything_is_open() -> None:
    one, transport = client(gateway(is_busy=False))
    one.write(b"a")
    assert bytes(transport.written) == b"a"


async def test_what_was_written_leaves_before_the_connection_closes() -> None:
    one, transport = client(gateway(is_busy=True))
    one.write(b"the last")
    one.finish(keep_alive=False)
    assert (bytes(transport.written), transport.is_cut) == (b"the last", True)
    await asyncio.sleep(0)
    assert transport.writes == 1


async def test_much_for_one_client_does_not_wait_so_that_its_slowness_shows() -> None:
    one, transport = client(gateway(is_busy=True))
    for _ in range(3):
        one.write(b"x" * 40_000)
    assert len(transport.written) == 80_000
    await asyncio.sleep(0)
    assert len(transport.written) == 120_000


async def test_cut_connection_gets_nothing_more() -> None:
    one, transport = client(gateway(is_busy=True))
    one.write(b"a")
    one.abort()
    await asyncio.sleep(0)
    assert transport.writes == 0


async def test_engine_that_answers_what_it_was_not_sent_yet_is_not_believed() -> None:
    shared = gateway(is_busy=True)
    shared.fleet.replace({"r": RouteRecord("r", "n", "n", 1, "m", "d", "127.0.0.1", 1, 1, 1)}, 0.0)
    connection, transport = UpstreamConnection(shared.fleet.slots()[0].pool), CountingTransport()
    connection.connection_made(transport)

    class Listener:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    connection.send(Listener(), b"POST", b"{}")
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    assert transport.is_cut
    await asyncio.sleep(0)
    assert transport.writes == 0


async def test_many_at_once_are_all_answered(world: World) -> None:
    await world.engine(replies(CHAT))
    gateway = await world.gateway()
    wires = [await gateway.connect() for _ in range(8 * FEW_REQUESTS)]
    for _ in range(3):
        for wire in wires:
            wire.writer.write(request_bytes({"model": "m"}, headers={"x-session-id": "s"}))
        answers = [await wire.reply() for wire in wires]
        assert [(answer.status, answer.json()) for answer in answers] == [(200, CHAT)] * len(wires)
