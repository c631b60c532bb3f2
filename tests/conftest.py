"""Fixtures that every part of the tests may use."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import redis
from hypothesis import HealthCheck, settings

# How long one example takes says how busy the machine is; the limit of a whole test stands. Every run
# tries the same examples, so that a change fails for what it changed; `make search` tries new ones.
_ANY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same examples", parent=_ANY_MACHINE, derandomize=True, database=None)
settings.register_profile("new examples", parent=_ANY_MACHINE, print_blob=True)
settings.load_profile("same examples")


@pytest.fixture
def redis_client() -> Iterator[redis.Redis]:
    """A client of this process's own Valkey, emptied before and after."""
    with redis.Redis.from_url(os.environ["REDIS_URL"]) as client:
        client.flushall()
        yield client
        client.flushall()


REAL_PROCESSES = (
    *("tests/agent/", "tests/browser/", "tests/engines/"),
    *("tests/gateway/", "tests/kv/", "tests/ssh/", "tests/system/"),
)
"""Folders whose tests start processes and wait for them with deadlines, which a busy machine can break."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run a test of real processes once more when it fails; the summary names each one that needed it."""
    for item in items:
        if item.nodeid.startswith(REAL_PROCESSES):
            item.add_marker(pytest.mark.flaky(reruns=1))
