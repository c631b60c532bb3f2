"""Balance through the record: started, remembered over a change of leader, and ended."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta

import pytest
import redis

from exaserve_ops.adapters.session_pins import RedisSessionPins
from exaserve_ops.adapters.session_table import DEFAULT_TTL_SECONDS
from exaserve_ops.audit.models import Event
from exaserve_ops.controllers.moves import MovePolicy, SessionMoves
from exaserve_ops.lib import clock
from exaserve_ops.serving.domain.engine_launch import TORCH
from exaserve_ops.serving.models import Deployment, Release, Replica
from exaserve_ops.sessions.domain.moves import Sent
from exaserve_ops.sessions.models import InferenceSession, Relocation
from exaserve_ops.sessions.services.relocations import record_sent
from tests.fakes.fleet import ScriptedNode, make_deployment, seen
from tests.fakes.leader import Leader, leading
from tests.fakes.session_entries import age_entries
from workers.protocol.observed import ObservedState, ReplicaTelemetry

pytestmark = pytest.mark.django_db


class World:
    """Two replicas on a node each, of 1,000 tokens of KV memory; twelve sessions at the first."""

    def __init__(self, leader: Leader, client: redis.Redis) -> None:
        self.leader = leader
        self.nodes = [ScriptedNode(client, name=name) for name in ("node-a", "node-b")]
        for node in self.nodes:
            node.enrol()
            node.say_hello()
        leader.work()
        self.deployment = make_deployment(replicas=2)
        for _ in range(3):
            leader.work()
        self.report()
        Release.objects.update(engine=TORCH)
        self.replicas = list(Replica.objects.order_by("node__name"))
        self.pins = RedisSessionPins(os.environ["REDIS_URL"], ttl_seconds=DEFAULT_TTL_SECONDS)
        now = clock.now()
        for number in range(12):
            name = f"talk-{number}"
            InferenceSession.objects.create(
                session_id=name, model_name="tiny", replica=self.replicas[0], context_tokens=100, turns=3,
                first_turn_at=now, last_turn_at=now - timedelta(seconds=10),
            )  # fmt: skip
            self.pins._ask(lambda name=name: self.pins._table.claimed("tiny", name, str(self.replicas[0].pk)))
        age_entries(client, 60)
        self.lead_anew()

    def report(self) -> None:
        """Their loads, as engines give them."""
        load = ReplicaTelemetry(
            window_seconds=10.0, age_seconds=0.0, kv_total_blocks=100, kv_block_tokens=10, requests_waiting=0
        )
        for node in self.nodes:
            node.commands()  # with the lease that it reports under
            rows = Replica.objects.filter(node=node.node_id)
            node.beat(*(seen(row, ObservedState.READY, telemetry=load) for row in rows))
        self.leader.work()
        self.leader.work()

    def lead_anew(self) -> None:
        policy = MovePolicy(balance_every_seconds=0.0)
        self.moves = SessionMoves(self.leader.state, self.leader.reconcilers._link, self.pins, policy)

    def arrive(self) -> None:
        """Whatever is being sent has arrived; the swaps are made."""
        for row in Relocation.objects.filter(status="sending").select_related("source"):
            assert row.source is not None
            assert row.source.node_id is not None
            sent = Sent(sent_bytes=1000, target_tokens=96, seconds=0.01)
            record_sent(row.pk, sent, node_id=row.source.node_id, now=clock.now())
        self.moves.step()

    def balancing(self) -> Deployment:
        return Deployment.objects.get(pk=self.deployment.pk)


@pytest.fixture
def world(redis_client: redis.Redis) -> Iterator[World]:
    with leading(redis_client) as leader:
        made = World(leader, redis_client)
        yield made
        made.pins.close()


def test_overfilled_replica_is_relieved_until_the_gap_is_small(world: World) -> None:
    world.moves.step()
    first = Relocation.objects.order_by("created_at")
    assert [row.trigger for row in first] == ["balance", "balance"], "two at once on a node"
    assert world.balancing().balancing_since is not None
    assert "120% full" in world.balancing().balancing_note
    for _ in range(4):
        world.arrive()
    counts = {row.pk: InferenceSession.objects.filter(replica=row).count() for row in world.replicas}
    assert list(counts.values()) == [6, 6]
    assert world.balancing().balancing_since is None
    told = Event.objects.filter(subject_kind="deployment", event__startswith="balanc").order_by("pk")
    assert [event.event for event in told] == ["balancing", "balanced"]


def test_next_leader_goes_on_with_a_levelling_that_it_would_not_begin(world: World) -> None:
    world.moves.step()
    InferenceSession.objects.filter(session_id__in=["talk-0", "talk-1", "talk-2"]).update(
        last_turn_at=clock.now() - timedelta(hours=1)
    )
    Relocation.objects.update(status="dropped", ended_at=clock.now())
    world.lead_anew()
    world.moves.step()
    assert world.balancing().balancing_since is not None
    assert Relocation.objects.count() > 2
    Deployment.objects.update(balancing_since=None)
    Relocation.objects.all().delete()
    InferenceSession.objects.filter(session_id="talk-3").update(last_turn_at=clock.now() - timedelta(hours=1))
    world.moves.step()
    assert not Relocation.objects.exists(), "0.8 is not full enough to begin"


def test_switched_off_nothing_moves_and_what_was_begun_is_over(world: World) -> None:
    world.moves.step()
    Deployment.objects.update(balance_sessions=False)
    Relocation.objects.all().delete()
    world.moves.step()
    assert not Relocation.objects.exists()
    assert world.balancing().balancing_since is None


def test_session_without_kv_stays_rather_than_being_computed_again(world: World) -> None:
    world.moves.step()
    row = Relocation.objects.select_related("source").first()
    assert row is not None
    assert row.source is not None
    assert row.source.node_id is not None
    record_sent(row.pk, Sent(code="session_unknown"), node_id=row.source.node_id, now=clock.now())
    row.refresh_from_db()
    assert row.status == "dropped"
    assert "not worth it" in row.reason
    world.moves.step()
    tried_again = Relocation.objects.filter(session=row.session).exclude(pk=row.pk)
    assert not tried_again.exists(), "it rests first"
