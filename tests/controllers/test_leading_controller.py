"""The controllers' parts against a real Postgres, a real Redis and a node that speaks the protocol."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import redis
from django.conf import settings

from exaserve_ops.adapters.live_store import FRAME_KEY, LAYOUT_KEY, SUMMARY_KEY, RedisLiveReader
from exaserve_ops.adapters.pulses import RedisPulseReader
from exaserve_ops.adapters.route_table import REPLICAS_KEY
from exaserve_ops.audit.models import Event
from exaserve_ops.controllers.detection import Detection
from exaserve_ops.health.domain.detector import DetectorSettings
from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.services import revoke_node_keys
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.serving.models import Deployment, Replica
from exaserve_ops.serving.services.deployments import delete_deployment, scale_deployment
from exaserve_ops.serving.services.replicas import retire_lost_node
from exaserve_ops.telemetry.domain.frames import METRICS, MISSING, STALE, decode_frame
from tests.fakes.fleet import ScriptedNode, make_deployment, seen
from tests.fakes.leader import Leader, key_of
from workers.protocol import names, v1
from workers.protocol.observed import (
    AgentLiveness,
    ExitInfo,
    ObservedState,
    ReplicaObserved,
    ReplicaTelemetry,
)
from workers.protocol.wish import WantedState

State = ObservedState

pytestmark = pytest.mark.django_db


def wishes(commands: list[v1.Command]) -> list[v1.ApplyDesired]:
    return [c for c in commands if isinstance(c, v1.ApplyDesired)]


def status_of(deployment: Deployment) -> list[str]:
    return sorted(Replica.objects.filter(deployment=deployment).values_list("status", flat=True))


def bring_up(leader: Leader, node: ScriptedNode, deployment: Deployment) -> list[Replica]:
    leader.work()
    leader.work()
    replicas = list(Replica.objects.filter(deployment=deployment))
    node.commands()
    node.beat(
        *(
            seen(r, State.READY, address=f"127.0.0.1:{41000 + i}", ports=(41000 + i,))
            for i, r in enumerate(replicas)
        )
    )
    leader.work()
    return list(Replica.objects.filter(deployment=deployment))


def test_hello_grants_a_lease_and_brings_the_whole_wish(leader: Leader, redis_client: redis.Redis) -> None:
    scripted = ScriptedNode(redis_client)
    scripted.enrol()
    scripted.say_hello()
    leader.work()
    [wish] = wishes(scripted.commands())
    assert wish.lease_epoch == 1
    assert wish.replicas == ()
    row = Node.objects.get(pk=scripted.node_id)
    assert row.liveness == "alive"
    assert row.accelerators.get().kind == "cpu"


def test_a_deployment_becomes_replicas_placed_told_and_routed(
    leader: Leader, node: ScriptedNode, redis_client: redis.Redis
) -> None:
    deployment = make_deployment(replicas=2)
    replicas = bring_up(leader, node, deployment)
    assert [r.status for r in replicas] == ["ready", "ready"]
    assert {r.pid for r in replicas} == {4242}
    table = redis_client.hgetall(REPLICAS_KEY)
    assert {key.decode() for key in table} == {str(r.pk) for r in replicas}
    events = Event.objects.filter(subject_kind="replica", subject_id=str(replicas[0].pk))
    assert list(events.order_by("pk").values_list("event", flat=True)) == ["created", "place", "seen_ready"]


def test_without_nodes_a_replica_waits_with_one_event_however_often_it_is_looked_at(
    leader: Leader,
) -> None:
    deployment = make_deployment(replicas=1)
    for _ in range(5):
        leader.work()
    replica = Replica.objects.get(deployment=deployment)
    assert (replica.status, replica.reason) == ("pending", "no nodes have joined")
    assert Event.objects.filter(subject_id=str(replica.pk), event="waits").count() == 1


def test_a_killed_engine_leaves_an_event_with_its_signal_and_its_last_lines(
    leader: Leader, node: ScriptedNode
) -> None:
    [replica] = bring_up(leader, node, make_deployment(replicas=1))
    ended = ExitInfo(attempt=1, signal=9, duration_seconds=12.34, log_tail=("last words",))
    node.beat(seen(replica, State.BACKING_OFF, last_exit=ended, reason="next attempt in 1 s"))
    leader.work()
    replica.refresh_from_db()
    assert (replica.status, replica.exit_signal, replica.exit_log_tail) == ("backing_off", 9, ["last words"])
    event = Event.objects.get(subject_id=str(replica.pk), event="exited")
    assert event.reason == "attempt 1 killed by signal 9 after 12.3 s"
    node.beat(seen(replica, State.STARTING, attempt=2, restarts=1, last_exit=ended))
    leader.work()
    assert Event.objects.filter(subject_id=str(replica.pk), event="exited").count() == 1


def test_scaling_to_one_none_and_two_in_a_row_ends_with_two_new_ones(
    leader: Leader, node: ScriptedNode
) -> None:
    deployment = make_deployment(replicas=1)
    [first] = bring_up(leader, node, deployment)
    for count in (0, 2):
        scale_deployment(deployment.pk, replicas=count, actor="user:test", now=clock.now())
        leader.work()
    first.refresh_from_db()
    # Draining at the count of none was a decision; the second change does not take it back.
    assert first.status == "draining"
    leader.work()
    kept = Replica.objects.filter(deployment=deployment, wanted="run")
    assert kept.count() == 2
    assert first not in kept


def test_a_stopped_replica_is_final_and_its_agent_is_told_to_forget_it(
    leader: Leader, node: ScriptedNode
) -> None:
    deployment = make_deployment(replicas=1)
    [replica] = bring_up(leader, node, deployment)
    scale_deployment(deployment.pk, replicas=0, actor="user:test", now=clock.now())
    leader.work()
    leader.work()
    replica.refresh_from_db()
    [wish] = wishes(node.commands())[-1:]
    assert wish.replicas[0].wanted is WantedState.DRAIN
    node.beat(seen(replica, State.STOPPED))
    leader.work()
    replica.refresh_from_db()
    assert replica.status == "stopped"
    forgets = [c for c in node.commands() if isinstance(c, v1.ForgetReplica)]
    assert forgets
    assert forgets[0].replica_ids == (str(replica.pk),)


def test_an_older_lease_counts_for_life_and_for_nothing_else(leader: Leader, node: ScriptedNode) -> None:
    [replica] = bring_up(leader, node, make_deployment(replicas=1))
    node.beat(seen(replica, State.FAILED), lease_epoch=99)
    leader.work()
    replica.refresh_from_db()
    assert replica.status == "ready"
    assert any(isinstance(c, v1.RequestHello) for c in node.commands())


def test_a_new_agent_run_gets_a_new_epoch(leader: Leader, node: ScriptedNode) -> None:
    node.boot_id = "boot-2"
    node.say_hello()
    leader.work()
    assert wishes(node.commands())[-1].lease_epoch == 2


def test_a_restarted_agent_is_believed_from_its_first_report(leader: Leader, node: ScriptedNode) -> None:
    [replica] = bring_up(leader, node, make_deployment(replicas=1))
    node.sequence = 100_000
    node.beat(seen(replica, State.READY))
    leader.work()
    node.boot_id, node.sequence = "boot-2", 0
    node.say_hello()
    leader.work()
    node.commands()
    node.beat(seen(replica, State.BACKING_OFF, attempt=2, reason="crash 1 of 6"))
    leader.work()
    replica.refresh_from_db()
    assert replica.status == "backing_off"


def test_a_report_that_arrives_late_changes_nothing(leader: Leader, node: ScriptedNode) -> None:
    [replica] = bring_up(leader, node, make_deployment(replicas=1))
    node.sequence -= 1
    node.beat(seen(replica, State.FAILED), sequence=node.sequence)
    leader.work()
    replica.refresh_from_db()
    assert replica.status == "ready"


def test_a_forged_or_strange_report_is_dropped_and_the_next_one_read(
    leader: Leader, node: ScriptedNode, redis_client: redis.Redis
) -> None:
    redis_client.xadd(names.REPORT_STREAM, {"m": b"no envelope"})
    redis_client.xadd(names.REPORT_STREAM, {"other": b"field"})
    beat = v1.Heartbeat(
        node_id=node.node_id,
        boot_id=node.boot_id,
        lease_epoch=node.lease_epoch,
        sequence=10_000,
        sent_at_seconds=0.0,
        applied_revision=0,
        liveness=AgentLiveness(),
    )
    node._send(beat, key=b"k" * 32)
    node.beat()
    leader.work()
    view = leader.state.node(node.node_id)
    assert view.sequence == node.sequence
    assert sum(leader.ingest._source.refused.values()) == 3  # type: ignore[attr-defined]


def test_one_sighting_that_cannot_be_recorded_does_not_keep_the_others(
    leader: Leader, node: ScriptedNode
) -> None:
    replicas = bring_up(leader, node, make_deployment(replicas=2))
    broken = ReplicaObserved(replica_id="no uuid", generation=1, state=State.READY)
    twin_address = seen(replicas[0], State.LOADING, attempt=2, address="127.0.0.1:41001")
    node.beat(broken, twin_address, seen(replicas[1], State.BACKING_OFF, attempt=3, address=""))
    leader.work()
    replicas[1].refresh_from_db()
    assert replicas[1].status == "backing_off"


def test_standing_parts_of_an_agent_show_on_its_node(leader: Leader, node: ScriptedNode) -> None:
    node.beat(liveness=AgentLiveness(intake_age_seconds=300.0, reconcile_age_seconds=0.1))
    leader.work()
    row = Node.objects.get(pk=node.node_id)
    assert row.commands_stale_since is not None
    assert "takes no commands" in row.degraded_reason
    node.beat()
    leader.work()
    row.refresh_from_db()
    assert row.commands_stale_since is None
    assert list(
        Event.objects.filter(subject_id=node.node_id, event__in=["degraded", "healthy_again"])
        .order_by("pk")
        .values_list("event", flat=True)
    ) == ["degraded", "healthy_again"]


def test_a_silent_node_is_lost_its_replicas_unreachable_and_unrouted_then_back(
    leader: Leader, node: ScriptedNode, redis_client: redis.Redis
) -> None:
    [replica] = bring_up(leader, node, make_deployment(replicas=1))
    pulses = RedisPulseReader(redis_client, key_of)
    settings = DetectorSettings(interval_seconds=0.001)
    leader.detection = Detection(leader.state, leader.queue, settings, pulses=pulses)
    view = leader.state.node(node.node_id)
    view.last_report_seconds = time.monotonic() - 10
    leader.detection._outage.watching_since = time.monotonic() - 10
    leader.detection.step(time.monotonic())
    leader.reconcilers.reconcile("routes", "all")
    replica.refresh_from_db()
    assert (replica.status, Node.objects.get(pk=node.node_id).liveness) == ("unreachable", "dead")
    assert redis_client.hlen(REPLICAS_KEY) == 0
    settings = DetectorSettings(interval_seconds=60.0)
    leader.detection = Detection(leader.state, leader.queue, settings, pulses=pulses)
    for _ in range(3):
        node.beat(seen(replica, State.READY))
        leader.work()
        node.commands()
    node.beat(seen(replica, State.READY))
    leader.work()
    replica.refresh_from_db()
    assert (replica.status, Node.objects.get(pk=node.node_id).liveness) == ("ready", "alive")
    assert node.lease_epoch == 2


def test_a_moved_port_is_a_new_route(leader: Leader, node: ScriptedNode, redis_client: redis.Redis) -> None:
    [replica] = bring_up(leader, node, make_deployment(replicas=1))
    before = redis_client.hget(REPLICAS_KEY, str(replica.pk))
    node.beat(seen(replica, State.READY, attempt=2, address="127.0.0.1:41999", ports=(41999,)))
    leader.work()
    after = redis_client.hget(REPLICAS_KEY, str(replica.pk))
    assert before != after


def test_the_picture_tells_missing_stale_and_zero_apart(
    leader: Leader, node: ScriptedNode, redis_client: redis.Redis
) -> None:
    replicas = bring_up(leader, node, make_deployment(replicas=3))
    loads: list[dict[str, Any]] = [
        {"telemetry": ReplicaTelemetry(window_seconds=10, kv_used_ratio=0.0, kv_total_blocks=100)},
        {"telemetry": ReplicaTelemetry(window_seconds=10, age_seconds=60.0, kv_used_ratio=0.5)},
        {"telemetry": ReplicaTelemetry(window_seconds=10, requests_waiting=3)},
    ]
    ordered = sorted(replicas, key=lambda r: r.name)
    node.beat(
        *(seen(r, State.READY, address=r.address, **load) for r, load in zip(ordered, loads, strict=True))
    )
    leader.work()
    leader.live.step()
    frame = decode_frame(redis_client.get(FRAME_KEY))
    kv = [metric.key for metric in METRICS].index("kv_used_ratio")
    assert frame.codes[kv] == (0, STALE, MISSING)
    layout = json.loads(redis_client.get(LAYOUT_KEY))
    assert layout["version"] == frame.layout_version
    assert [cell["id"] for cell in layout["rows"][0]["cells"]] == [str(r.pk) for r in ordered]
    summary = json.loads(redis_client.get(SUMMARY_KEY))
    assert summary["replicas"] == {"ready": 3, "wanted": 3, "simulated": 0}
    assert summary["problems"] == 0
    assert summary["ttft_seconds"] == {"p50": None, "p95": None, "p99": None}
    told = RedisLiveReader(settings.ENV.redis_url).read_node(node.node_id)
    assert told is not None
    assert told["sequence"] == node.sequence
    assert told["replicas"][str(ordered[0].pk)]["load"]["kv_used_ratio"] == 0.0


def test_a_changed_layout_has_a_new_version_and_an_unchanged_one_keeps_it(
    leader: Leader, node: ScriptedNode, redis_client: redis.Redis
) -> None:
    deployment = make_deployment(replicas=1)
    bring_up(leader, node, deployment)
    leader.live.step()
    first = json.loads(redis_client.get(LAYOUT_KEY))["version"]
    leader.live.step()
    assert json.loads(redis_client.get(LAYOUT_KEY))["version"] == first
    scale_deployment(deployment.pk, replicas=2, actor="user:test", now=clock.now())
    leader.work()
    leader.work()
    leader.live.step()
    assert json.loads(redis_client.get(LAYOUT_KEY))["version"] > first


def test_an_agent_that_takes_nothing_in_does_not_fill_the_store(leader: Leader, node: ScriptedNode) -> None:
    for revision in range(100):
        leader.reconcilers._link.send_wish(node.node_id, lease_epoch=1, revision=revision, replicas=())
    kept = wishes(node.commands())
    assert [wish.revision for wish in kept] == list(range(36, 100))


def test_a_node_whose_keys_are_revoked_is_not_believed_any_more(leader: Leader, node: ScriptedNode) -> None:
    revoke_node_keys(Node.objects.get(pk=node.node_id).pk, actor="user:test", now=clock.now())
    before = leader.state.node(node.node_id).sequence
    node.beat()
    leader.work()
    assert leader.state.node(node.node_id).sequence == before
    refused = leader.ingest._source.refused  # type: ignore[attr-defined]  # the port hides it
    assert refused["ForgedMessageError"] == 1


def test_a_lost_node_can_be_retired_and_holds_up_no_deletion(leader: Leader, node: ScriptedNode) -> None:
    deployment = make_deployment(replicas=2)
    replicas = bring_up(leader, node, deployment)
    pk = Node.objects.get(pk=node.node_id).pk
    with pytest.raises(ConflictError, match="drain it"):
        retire_lost_node(pk, reason="sold", actor="user:test", now=clock.now())
    leader.lose(node.node_id)
    delete_deployment(deployment.pk, actor="user:test", now=clock.now())
    leader.work()
    assert {r.status for r in Replica.objects.all()} == {"stopping"}
    retire_lost_node(pk, reason="sold", actor="user:test", now=clock.now())
    leader.work()
    deployment.refresh_from_db()
    assert deployment.status == "deleted"
    replicas[0].refresh_from_db()
    assert (replicas[0].status, replicas[0].reason) == ("stopped", "its node was retired: sold")
    assert Node.objects.get(pk=pk).liveness == "retired"
