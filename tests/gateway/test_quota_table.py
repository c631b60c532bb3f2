"""Limits of keys over all gateways together, in a real Redis and through real gateways."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exaserve_ops.adapters.quota_table import QuotaTable, QuotaVerdict, is_limited, quota_keys
from exaserve_ops.adapters.resp_link import RespLink
from exaserve_ops.gateway.waiting import Queue, WaitingRoom
from exaserve_ops.routing.domain.records import KeyRecord
from tests.fakes.upstream import CHAT, DONE, Received, replies, streams, token
from tests.gateway.harness import KEY, Gateway, Wire, World, eventually, request_bytes

pytestmark = pytest.mark.asyncio

FOUR = KeyRecord("k4", "four at once", max_concurrent_requests=4)
RATED = KeyRecord("kr", "rated", tokens_per_minute=6000)


@pytest_asyncio.fixture
async def links(world: World) -> AsyncIterator[list[RespLink]]:
    made = [RespLink(world.url, answer_seconds=5.0) for _ in range(2)]
    yield made
    for link in made:
        await link.close()


async def admitted(table: QuotaTable, key: KeyRecord, lease_id: str, tokens: float = 10) -> QuotaVerdict:
    answer: asyncio.Future[QuotaVerdict | None] = asyncio.get_running_loop().create_future()
    table.admit(key, lease_id, tokens, answer.set_result)
    verdict = await answer
    assert verdict is not None
    return verdict


def left_of(world: World, key_id: str) -> float:
    """Tokens in a key's bucket when it was last written."""
    raw = world.redis.get(quota_keys(key_id)[1])
    return float(raw.split()[0]) if raw else 0.0


async def flushed(table: QuotaTable, probe: KeyRecord = FOUR) -> None:
    """Answers come in order: once a later one is there, earlier commands are done."""
    await admitted(table, KeyRecord("probe", "probe", max_concurrent_requests=1_000_000), str(id(probe)))


async def test_two_gateways_admit_no_more_than_the_limit_between_them(links: list[RespLink]) -> None:
    tables = [QuotaTable(link) for link in links]
    verdicts = await asyncio.gather(*(admitted(tables[n % 2], FOUR, f"r{n}") for n in range(40)))
    assert sum(not verdict.exceeded for verdict in verdicts) == 4
    assert {verdict.exceeded for verdict in verdicts} == {"", "concurrency"}


async def test_place_comes_back_with_the_answer_and_once_only(links: list[RespLink], world: World) -> None:
    table = QuotaTable(links[0])
    for n in range(4):
        await admitted(table, FOUR, f"r{n}")
    table.settle(FOUR, "r0", 5)
    table.settle(FOUR, "r0", 5)
    await eventually(lambda: world.redis.zcard(quota_keys(FOUR.key_id)[0]) == 3)
    verdicts = [await admitted(table, FOUR, f"s{n}") for n in range(2)]
    assert [verdict.exceeded for verdict in verdicts] == ["", "concurrency"]


async def test_places_of_a_dead_gateway_are_free_again_and_those_of_a_living_one_are_not(
    links: list[RespLink], world: World
) -> None:
    table = QuotaTable(links[0])
    for n in range(4):
        await admitted(table, FOUR, f"r{n}")
    places = quota_keys(FOUR.key_id)[0]
    for n in range(4):
        world.redis.zadd(places, {f"r{n}": 1.0})  # long lapsed
    table.renew(FOUR.key_id, ["r0", "never-admitted"])
    await flushed(table)
    verdicts = [await admitted(table, FOUR, f"s{n}") for n in range(4)]
    assert [verdict.exceeded for verdict in verdicts] == ["", "", "", "concurrency"]
    assert world.redis.zscore(places, "never-admitted") is None


async def test_rate_is_refused_with_the_time_to_wait_and_takes_no_place(
    links: list[RespLink], world: World
) -> None:
    table = QuotaTable(links[0])
    both = KeyRecord("kb", "both", max_concurrent_requests=2, tokens_per_minute=6000)
    assert not (await admitted(table, both, "r0", 7000)).exceeded
    refused = await admitted(table, both, "r1", 1)
    assert refused.exceeded == "rate"
    assert 0 < refused.retry_after_seconds < 12, "1,000 tokens at 100 a second"
    assert world.redis.zcard(quota_keys("kb")[0]) == 1


async def test_unlimited_keys_are_told_apart() -> None:
    assert not is_limited(KeyRecord("k", "free"))
    assert is_limited(FOUR)
    assert is_limited(RATED)


async def test_store_that_is_away_is_said_in_time() -> None:
    link = RespLink("unix:///nowhere/at/all", answer_seconds=0.2)
    table = QuotaTable(link)
    answer: asyncio.Future[QuotaVerdict | None] = asyncio.get_running_loop().create_future()
    table.admit(FOUR, "r", 1, answer.set_result)
    async with asyncio.timeout(5):
        assert await answer is None
    assert table.failures == 1
    await link.close()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(costs=st.lists(st.tuples(st.integers(0, 3000), st.integers(-1000, 3000)), min_size=1, max_size=8))
async def test_script_reckons_as_the_rule_does(
    links: list[RespLink], world: World, costs: list[tuple[int, int]]
) -> None:
    """Within what the bucket gains while the test runs."""
    world.redis.flushall()
    table = QuotaTable(links[0])
    began = time.monotonic()
    tokens = 6000.0
    for number, (prompt, further) in enumerate(costs):
        verdict = await admitted(table, RATED, f"r{number}", prompt)
        if verdict.exceeded:
            assert tokens <= 0
            continue
        table.settle(RATED, f"r{number}", further)
        tokens = min(6000.0, tokens - prompt - further)
    await flushed(table)
    gained = 100.0 * (time.monotonic() - began) + 1.0
    kept = left_of(world, "kr")
    assert tokens - 1.0 <= kept <= min(6000.0, tokens + gained)


# ---------------------------------------------------------------------- through the gateway
class Held:
    """An engine's answer that waits until it is let go."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, request: Received, writer: asyncio.StreamWriter) -> None:
        waiting = [asyncio.ensure_future(self.go.wait()), asyncio.ensure_future(request.gone.wait())]
        _, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        if self.go.is_set():
            await replies(CHAT)(request, writer)


def limit(world: World, **limits: object) -> None:
    record = KeyRecord("id-limited", "limited", **limits)  # type: ignore[arg-type]  # the test's words
    world.writer.write_keys({hashlib.sha256(KEY.encode()).hexdigest(): record})


async def asked(gateway: Gateway, **headers: str) -> Wire:
    return await gateway.send(request_bytes({"model": "m"}, headers=headers))


async def test_key_at_its_limit_gets_429_and_goes_on_when_a_request_ends_or_its_client_leaves(
    world: World,
) -> None:
    held = Held()
    await world.engine(held)
    limit(world, max_concurrent_requests=2)
    gateways = [await world.gateway() for _ in range(2)]
    # One request id for both: it is the caller's to choose, and must not count once.
    first = await asked(gateways[0], **{"x-request-id": "same"})
    second = await asked(gateways[1], **{"x-request-id": "same"})
    await eventually(lambda: len(world.engines[0].requests) == 2)
    refused = await gateways[0].ask()
    assert (refused.status, refused.code) == (429, "concurrency_limit")
    assert int(refused.headers["retry-after"]) >= 1
    second.close()
    await eventually(lambda: world.redis.zcard(quota_keys("id-limited")[0]) == 1)
    third = await asked(gateways[1])
    await eventually(lambda: len(world.engines[0].requests) == 3)
    held.go.set()
    assert [(await wire.reply()).status for wire in (first, third)] == [200, 200]
    await eventually(lambda: world.redis.zcard(quota_keys("id-limited")[0]) == 0)
    assert all(not gateway.shared.quotas.held for gateway in gateways)


async def test_tokens_are_charged_by_what_the_engine_says(world: World) -> None:
    await world.engine(replies(CHAT))
    limit(world, tokens_per_minute=5)
    gateway = await world.gateway()
    assert (await gateway.ask()).status == 200
    await eventually(lambda: left_of(world, "id-limited") < 0)
    refused = await gateway.ask()
    assert (refused.status, refused.code) == (429, "token_rate_limit")
    assert 30 < int(refused.headers["retry-after"]) <= 75, "ten tokens used of five a minute"


@pytest.mark.parametrize("stays", [True, False])
async def test_stream_of_which_nobody_says_what_it_took_is_charged_by_its_events(
    world: World, *, stays: bool
) -> None:
    events = [token("x")] * 50
    await world.engine(streams([*events, DONE]) if stays else streams(events, hold=asyncio.Event()))
    limit(world, tokens_per_minute=10)
    gateway = await world.gateway()
    wire = await gateway.send(request_bytes({"model": "m", "stream": True}))
    if stays:
        assert (await wire.reply()).status == 200
    else:
        async with asyncio.timeout(10):
            for _ in events:
                await wire.reader.readuntil(b"data:")
        wire.close()
    await eventually(lambda: left_of(world, "id-limited") < -30)
    refused = await gateway.ask()
    assert (refused.status, refused.code) == (429, "token_rate_limit")


async def test_limits_do_not_stop_requests_while_the_store_is_away(world: World) -> None:
    await world.engine(replies(CHAT))
    limit(world, max_concurrent_requests=1)
    gateway = await world.gateway()
    await gateway.shared.session_link.close()
    assert [(await gateway.ask()).status for _ in range(2)] == [200, 200]
    assert gateway.shared.quotas.table.failures >= 2


async def test_batch_requests_wait_behind_others_and_by_key_or_header(world: World) -> None:
    held = Held()
    await world.engine(held)
    limit(world, traffic_class="batch")
    gateway = await world.gateway(batch_in_flight_per_replica=1, in_flight_per_replica=2)
    first = await asked(gateway)
    await eventually(lambda: len(world.engines[0].requests) == 1)
    waiting = await asked(gateway)
    await eventually(lambda: len(gateway.shared.waiting) == 1)
    world.allow(KEY)
    await eventually(lambda: gateway.shared.keys.find(KEY.encode()).traffic_class == "interactive")  # type: ignore[union-attr]  # it is there
    quick = await asked(gateway)
    await eventually(lambda: len(world.engines[0].requests) == 2)
    by_header = await asked(gateway, **{"x-traffic-class": "batch"})
    await eventually(lambda: len(gateway.shared.waiting) == 2)
    held.go.set()
    for wire in (first, quick, waiting, by_header):
        assert (await wire.reply()).status == 200


class Line:
    """Somebody who waits."""

    def __init__(self, name: str, queue: Queue, log: list[str]) -> None:
        self.model, self.queue, self._name, self._log = "m", queue, name, log

    def wake(self) -> bool:
        self._log.append(self._name)
        return True


async def test_waiting_room_calls_others_before_batch_and_keeps_half_of_itself_for_them() -> None:
    log: list[str] = []
    room = WaitingRoom(4)
    batch = [Line(f"b{n}", Queue.BATCH, log) for n in range(3)]
    assert [room.add(waiter) for waiter in batch] == [True, True, False]
    quick = [Line(f"q{n}", Queue.INTERACTIVE, log) for n in range(3)]
    assert [room.add(waiter) for waiter in quick] == [True, True, False]
    assert room.holds_interactive("m")
    room.wake_all()
    assert log == ["q0", "q1", "b0", "b1"]
    for waiter in (*quick, *batch):
        room.discard(waiter)
    assert len(room) == 0
    assert not room.holds_interactive("m")


@pytest.mark.parametrize("value", ["btach", "", "batch, batch", "interactive;q=1"])
async def test_class_that_does_not_exist_is_refused_and_not_taken_for_interactive(
    world: World, value: str
) -> None:
    await world.engine(Held())
    gateway = await world.gateway()
    reply = await gateway.ask(headers={"x-traffic-class": value})
    assert (reply.status, reply.code) == (400, "invalid_traffic_class")
