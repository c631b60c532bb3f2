"""What a hint sets in motion, whatever it names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from exaserve_ops.serving.models import Replica
from tests.fakes.fleet import ScriptedNode, make_deployment
from tests.fakes.leader import Leader, leading

pytestmark = pytest.mark.django_db


@pytest.fixture
def leader(redis_client: redis.Redis) -> Iterator[Leader]:
    with leading(redis_client) as leader:
        yield leader


def test_hint_for_all_deployments_reaches_each_of_them_and_leaves_no_key_that_fails_for_ever(
    leader: Leader, redis_client: redis.Redis
) -> None:
    node = ScriptedNode(redis_client)
    node.enrol()
    node.say_hello()
    leader.work()
    deployments = [make_deployment(replicas=1, name=name) for name in ("one", "two")]
    leader.reconcilers.ring("deployment", "all")
    leader.drain()
    owners = Replica.objects.values_list("deployment", flat=True)
    assert sorted(owners) == sorted(one.pk for one in deployments)
    assert leader.queue.take(0.0) is None
