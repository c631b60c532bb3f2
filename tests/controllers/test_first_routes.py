"""Requests wait for the first replica of a name: its route is written at once, and announced before."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from django.db import connection

from exaserve_ops.adapters.route_table import COMING_KEY, PARTS_KEY
from exaserve_ops.routing.selectors import coming_models
from exaserve_ops.serving.domain.reach import REACHED, WAITING
from exaserve_ops.serving.models import Replica
from tests.fakes.fleet import ScriptedNode, make_deployment, seen
from tests.fakes.leader import Leader
from workers.protocol.observed import ObservedState

pytestmark = pytest.mark.django_db
ALL = ("routes", "all")
NAME = "tiny"
"""What a deployment of these tests serves."""


@pytest.fixture
def node(leader: Leader, redis_client: redis.Redis) -> ScriptedNode:
    """One with two replicas of one name, of which nothing has been seen."""
    node = ScriptedNode(redis_client)
    node.enrol()
    node.say_hello()
    leader.work()
    make_deployment(replicas=2)
    leader.work()
    leader.work()
    node.commands()
    return node


def replicas() -> list[Replica]:
    return list(Replica.objects.order_by("pk"))


def rung_by_reports(leader: Leader) -> set[tuple[str, ...]]:
    """Hints about routes that what has been reported rings."""
    rung: set[tuple[str, ...]] = set()

    def listen(execute: Callable[..., object], sql: str, params: Any, many: bool, context: object) -> object:
        if "pg_notify" in sql:
            rung.update(tuple(hint.split(":", 1)) for hint in params[1])
        return execute(sql, params, many, context)

    with connection.execute_wrapper(listen):
        leader.ingest.step()
    return {hint for hint in rung if "route" in hint[0]}


def test_first_replica_of_a_name_rings_for_its_route_and_others_as_ever(
    leader: Leader, node: ScriptedNode
) -> None:
    first, second = replicas()
    node.beat(seen(first, ObservedState.LOADING))
    assert rung_by_reports(leader) == set()
    node.beat(seen(first, ObservedState.READY))
    assert rung_by_reports(leader) == {("first_route", str(first.pk))}
    Replica.objects.filter(pk=first.pk).update(reach=REACHED)
    node.beat(
        seen(first, ObservedState.READY),
        seen(second, ObservedState.READY, address="127.0.0.1:41001", ports=(41001,)),
    )
    assert rung_by_reports(leader) == {("routes", str(second.pk))}


def test_sleeper_that_has_woken_is_a_first_one_where_nobody_else_serves(
    leader: Leader, node: ScriptedNode
) -> None:
    first, _ = replicas()
    node.beat(seen(first, ObservedState.READY, sleep_state="waking"))
    leader.ingest.step()
    Replica.objects.filter(pk=first.pk).update(reach=REACHED)
    node.beat(seen(first, ObservedState.READY))
    assert rung_by_reports(leader) == {("first_route", str(first.pk))}


def test_first_route_keeps_no_distance_from_the_write_before(leader: Leader) -> None:
    while leader.queue.take(0.0):
        pass
    leader.reconcilers._spacing[ALL] = (time.monotonic(), 3600.0)
    leader.reconcilers.ring("deployment", "6f5902ac-237a-4a3c-9d0b-0d3c2f1a5f10")
    waiting = []
    while (taken := leader.queue.take(0.0)) is not None:
        waiting.append(taken)
    assert ALL not in waiting, "what rings all the time is spaced by what a write costs"
    leader.reconcilers.ring("first_route", "any")
    assert leader.queue.take(0.0) == ALL


@pytest.mark.parametrize(
    ("state", "changes", "comes"),
    [
        (ObservedState.WAITING, {}, False),
        (ObservedState.STARTING, {}, True),
        (ObservedState.LOADING, {}, True),
        (ObservedState.READY, {"reach": WAITING}, True),
        (ObservedState.READY, {"reach": REACHED}, False),
        (ObservedState.READY, {"reach": REACHED, "sleep_state": "waking"}, True),
        (ObservedState.READY, {"reach": WAITING, "role": "standby"}, False),
        (ObservedState.LOADING, {"wanted": "stop"}, False),
        (ObservedState.BACKING_OFF, {}, False),
        (ObservedState.FAILED, {}, False),
    ],
)
def test_name_is_told_to_be_coming_while_a_replica_that_is_to_serve_is_on_its_way(
    leader: Leader,
    node: ScriptedNode,
    redis_client: redis.Redis,
    state: ObservedState,
    changes: dict[str, str],
    *,
    comes: bool,
) -> None:
    first, _ = replicas()
    node.beat(seen(first, state))
    leader.ingest.step()
    Replica.objects.filter(pk=first.pk).update(**changes)
    assert coming_models() == (frozenset({NAME}) if comes else frozenset())
    leader.reconcilers.reconcile(*ALL)
    assert redis_client.smembers(COMING_KEY) == ({NAME.encode()} if comes else set())


def test_lost_table_is_seen_and_written_again(leader: Leader, redis_client: redis.Redis) -> None:
    leader.work()
    leader.reconcilers.look_at_table()
    assert leader.queue.take(0.0) is None
    for lost in ("keys", "replicas"):
        redis_client.srem(PARTS_KEY, lost)
        leader.reconcilers.look_at_table()
        leader.drain()
        assert redis_client.sismember(PARTS_KEY, lost)
