"""Fixtures that every part of the tests may use."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import redis


@pytest.fixture
def redis_client() -> Iterator[redis.Redis]:
    """A client of this process's own Valkey, emptied before and after."""
    with redis.Redis.from_url(os.environ["REDIS_URL"]) as client:
        client.flushall()
        yield client
        client.flushall()
