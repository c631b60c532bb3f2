"""A leading controller and a node with a lease, for the tests that drive both."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.fakes.fleet import ScriptedNode
from tests.fakes.leader import Leader, leading


@pytest.fixture
def leader(redis_client: redis.Redis) -> Iterator[Leader]:
    """A controller that leads, over this test's stores."""
    with leading(redis_client) as leader:
        yield leader


@pytest.fixture
def node(redis_client: redis.Redis, leader: Leader) -> ScriptedNode:
    """A node that has joined, said hello, and holds a lease."""
    scripted = ScriptedNode(redis_client)
    scripted.enrol()
    scripted.say_hello()
    leader.work()
    scripted.commands()
    return scripted
