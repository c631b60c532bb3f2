"""Replicas that refuse, die, stall or lie; clients that leave; nothing to serve with."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import pytest

from exaserve_ops.gateway.refusals import INTERRUPTED_EVENT
from tests.fakes.upstream import (
    CHAT,
    DONE,
    STREAM_HEAD,
    Received,
    StubEngine,
    chunk,
    event,
    hang_up,
    never,
    replies,
    streams,
    token,
)
from tests.gateway.harness import Gateway, World, eventually, request_bytes

pytestmark = pytest.mark.asyncio

STREAM = {"model": "m", "stream": True}


def in_flight(gateway: Gateway) -> int:
    return sum(slot.in_flight for slot in gateway.shared.fleet.slots())


@pytest.fixture
def closed_port() -> Iterator[Callable[[], int]]:
    """Makes ports where nothing listens, and where nobody else can until the test is over."""
    with contextlib.ExitStack() as held:

        def take() -> int:
            place = held.enter_context(socket.socket())
            place.bind(("127.0.0.1", 0))
            return int(place.getsockname()[1])

        yield take


@pytest.mark.parametrize("body", [{"model": "m"}, STREAM])
async def test_client_that_leaves_stops_its_request_at_the_engine(
    world: World, body: dict[str, object]
) -> None:
    engine = await world.engine(never)
    gateway = await world.gateway()
    for number in range(1, 11):
        wire = await gateway.send(request_bytes(body))
        await eventually(lambda number=number: len(engine.requests) == number)  # type: ignore[misc] # mypy cannot type defaults
        assert in_flight(gateway) == 1
        wire.close()
        async with asyncio.timeout(1):
            await engine.requests[-1].gone.wait()
    await eventually(lambda: in_flight(gateway) == 0)
    assert gateway.shared.counters.outcomes == {"client_gone": 10}


async def test_client_that_leaves_in_the_middle_of_a_stream_stops_it(world: World) -> None:
    engine = await world.engine(streams([token("a")], hold=asyncio.Event()))
    gateway = await world.gateway()
    wire = await gateway.send(request_bytes(STREAM))
    async with asyncio.timeout(5):
        await wire.reader.readuntil(token("a"))
    assert in_flight(gateway) == 1
    wire.close()
    async with asyncio.timeout(1):
        await engine.requests[0].gone.wait()
    await eventually(lambda: in_flight(gateway) == 0)


async def test_clients_that_leave_at_any_moment_leak_no_slot(world: World) -> None:
    await world.engine(streams([token("a"), DONE], gap_seconds=0.001))
    gateway = await world.gateway()

    async def leave_after(seconds: float) -> None:
        wire = await gateway.send(request_bytes(STREAM))
        await asyncio.sleep(seconds)
        wire.close()

    await asyncio.gather(*(leave_after(number * 0.00003) for number in range(200)))
    await eventually(lambda: not gateway.shared.open_requests)
    assert in_flight(gateway) == 0
    assert all(group.in_flight == 0 for group in gateway.shared.fleet.groups("m"))
    assert (await gateway.ask(STREAM)).complete


async def test_refused_connection_is_retried_elsewhere_and_then_avoided(
    world: World, closed_port: Callable[[], int]
) -> None:
    world.put("r0", closed_port(), node_id="n0")
    await world.engine(replies(CHAT), node_id="n1")
    gateway = await world.gateway()
    answers = [await gateway.ask() for _ in range(20)]
    assert [reply.status for reply in answers] == [200] * 20
    assert {reply.headers["x-exaops-replica"] for reply in answers} == {"r1"}
    assert gateway.shared.counters.retries <= 2  # marked down after the first
    assert sum(reply.headers["x-exaops-route"] == "retry" for reply in answers) <= 2


async def test_connection_that_dies_before_an_answer_is_retried(world: World) -> None:
    first = await world.engine(hang_up, node_id="n0")
    await world.engine(replies(CHAT), node_id="n1")
    gateway = await world.gateway()
    for _ in range(10):
        assert (await gateway.ask()).status == 200
    assert len(first.requests) <= 2


async def test_kept_connection_that_was_closed_is_replaced_without_blame(world: World) -> None:
    async def answer_once(request: Received, writer: asyncio.StreamWriter) -> None:
        if engine.connections == 1 and len(engine.requests) == 2:
            writer.close()  # as an engine does whose keep-alive has just run out
            return
        await replies(CHAT)(request, writer)

    engine = await world.engine(answer_once)
    gateway = await world.gateway()
    assert [(await gateway.ask()).status for _ in range(3)] == [200] * 3
    assert engine.connections == 2
    assert gateway.shared.counters.retries == 0


async def test_attempts_are_bounded_when_nothing_can_be_reached(
    world: World, closed_port: Callable[[], int]
) -> None:
    for number in range(5):
        world.put(f"r{number}", closed_port(), node_id=f"n{number}")
    gateway = await world.gateway()
    reply = await gateway.ask()
    assert (reply.status, reply.code) == (503, "no_replica_reachable")
    assert "retry-after" in reply.headers
    assert gateway.shared.counters.retries == 2


async def test_replicas_that_are_all_marked_down_are_still_tried(world: World) -> None:
    engine = await world.engine(replies(CHAT))
    await engine.stop()
    gateway = await world.gateway(attempts=1)
    assert (await gateway.ask()).status == 503
    await engine.start(engine.port)
    assert (await gateway.ask()).status == 200  # at once, not after the pause


@pytest.mark.parametrize(
    ("events", "ends"),
    [
        ([token("a"), token("b"), token("c")], False),
        ([token("a"), token("b"), token("c")], True),
        ([token("a"), b'data: {"half'], False),
    ],
)
async def test_broken_stream_ends_in_exactly_one_error_event(
    world: World, events: list[bytes], *, ends: bool
) -> None:
    engine = await world.engine(streams(events, ends=ends), node_id="n0")
    other = await world.engine(streams(events, ends=ends), node_id="n1")
    gateway = await world.gateway()
    wire = await gateway.send(request_bytes(STREAM))
    reply = await wire.reply()
    assert reply.status == 200
    assert reply.complete
    assert reply.body.startswith(b"".join(events))
    assert reply.body.endswith(b"\n\n" + INTERRUPTED_EVENT)
    assert reply.body.count(b"upstream_interrupted") == 1
    assert b"[DONE]" not in reply.body
    assert await wire.rest() == b""  # the connection closes
    assert len(engine.requests) + len(other.requests) == 1  # and nothing was retried
    assert gateway.shared.counters.outcomes == {"interrupted": 1}


async def test_chunk_that_was_cut_in_the_middle_is_not_shown(world: World) -> None:
    async def answer(request: Received, writer: asyncio.StreamWriter) -> None:  # noqa: ARG001 - an Answer
        writer.write(STREAM_HEAD + chunk(token("a")) + chunk(token("b"))[:-20])
        await writer.drain()
        writer.close()

    await world.engine(answer)
    gateway = await world.gateway()
    reply = await gateway.ask(STREAM)
    assert reply.complete
    assert reply.body == token("a") + INTERRUPTED_EVENT


@pytest.mark.parametrize("ends", [True, False])
async def test_error_event_of_the_engine_passes_and_none_is_added(world: World, *, ends: bool) -> None:
    failure = event({"error": {"message": "out of blocks", "code": "engine"}})
    await world.engine(streams([token("a"), failure], ends=ends))
    gateway = await world.gateway()
    reply = await gateway.ask(STREAM)
    assert reply.complete
    assert reply.body == token("a") + failure


async def test_broken_plain_answer_is_never_taken_for_a_whole_one(world: World) -> None:
    async def answer(request: Received, writer: asyncio.StreamWriter) -> None:  # noqa: ARG001 - an Answer
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n" + b"x" * 50)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()

    engine = await world.engine(answer)
    gateway = await world.gateway()
    reply = await gateway.ask()
    assert not reply.complete
    assert len(engine.requests) == 1


@pytest.mark.parametrize(
    "junk",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000,
        b"HTTP/1.1 200 OK\r\ncontent-le",
    ],
)
async def test_answer_that_is_no_http_becomes_502(world: World, junk: bytes) -> None:
    async def answer(request: Received, writer: asyncio.StreamWriter) -> None:  # noqa: ARG001 - an Answer
        writer.write(junk)
        await writer.drain()
        writer.close()

    await world.engine(answer)
    gateway = await world.gateway()
    reply = await gateway.ask()
    assert (reply.status, reply.code) == (502, "upstream_broken")


async def test_errors_of_callers_never_mark_a_replica(world: World) -> None:
    engine = await world.engine(replies({"error": {"message": "too long"}}, status=400))
    gateway = await world.gateway()
    for _ in range(20):
        reply = await gateway.ask()
        assert (reply.status, reply.json()["error"]["message"]) == (400, "too long")
    engine.answer = replies(CHAT)
    reply = await gateway.ask()
    assert (reply.status, reply.headers["x-exaops-route"]) == (200, "new")
    assert gateway.shared.counters.outcomes == {"client_error": 20, "ok": 1}


async def test_replica_that_keeps_failing_is_left_alone(world: World) -> None:
    ill = await world.engine(replies({"error": {}}, status=500), node_id="n0")
    await world.engine(replies(CHAT), node_id="n1")
    gateway = await world.gateway()
    statuses = [(await gateway.ask()).status for _ in range(40)]
    assert statuses.count(500) == len(ill.requests)  # passed on, not retried
    assert 1 <= len(ill.requests) <= 4


async def test_engine_that_refuses_our_token_is_not_the_callers_fault(world: World) -> None:
    stale = await world.engine(replies({"error": {}}, status=401), node_id="n0")
    await world.engine(replies(CHAT), node_id="n1")
    gateway = await world.gateway()
    assert [(await gateway.ask()).status for _ in range(10)] == [200] * 10
    assert len(stale.requests) <= 2


async def test_silent_engine_is_given_up_at_the_deadline(world: World) -> None:
    engine = await world.engine(never)
    gateway = await world.gateway(first_byte_seconds=0.3)
    reply = await gateway.ask()
    assert (reply.status, reply.code) == (504, "first_byte_timeout")
    async with asyncio.timeout(1):
        await engine.requests[0].gone.wait()
    assert in_flight(gateway) == 0


async def test_stalled_stream_is_interrupted(world: World) -> None:
    await world.engine(streams([token("a")], hold=asyncio.Event()))
    gateway = await world.gateway(upstream_stall_seconds=0.3)
    reply = await gateway.ask(STREAM)
    assert reply.body == token("a") + INTERRUPTED_EVENT


async def test_client_that_takes_nothing_is_cut_off(world: World) -> None:
    async def answer(request: Received, writer: asyncio.StreamWriter) -> None:  # noqa: ARG001 - an Answer
        writer.write(STREAM_HEAD)
        while True:
            writer.write(chunk(b"data: " + b"x" * 65_536 + b"\n\n"))
            await writer.drain()

    engine = await world.engine(answer)
    gateway = await world.gateway(client_stall_seconds=0.5)
    wire = await gateway.connect()
    wire.set_reading(reading=False)
    await wire.send(request_bytes(STREAM))
    await eventually(lambda: engine.requests)
    await eventually(lambda: gateway.shared.counters.outcomes == {"client_gone": 1})
    assert in_flight(gateway) == 0


async def test_requests_wait_for_the_first_replica_and_are_all_served(world: World) -> None:
    gateway = await world.gateway(wait_seconds=10.0)
    asked = [asyncio.create_task(gateway.ask()) for _ in range(5)]
    await eventually(lambda: len(gateway.shared.waiting) == 5)
    await world.engine(replies(CHAT))
    assert [reply.status for reply in await asyncio.gather(*asked)] == [200] * 5
    assert len(gateway.shared.waiting) == 0


async def test_nothing_to_serve_with_becomes_503_with_retry_after(world: World) -> None:
    gateway = await world.gateway(wait_seconds=0.3)
    reply = await gateway.ask()
    assert (reply.status, reply.code) == (503, "no_replica")
    assert int(reply.headers["retry-after"]) > 0


async def test_waiting_client_that_leaves_is_forgotten(world: World) -> None:
    gateway = await world.gateway(wait_seconds=10.0)
    wire = await gateway.send(request_bytes({"model": "m"}))
    await eventually(lambda: len(gateway.shared.waiting) == 1)
    wire.close()
    await eventually(lambda: len(gateway.shared.waiting) == 0)


async def test_declared_model_without_replicas_waits_and_an_unknown_one_does_not(
    world: World,
) -> None:
    await world.engine(replies(CHAT), model="other")
    world.writer.write_models(frozenset({"m"}))
    gateway = await world.gateway(wait_seconds=0.3)
    assert (await gateway.ask()).status == 503
    assert (await gateway.ask({"model": "unheard-of"})).status == 404


async def test_full_replicas_make_requests_wait_then_429(world: World) -> None:
    release = asyncio.Event()

    async def answer(request: Received, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        await replies(CHAT)(request, writer)

    engine = await world.engine(answer)
    gateway = await world.gateway(in_flight_per_replica=2, wait_seconds=0.5, wait_requests=2)
    asked = [asyncio.create_task(gateway.ask()) for _ in range(2)]
    await eventually(lambda: in_flight(gateway) == 2)
    waiting = [asyncio.create_task(gateway.ask()) for _ in range(2)]
    await eventually(lambda: len(gateway.shared.waiting) == 2)
    over = await gateway.ask()
    assert (over.status, over.code) == (429, "overloaded")
    late = await asyncio.gather(*waiting)
    assert [reply.status for reply in late] == [429, 429]
    assert all("retry-after" in reply.headers for reply in late)
    assert len(engine.requests) == 2
    release.set()
    assert [reply.status for reply in await asyncio.gather(*asked)] == [200, 200]
    assert (await gateway.ask()).status == 200  # overload marked nobody


async def test_room_is_given_to_those_who_wait(world: World) -> None:
    await world.engine(streams([token("a"), DONE], gap_seconds=0.005))
    gateway = await world.gateway(in_flight_per_replica=2, wait_seconds=10.0)
    answers = await asyncio.gather(*(gateway.ask(STREAM) for _ in range(30)))
    assert all(reply.complete and reply.status == 200 for reply in answers)
    assert in_flight(gateway) == 0


async def test_replica_that_moved_gets_the_next_request_at_its_new_port(world: World) -> None:
    await world.engine(replies(CHAT))
    moved = await StubEngine(replies(CHAT)).start()
    world.engines.append(moved)
    gateway = await world.gateway()
    assert (await gateway.ask()).status == 200
    world.put("r0", moved.port, generation=1)
    await eventually(lambda: gateway.shared.fleet.slots()[0].record.port == moved.port)
    assert (await gateway.ask()).status == 200
    assert len(moved.requests) == 1


async def test_open_stream_outlives_its_replicas_place_in_the_table(world: World) -> None:
    hold = asyncio.Event()
    await world.engine(streams([token("a")], hold=hold))
    gateway = await world.gateway()
    wire = await gateway.send(request_bytes(STREAM))
    async with asyncio.timeout(5):
        await wire.reader.readuntil(token("a"))
    world.remove("r0")
    await eventually(lambda: not gateway.shared.fleet.slots())
    assert len(gateway.shared.open_requests) == 1
    hold.set()
    await eventually(lambda: not gateway.shared.open_requests)


async def test_draining_replica_gets_nothing_new_and_is_counted_to_the_last_byte(
    world: World,
) -> None:
    hold = asyncio.Event()
    await world.engine(streams([token("a")], hold=hold), node_id="n0")
    gateway = await world.gateway()
    wire = await gateway.send(request_bytes(STREAM))
    async with asyncio.timeout(5):
        await wire.reader.readuntil(token("a"))
    world.put("r0", world.records["r0"].port, accepts_new=False)
    other = await world.engine(replies(CHAT), node_id="n1")
    await eventually(lambda: len(gateway.shared.fleet.slots()) == 2)
    for _ in range(10):
        assert (await gateway.ask()).headers["x-exaops-replica"] == "r1"
    assert len(other.requests) == 10
    assert in_flight(gateway) == 1
    hold.set()
    await eventually(lambda: in_flight(gateway) == 0)
