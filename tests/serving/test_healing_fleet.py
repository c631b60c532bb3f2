"""Healing with a real Postgres, a real Redis, and nodes that speak the protocol."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from uuid import UUID

import pytest
import redis
from django.db.models import QuerySet

from exaserve_ops.audit.models import Event
from exaserve_ops.controllers.slowness import SlowWatch
from exaserve_ops.health.models import Incident
from exaserve_ops.inventory.models import Accelerator
from exaserve_ops.inventory.services.drain import drain_node
from exaserve_ops.inventory.services.quarantine import lift_quarantine
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.serving.domain.placement import Placement
from exaserve_ops.serving.models import Deployment, Replica
from exaserve_ops.serving.selectors import deployment_snapshot, node_rooms
from exaserve_ops.serving.services.deployments import scale_deployment, update_deployment
from exaserve_ops.serving.services.healing import (
    Promotion,
    make_replacement,
    promote_standbys,
    record_hold,
    record_slowness,
)
from exaserve_ops.serving.services.replicas import advance_replica, replace_replica
from tests.fakes.fleet import GIB, make_deployment, seen
from tests.fakes.leader import leading
from tests.fakes.scripted_fleet import Fleet
from workers.protocol.observed import ObservedState, ReplicaTelemetry

State = ObservedState

pytestmark = pytest.mark.django_db


@pytest.fixture
def fleet(redis_client: redis.Redis) -> Iterator[Fleet]:
    with leading(redis_client) as leader:
        yield Fleet(leader, redis_client, 3)


def deployed(fleet: Fleet, replicas: int, standbys: int = 0, **changes: object) -> Deployment:
    deployment = make_deployment(replicas=replicas)
    if standbys or changes:
        wish = {"standbys": standbys, **changes}
        deployment = update_deployment(deployment.pk, wish, actor="user:test", now=clock.now())
    fleet.settle()
    assert ready(deployment, "serving").count() == replicas
    assert ready(deployment, "standby").count() == standbys
    return deployment


def ready(deployment: Deployment, role: str) -> QuerySet[Replica]:
    kept = Replica.objects.filter(deployment=deployment, wanted="run")
    return kept.filter(role=role, status="ready").order_by("name")


def events_of(replica: Replica) -> list[str]:
    return list(
        Event.objects.filter(subject_kind="replica", subject_id=str(replica.pk))
        .order_by("pk")
        .values_list("event", flat=True)
    )


def test_standbys_are_outside_the_route_table_and_counted_apart(fleet: Fleet) -> None:
    deployment = deployed(fleet, 2, 1)
    assert fleet.routed() == {str(r.pk) for r in ready(deployment, "serving")}


def test_standby_is_routed_in_the_pass_in_which_the_node_is_lost(fleet: Fleet) -> None:
    deployment = deployed(fleet, 2, 1)
    standby = ready(deployment, "standby").get()
    victim = ready(deployment, "serving").exclude(node=standby.node_id).first()
    fleet.leader.lose(str(victim.node_id))
    fleet.silent.add(str(victim.node_id))
    fleet.leader.reconcilers.ring("deployment", str(deployment.pk))  # as the doorbell does
    assert fleet.leader.queue.take(0.0) == ("takeover", str(deployment.pk))
    fleet.leader.reconcilers.reconcile("takeover", str(deployment.pk))
    fleet.leader.queue.done("takeover", str(deployment.pk))
    fleet.leader.reconcilers.reconcile("routes", "all")
    victim.refresh_from_db()
    standby.refresh_from_db()
    assert (standby.role, victim.role, victim.status) == ("serving", "standby", "unreachable")
    assert str(standby.pk) in fleet.routed()
    assert str(victim.pk) not in fleet.routed()
    assert "promoted" in events_of(standby)
    assert "stood_down" in events_of(victim)
    fleet.settle()
    assert ready(deployment, "standby").count() == 1, "the pool is refilled"
    assert ready(deployment, "serving").count() == 2


def test_replacement_is_made_once_and_the_returning_one_is_stopped(fleet: Fleet) -> None:
    deployment = deployed(fleet, 3)
    [victim, *_] = ready(deployment, "serving")
    home = fleet.node_of(victim)
    fleet.leader.lose(home.node_id)
    fleet.silent.add(home.node_id)
    fleet.settle()
    victim.refresh_from_db()
    made = Replica.objects.filter(deployment=deployment, made_for="node_lost")
    assert made.get().replaces_id == victim.pk
    assert made.get().node_id != victim.node_id
    assert (victim.status, victim.wanted) == ("stopping", "stop")
    fleet.silent.clear()
    fleet.settle()
    victim.refresh_from_db()
    assert victim.status == "stopped"
    assert ready(deployment, "serving").count() == 3


def test_frozen_healing_waits_with_its_reason_on_the_record(fleet: Fleet) -> None:
    deployment = deployed(fleet, 3, 1)
    victim = ready(deployment, "serving").first()
    Incident.objects.create(
        kind="mass_silence",
        scope="fleet",
        evidence="most of the fleet fell silent",
        freezes_healing=True,
        opened_at=clock.now(),
    )
    fleet.leader.lose(str(victim.node_id))
    fleet.silent.add(str(victim.node_id))
    fleet.settle(rounds=3)
    victim.refresh_from_db()
    assert victim.role == "serving"
    assert victim.healing_note.startswith("healing is frozen: ")
    assert not Replica.objects.exclude(made_for="").exists()
    assert Event.objects.filter(subject_id=str(victim.pk), event="healing_waits").count() == 1
    Incident.objects.all().delete()
    fleet.settle()
    assert ready(deployment, "serving").count() == 3
    victim.refresh_from_db()
    assert victim.healing_note == ""


def test_pinned_replica_waits_for_its_node_and_says_which(fleet: Fleet) -> None:
    deployment = deployed(fleet, 1, nodes=["node-0"])
    victim = ready(deployment, "serving").get()
    fleet.leader.lose(str(victim.node_id))
    fleet.silent.add(str(victim.node_id))
    fleet.settle(rounds=3)
    victim.refresh_from_db()
    assert victim.status == "unreachable"
    assert "node-0: dead" in victim.healing_note
    assert Replica.objects.filter(deployment=deployment).count() == 1
    scale_deployment(deployment.pk, replicas=2, actor="user:test", now=clock.now())
    fleet.settle(rounds=2)
    waiting = Replica.objects.get(deployment=deployment, status="pending")
    assert "node-0: dead" in waiting.reason


def test_failed_replica_moves_and_a_person_who_takes_it_in_hand_clears_its_node(fleet: Fleet) -> None:
    deployment = deployed(fleet, 2)
    victim = ready(deployment, "serving").first()
    fleet.states[str(victim.pk)] = seen(victim, State.FAILED, reason="ended 6 times in a row")
    fleet.settle()
    victim.refresh_from_db()
    made = Replica.objects.get(deployment=deployment, made_for="failed")
    assert made.status == "ready"
    assert made.node_id != victim.node_id
    assert victim.wanted == "stop"
    assert "replaced" in events_of(victim)
    snapshot = deployment_snapshot(deployment.pk, active_sessions={}, now=clock.now())
    assert snapshot is not None
    assert [key for key, _ in snapshot.healing.failed_nodes] == [str(victim.node_id)]
    assert snapshot.healing.recent_replacements == 1
    later = deployment_snapshot(deployment.pk, active_sessions={}, now=clock.now() + timedelta(minutes=11))
    assert later is not None
    assert (later.healing.failed_nodes, later.healing.recent_replacements) == ((), 0)


def test_replacing_by_hand_forgives_the_node(fleet: Fleet) -> None:
    deployment = deployed(fleet, 1)
    victim = ready(deployment, "serving").get()
    now = clock.now()
    advance_replica(victim.pk, "seen_failed", reason="x", actor="test", now=now)
    replace_replica(victim.pk, why="disk was full", actor="user:test", now=now)
    snapshot = deployment_snapshot(deployment.pk, active_sessions={}, now=now)
    assert snapshot is not None
    assert snapshot.healing.failed_nodes == ()


def test_held_memory_quarantines_the_accelerator_until_a_person_lifts_it(fleet: Fleet) -> None:
    deployment = deployed(fleet, 1)
    victim = ready(deployment, "serving").get()
    fleet.states[str(victim.pk)] = seen(
        victim, State.WAITING, reason="memory is held by pid 4711", held_by_pids=(4711,)
    )
    fleet.settle(rounds=2)
    victim.refresh_from_db()
    assert victim.held_by_pids == [4711]
    assert victim.held_since is not None
    Replica.objects.filter(pk=victim.pk).update(held_since=victim.held_since - timedelta(minutes=2))
    fleet.settle()
    accelerator = Accelerator.objects.get(quarantined_at__isnull=False)
    assert accelerator.node_id == victim.node_id
    assert "pid 4711" in accelerator.quarantine_reason
    assert ready(deployment, "serving").get().made_for == "held"
    [room] = [r for r in node_rooms(deployment.pk, now=clock.now()) if r.node_id == str(victim.node_id)]
    assert room.accelerators[0].quarantine
    lift_quarantine(accelerator.uuid, reason="the process is gone", actor="user:test", now=clock.now())
    with pytest.raises(ConflictError, match="not quarantined"):
        lift_quarantine(accelerator.uuid, reason="again", actor="user:test", now=clock.now())
    events = Event.objects.filter(subject_kind="accelerator").order_by("pk")
    assert list(events.values_list("event", flat=True)) == ["quarantined", "quarantine_lifted"]


def test_drained_node_is_emptied_without_one_answer_less(fleet: Fleet) -> None:
    deployment = deployed(fleet, 3)
    victim = ready(deployment, "serving").first()
    now = clock.now()
    drain_node(
        UUID(str(victim.node_id)),
        reason="new kernel",
        deadline_at=now + timedelta(hours=1),
        actor="user:t",
        now=now,
    )
    for _ in range(8):
        fleet.settle(rounds=1)
        assert len(fleet.routed()) >= 3
    assert not Replica.objects.filter(node=victim.node_id).exclude(status="stopped").exists()
    assert ready(deployment, "serving").count() == 3


def test_replica_that_its_agent_ends_though_it_is_wanted_is_out_of_routing_at_once(fleet: Fleet) -> None:
    deployment = deployed(fleet, 2)
    victim = ready(deployment, "serving").first()
    why = "stalled: 2 requests run and no token came for 60 s"
    fleet.states[str(victim.pk)] = seen(victim, State.STOPPING, reason=why, stalled=True)
    fleet.settle(rounds=1)
    victim.refresh_from_db()
    assert (victim.status, victim.reason) == ("backing_off", why)
    assert str(victim.pk) not in fleet.routed()
    assert events_of(victim).count("stalled") == 1


def test_slow_mark_is_one_event_and_the_policy_replaces(fleet: Fleet) -> None:
    deployment = deployed(fleet, 3)
    victim = ready(deployment, "serving").first()
    for reason in ("TTFT 2.0 s, its peers 0.2 s", "TTFT 2.1 s, its peers 0.2 s"):
        record_slowness(victim.pk, reason, actor="controller:slowness", now=clock.now())
    assert events_of(victim).count("slow") == 1
    fleet.settle(rounds=2)
    assert not Replica.objects.exclude(made_for="").exists()
    update_deployment(deployment.pk, {"drain_slow": True}, actor="user:test", now=clock.now())
    fleet.settle()
    victim.refresh_from_db()
    assert victim.status == "stopped"
    assert Replica.objects.get(made_for="slow").node_id != victim.node_id


def test_replica_that_stays_slower_than_its_peers_is_flagged_and_cleared(fleet: Fleet) -> None:
    deployment = deployed(fleet, 5)
    rows = list(ready(deployment, "serving"))
    watch = SlowWatch(fleet.leader.state)

    def look(slow_seconds: float) -> str:
        for index, row in enumerate(rows):
            load = ReplicaTelemetry(
                window_seconds=10,
                requests_per_second=5.0,
                ttft_p50_seconds=slow_seconds if index == 0 else 0.2,
                itl_p50_seconds=0.01,
            )
            fleet.states[str(row.pk)] = seen(
                row, State.READY, address=row.address, ports=tuple(row.ports), telemetry=load
            )
        fleet.beat()
        fleet.leader.ingest.step()
        watch.step()
        rows[0].refresh_from_db()
        return rows[0].slow_reason

    assert [look(2.0) for _ in range(6)][-2:] == ["", "time to first token 2 s, 0.2 s among its 4 peers"]
    assert rows[0].slow_since is not None
    watch = SlowWatch(fleet.leader.state)  # another leader goes on from the record
    assert [bool(look(0.2)) for _ in range(6)][-2:] == [True, False]
    assert events_of(rows[0])[-2:] == ["slow", "slow_over"]


def test_promotion_needs_a_ready_standby_and_an_absent_replica(fleet: Fleet) -> None:
    deployment = deployed(fleet, 1, 1)
    serving, standby = ready(deployment, "serving").get(), ready(deployment, "standby").get()
    wish = [Promotion(standby.pk, serving.pk, "x")]
    [refusal] = promote_standbys(wish, actor="test", now=clock.now())
    assert refusal == f"{serving.name} serves, or is replaced already"
    advance_replica(serving.pk, "seen_backing_off", reason="x", actor="test", now=clock.now())
    # The same twice in one plan: the second finds the first.
    [refusal] = promote_standbys(wish * 2, actor="test", now=clock.now())
    assert refusal == f"{standby.name} is no ready standby any more"
    standby.refresh_from_db()
    serving.refresh_from_db()
    assert (standby.role, serving.role) == ("serving", "standby")
    assert (events_of(standby)[-1], events_of(serving)[-1]) == ("promoted", "stood_down")
    assert promote_standbys(wish, actor="test", now=clock.now()) == [refusal]


def test_second_replacement_of_one_replica_is_the_first(fleet: Fleet) -> None:
    deployment = deployed(fleet, 1)
    old = ready(deployment, "serving").get()
    node = next(n for n in fleet.nodes if n.node_id != str(old.node_id))
    place = Placement(node.node_id, node.name, (f"CPU-{node.node_id}",), "test")
    first = make_replacement(old.pk, place, cause="failed", why="x", actor="test", now=clock.now())
    again = make_replacement(old.pk, place, cause="failed", why="x", actor="test", now=clock.now())
    assert first.pk == again.pk
    assert first.memory_bytes == GIB
    replace_replica(old.pk, why="x", actor="test", now=clock.now())
    with pytest.raises(ConflictError, match="already"):
        make_replacement(old.pk, place, cause="failed", why="x", actor="test", now=clock.now())


def test_hold_is_one_event_for_each_change(fleet: Fleet) -> None:
    replica = ready(deployed(fleet, 1), "serving").get()
    for why in ("a", "a", "", "a"):
        record_hold(replica.pk, why, actor="test", now=clock.now())
    assert events_of(replica).count("healing_waits") == 2


def test_start_limit_grows_with_the_weights_unless_it_is_given() -> None:
    small = make_deployment()
    assert small.start_seconds == 300
    small.model.weights_bytes = 140 << 30
    small.model.save()
    large = make_deployment(name="large")
    assert large.start_seconds == 300 + 140 * 1024 // 100
    given = update_deployment(large.pk, {"start_seconds": 900}, actor="test", now=clock.now())
    assert given.start_seconds == 900


def test_one_more_to_serve_and_one_less_to_stand_by_promotes_and_starts_nothing(fleet: Fleet) -> None:
    deployment = deployed(fleet, 1, 1)
    before = set(Replica.objects.values_list("pk", flat=True))
    standby = ready(deployment, "standby").get()
    update_deployment(deployment.pk, {"replicas": 2, "standbys": 0}, actor="user:test", now=clock.now())
    fleet.settle()
    assert set(ready(deployment, "serving").values_list("pk", flat=True)) == before
    assert set(Replica.objects.values_list("pk", flat=True)) == before
    assert fleet.routed() == {str(pk) for pk in before}
    assert events_of(standby)[-1] == "promoted"
    assert not Event.objects.filter(event="drain").exists()


def test_one_less_to_serve_and_one_more_to_stand_by_stands_down_and_starts_nothing(fleet: Fleet) -> None:
    deployment = deployed(fleet, 2)
    before = set(Replica.objects.values_list("pk", flat=True))
    update_deployment(deployment.pk, {"replicas": 1, "standbys": 1}, actor="user:test", now=clock.now())
    fleet.settle()
    assert {r.role for r in Replica.objects.filter(wanted="run", status="ready")} == {"serving", "standby"}
    assert set(Replica.objects.values_list("pk", flat=True)) == before
    assert fleet.routed() == {str(ready(deployment, "serving").get().pk)}
    fallen = ready(deployment, "standby").get()
    assert {"stood_down", "handed_over"} <= set(events_of(fallen))
    update_deployment(deployment.pk, {"replicas": 2, "standbys": 0}, actor="user:test", now=clock.now())
    fleet.settle()
    assert fleet.routed() == {str(pk) for pk in before}
    fallen.refresh_from_db()
    assert (fallen.drain_deadline_at, fallen.handed_over_at) == (None, None)


def test_nobody_is_promoted_for_a_replica_that_is_one_too_many(fleet: Fleet) -> None:
    """The quick look at who is absent knows how many are wanted, too."""
    deployment = deployed(fleet, 2, 1)
    broken, well = ready(deployment, "serving")
    Deployment.objects.filter(pk=deployment.pk).update(replicas=1)
    advance_replica(broken.pk, "seen_backing_off", reason="x", actor="test", now=clock.now())
    fleet.leader.reconcilers.reconcile("takeover", str(deployment.pk))
    assert list(ready(deployment, "serving")) == [well]
    assert ready(deployment, "standby").count() == 1
    Deployment.objects.filter(pk=deployment.pk).update(replicas=2)
    fleet.leader.reconcilers.reconcile("takeover", str(deployment.pk))
    assert ready(deployment, "serving").count() == 2
