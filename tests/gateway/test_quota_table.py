"""Limits of keys over all gateways together, in a real Redis."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import redis.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exaserve_ops.adapters.quota_table import (
    QuotaTable,
    QuotaTableUnavailableError,
    is_limited,
    quota_keys,
)
from exaserve_ops.routing.domain.records import KeyRecord

FOUR = KeyRecord("k4", "four at once", max_concurrent_requests=4)
RATED = KeyRecord("kr", "rated", tokens_per_minute=6000)


@pytest_asyncio.fixture
async def client(redis_client: object) -> AsyncIterator[redis.asyncio.Redis]:  # noqa: ARG001 - empties the store
    async with redis.asyncio.Redis.from_url(os.environ["REDIS_URL"]) as made:
        yield made


@pytest.mark.asyncio
async def test_two_gateways_admit_no_more_than_the_limit_between_them(client: redis.asyncio.Redis) -> None:
    one, other = QuotaTable(client, answer_seconds=5), QuotaTable(client, answer_seconds=5)
    tries = [(one, other)[n % 2].admit(FOUR, f"r{n}", 10) for n in range(40)]
    verdicts = await asyncio.gather(*tries)
    assert sum(not verdict.exceeded for verdict in verdicts) == 4
    assert {verdict.exceeded for verdict in verdicts} == {"", "concurrency"}


@pytest.mark.asyncio
async def test_place_comes_back_with_the_answer_and_once_only(client: redis.asyncio.Redis) -> None:
    table = QuotaTable(client, answer_seconds=5)
    for n in range(4):
        await table.admit(FOUR, f"r{n}", 10)
    await table.settle(FOUR, "r0", 5)
    await table.settle(FOUR, "r0", 5)
    verdicts = [await table.admit(FOUR, f"s{n}", 10) for n in range(2)]
    assert [verdict.exceeded for verdict in verdicts] == ["", "concurrency"]


@pytest.mark.asyncio
async def test_places_of_a_dead_gateway_are_free_again_and_those_of_a_living_one_are_not(
    client: redis.asyncio.Redis,
) -> None:
    table = QuotaTable(client, answer_seconds=5)
    for n in range(4):
        await table.admit(FOUR, f"r{n}", 10)
    places = quota_keys(FOUR.key_id)[0]
    lapsed = {f"r{n}": time.time() - 1 for n in range(4)}  # noqa: TID251 - Redis' own clock is the wall clock
    await client.zadd(places, lapsed)
    await table.renew(FOUR.key_id, ["r0", "never-admitted"])
    verdicts = [await table.admit(FOUR, f"s{n}", 10) for n in range(4)]
    assert [verdict.exceeded for verdict in verdicts] == ["", "", "", "concurrency"]
    assert await client.zscore(places, "never-admitted") is None


@pytest.mark.asyncio
async def test_rate_is_refused_with_the_time_to_wait_and_takes_no_place(client: redis.asyncio.Redis) -> None:
    table = QuotaTable(client, answer_seconds=5)
    both = KeyRecord("kb", "both", max_concurrent_requests=2, tokens_per_minute=6000)
    assert not (await table.admit(both, "r0", 7000)).exceeded
    refused = await table.admit(both, "r1", 1)
    assert refused.exceeded == "rate"
    assert 5 < refused.retry_after_seconds < 12, "1,000 tokens at 100 a second"
    assert await client.zcard(quota_keys("kb")[0]) == 1


@pytest.mark.asyncio
async def test_unlimited_keys_are_told_apart(client: redis.asyncio.Redis) -> None:
    assert not is_limited(KeyRecord("k", "free"))
    assert is_limited(FOUR)
    assert is_limited(RATED)
    assert await client.keys("exaops:quota:*") == []


@pytest.mark.asyncio
async def test_store_that_is_away_is_said_in_time() -> None:
    away = redis.asyncio.Redis.from_url("unix:///nowhere/at/all")
    with pytest.raises(QuotaTableUnavailableError):
        await QuotaTable(away, answer_seconds=0.2).admit(FOUR, "r", 1)
    await away.aclose()


@pytest.mark.asyncio
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(costs=st.lists(st.tuples(st.integers(0, 3000), st.integers(-1000, 3000)), min_size=1, max_size=8))
async def test_script_reckons_as_the_rule_does(
    client: redis.asyncio.Redis, costs: list[tuple[int, int]]
) -> None:
    """Within what the bucket gains while the test runs."""
    await client.flushall()
    table = QuotaTable(client, answer_seconds=5)
    began = time.monotonic()
    tokens = 6000.0
    for number, (prompt, further) in enumerate(costs):
        verdict = await table.admit(RATED, f"r{number}", prompt)
        if verdict.exceeded:
            assert tokens <= 0
            continue
        await table.settle(RATED, f"r{number}", further)
        tokens = min(6000.0, tokens - prompt - further)
    gained = 100.0 * (time.monotonic() - began) + 1.0
    raw = await client.get(quota_keys("kr")[1])
    assert raw is not None
    kept = float(raw.split()[0])
    assert tokens - 1.0 <= kept <= min(6000.0, tokens + gained)
