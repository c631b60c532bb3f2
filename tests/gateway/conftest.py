"""Fixtures of the gateway's tests: the loop that it really runs in, a real Valkey, a world."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import pytest_asyncio
import redis
import uvloop

from tests.fakes.valkey import Valkey, running_valkey
from tests.gateway.harness import KEY, World


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], uvloop.Loop]]:
    """The gateway runs in uvloop, so its tests do."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with running_valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def store(valkey: Valkey) -> Iterator[redis.Redis]:
    """An empty store."""
    with valkey.client() as client:
        client.flushall()
        yield client


@pytest_asyncio.fixture
async def world(valkey: Valkey, store: redis.Redis) -> AsyncIterator[World]:
    """No replicas yet; one valid key."""
    made = World(store, valkey.url)
    made.allow(KEY)
    made.writer.write_replicas({})
    yield made
    await made.close()
