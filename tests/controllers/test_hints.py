"""What a hint sets in motion, whatever it names."""

from __future__ import annotations

import pytest
import redis

from exaserve_ops.controllers import ingest
from exaserve_ops.lib import clock
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.services.deployments import scale_deployment
from tests.fakes.fleet import ScriptedNode, make_deployment, seen
from tests.fakes.leader import Leader
from tests.fakes.node import wait_for
from workers.protocol import v1
from workers.protocol.observed import ObservedState

pytestmark = pytest.mark.django_db


def test_hint_for_all_deployments_reaches_each_of_them_and_leaves_no_key_that_fails_for_ever(
    leader: Leader, redis_client: redis.Redis
) -> None:
    node = ScriptedNode(redis_client)
    node.enrol()
    node.say_hello()
    leader.work()
    deployments = [make_deployment(replicas=1, name=name) for name in ("one", "two")]
    leader.reconcilers.ring("deployment", "all")

    def reached() -> bool:
        # All were looked at a moment ago, so this look is spaced by what that one cost.
        leader.drain()
        return Replica.objects.count() == len(deployments)

    wait_for(reached, "each deployment has been looked at")
    owners = Replica.objects.values_list("deployment", flat=True)
    assert sorted(owners) == sorted(one.pk for one in deployments)
    assert leader.queue.take(0.0) is None


def test_agent_is_told_to_forget_an_ended_replica_until_it_has_forgotten_it(
    leader: Leader, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first time it may still stand in the agent's wish, and is kept."""
    monkeypatch.setattr(ingest, "FORGET_AGAIN_SECONDS", 0.0)
    node = ScriptedNode(redis_client)
    node.enrol()
    node.say_hello()
    leader.work()
    deployment = make_deployment(replicas=1)
    leader.work()
    leader.work()
    replica = Replica.objects.get()
    node.commands()
    node.beat(seen(replica, ObservedState.READY))
    leader.work()
    scale_deployment(deployment.pk, replicas=0, actor="user:test", now=clock.now())
    leader.work()
    node.commands()
    for _ in range(3):
        node.beat(seen(replica, ObservedState.STOPPED))
        leader.work()
        told = [c.replica_ids for c in node.commands() if isinstance(c, v1.ForgetReplica)]
        assert told == [(str(replica.pk),)]
    for _ in range(2):
        node.beat()
        leader.work()
        assert not [c for c in node.commands() if isinstance(c, v1.ForgetReplica)]
