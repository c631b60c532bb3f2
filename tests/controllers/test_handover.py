"""A drain waits for its sessions: first turns go elsewhere, the rest move, then the engine ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta

import pytest
import redis

from exaserve_ops.adapters.session_pins import RedisSessionPins
from exaserve_ops.adapters.session_table import DEFAULT_TTL_SECONDS
from exaserve_ops.audit.models import Event
from exaserve_ops.controllers.moves import SessionMoves
from exaserve_ops.inventory.models import Node
from exaserve_ops.lib import clock
from exaserve_ops.routing.selectors import routes
from exaserve_ops.serving.models import Deployment, Replica
from exaserve_ops.serving.selectors import wanted_of_node
from exaserve_ops.serving.services.healing import stand_down
from exaserve_ops.serving.services.replicas import let_go_replica, replace_replica
from exaserve_ops.sessions.models import InferenceSession, Relocation
from tests.fakes.fleet import ScriptedNode, make_deployment, seen
from tests.fakes.leader import Leader, leading
from tests.fakes.session_entries import age_entries
from workers.protocol.observed import ObservedState, ReplicaTelemetry

pytestmark = pytest.mark.django_db


class World:
    """Two nodes with a ready replica each, and two sessions at the first."""

    def __init__(self, leader: Leader, client: redis.Redis) -> None:
        self.leader = leader
        self.nodes = [ScriptedNode(client, name=name) for name in ("node-a", "node-b")]
        for node in self.nodes:
            node.enrol()
            node.say_hello()
        leader.work()
        make_deployment(replicas=2)
        for _ in range(3):
            leader.work()
        self.report()
        self.source, self.target = Replica.objects.order_by("node__name")
        self.pins = RedisSessionPins(os.environ["REDIS_URL"], ttl_seconds=DEFAULT_TTL_SECONDS)
        now = clock.now()
        for name in ("one", "two"):
            InferenceSession.objects.create(
                session_id=name, model_name="tiny", replica=self.source, context_tokens=64, turns=2,
                first_turn_at=now, last_turn_at=now - timedelta(seconds=3),
            )  # fmt: skip
            self.pins._ask(lambda name=name: self.pins._table.claimed("tiny", name, str(self.source.pk)))  # type: ignore[misc]  # a default binds it
        age_entries(client, 60)
        self.moves = SessionMoves(leader.state, leader.reconcilers._link, self.pins)

    def report(self, *, running: int | None = None, state: ObservedState = ObservedState.READY) -> None:
        load = None if running is None else ReplicaTelemetry(window_seconds=10.0, requests_running=running)
        for node in self.nodes:
            node.commands()
            rows = Replica.objects.filter(node=node.node_id)
            node.beat(*(seen(row, state, telemetry=load) for row in rows))
        self.leader.work()

    def drain(self) -> None:
        replace_replica(self.source.pk, why="try another", actor="user:o", now=clock.now())
        self.leader.work()

    def wish(self) -> tuple[str, float]:
        """What the source's agent is told to want, and how long open requests have."""
        assert self.source.node_id is not None
        [wanted] = [w for w in wanted_of_node(self.source.node_id) if w.replica_id == str(self.source.pk)]
        return wanted.wanted, wanted.drain_seconds


@pytest.fixture
def world(redis_client: redis.Redis) -> Iterator[World]:
    with leading(redis_client) as leader:
        made = World(leader, redis_client)
        yield made
        made.pins.close()


def test_drain_waits_until_its_sessions_have_moved(world: World) -> None:
    world.drain()
    assert world.wish()[0] == "run", "turns of its sessions are still served there"
    record = routes()[str(world.source.pk)]
    assert (record.accepts_new, record.keeps_sessions) == (False, True)
    for _ in range(3):
        world.moves.step()
    assert {row.status for row in Relocation.objects.all()} == {"done"}
    assert InferenceSession.objects.filter(replica=world.target).count() == 2
    world.leader.work()
    wanted, seconds = world.wish()
    assert wanted == "drain"
    assert 0 < seconds <= 60, "the deadline is the one that was told when it began"
    assert not routes()[str(world.source.pk)].keeps_sessions
    world.source.refresh_from_db()
    assert world.source.left_behind == 0
    assert Event.objects.get(event="handed_over").reason == "no session is left"


def test_who_has_not_left_in_time_is_left_behind_and_counted(world: World) -> None:
    world.drain()
    passed = clock.now() - timedelta(seconds=50)
    Replica.objects.filter(pk=world.source.pk).update(
        status_changed_at=passed, drain_deadline_at=passed + timedelta(seconds=60)
    )
    world.leader.work()
    world.source.refresh_from_db()
    assert world.source.left_behind == 2
    told = Event.objects.get(event="handed_over").reason
    assert told == "its time to hand sessions over is up; 2 sessions are left behind"
    assert world.wish()[0] == "drain"


def test_node_that_must_be_empty_sooner_shortens_the_wait(world: World) -> None:
    now = clock.now()
    Node.objects.filter(pk=world.source.node_id).update(
        drain_status="draining", drain_deadline_at=now + timedelta(minutes=5), drain_reason="x"
    )
    world.drain()
    assert world.wish()[0] == "run"
    Replica.objects.filter(pk=world.source.pk).update(status_changed_at=now - timedelta(seconds=9))
    Node.objects.filter(pk=world.source.node_id).update(drain_deadline_at=now + timedelta(seconds=3))
    world.leader.handover.step()
    world.source.refresh_from_db()
    assert world.source.left_behind == 2


def test_first_turn_that_runs_is_waited_for_although_no_session_is_on_record(world: World) -> None:
    InferenceSession.objects.all().delete()
    world.report(running=1)
    world.drain()
    assert world.wish()[0] == "run"
    Replica.objects.filter(pk=world.source.pk).update(status_changed_at=clock.now() - timedelta(seconds=9))
    world.report(running=1)
    assert world.wish()[0] == "run"
    world.report(running=0)
    assert world.wish()[0] == "drain"


def test_engine_that_fails_meanwhile_is_not_waited_for(world: World) -> None:
    world.drain()
    world.report(state=ObservedState.BACKING_OFF)
    assert world.wish()[0] == "drain"
    world.source.refresh_from_db()
    assert (world.source.status, world.source.left_behind) == ("draining", 2)


def test_last_replica_is_not_held_for_sessions_that_have_nowhere_to_go(world: World) -> None:
    Replica.objects.filter(pk=world.target.pk).update(status="failed")
    world.drain()
    assert world.wish()[0] == "drain"
    assert "no other replica takes its sessions" in Event.objects.get(event="handed_over").reason


# -- those that stand down ------------------------------------------------------------------------------
def stand_one_down(world: World) -> None:
    Deployment.objects.update(replicas=1, standbys=1)
    stand_down(world.source.pk, why="fewer are to serve", actor="user:o", now=clock.now())
    world.leader.work()


def test_one_that_stands_down_serves_its_sessions_until_they_have_moved(world: World) -> None:
    stand_one_down(world)
    record = routes()[str(world.source.pk)]
    assert (record.accepts_new, record.keeps_sessions) == (False, True)
    for _ in range(3):
        world.moves.step()
    assert {row.status for row in Relocation.objects.all()} == {"done"}
    assert InferenceSession.objects.filter(replica=world.target).count() == 2
    world.leader.work()
    world.source.refresh_from_db()
    assert (world.source.status, world.source.role, world.source.left_behind) == ("ready", "standby", 0)
    assert str(world.source.pk) not in routes()
    assert world.wish()[0] == "run"


def test_one_that_stands_down_leaves_behind_who_has_not_left_in_time(world: World) -> None:
    stand_one_down(world)
    passed = clock.now() + timedelta(seconds=10)
    Replica.objects.filter(pk=world.source.pk).update(drain_deadline_at=passed)
    world.leader.work()
    assert str(world.source.pk) not in routes()
    told = Event.objects.get(event="handed_over").reason
    assert told == "its time to hand sessions over is up; 2 sessions are left behind"


def test_one_that_is_let_go_while_it_stands_down_hands_over_what_it_still_has(world: World) -> None:
    stand_one_down(world)
    let_go_replica(world.source.pk, "drain", why="x", actor="user:o", now=clock.now())
    record = routes()[str(world.source.pk)]
    assert (record.accepts_new, record.keeps_sessions) == (False, True)
    assert world.wish()[0] == "run"


def test_one_that_is_promoted_while_it_stands_down_keeps_its_sessions(world: World) -> None:
    stand_one_down(world)
    Deployment.objects.update(replicas=2, standbys=0)
    world.leader.reconcilers.resync()
    world.leader.work()
    record = routes()[str(world.source.pk)]
    assert (record.accepts_new, record.keeps_sessions) == (True, False)
    assert InferenceSession.objects.filter(replica=world.source).count() == 2
    world.source.refresh_from_db()
    assert (world.source.role, world.source.drain_deadline_at) == ("serving", None)
