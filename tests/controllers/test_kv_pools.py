"""KV pools through a leading controller: news on record, limits to the agent and its answer back."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from django.conf import settings

from exaserve_ops.adapters.live_store import RedisLiveReader
from exaserve_ops.audit.models import Event
from exaserve_ops.controllers.kv_watch import KvWatch
from exaserve_ops.inventory.models import Node
from exaserve_ops.lib.errors import ConflictError, InvalidInputError
from exaserve_ops.serving.domain.kv_pools import LimitsWish, WatchPolicy
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.services.kv_pools import ask_kv_limits
from tests.fakes.fleet import NOW, ScriptedNode, make_deployment, seen
from tests.fakes.kv_pools import pool_of
from tests.fakes.leader import Leader
from workers.protocol import v1
from workers.protocol.observed import ObservedState, ReplicaTelemetry

pytestmark = pytest.mark.django_db
AT_ONCE = WatchPolicy(short_seconds=0, enough_seconds=0, thrash_seconds=0, calm_seconds=0)


@pytest.fixture
def replica(leader: Leader, node: ScriptedNode) -> Replica:
    deployment = make_deployment(replicas=1)
    leader.work()
    leader.work()
    node.commands()
    return Replica.objects.get(deployment=deployment)


def told() -> list[tuple[str, str]]:
    rows = Event.objects.filter(event__startswith="kv_").order_by("pk")
    return list(rows.values_list("event", "subject_kind"))


def beat(leader: Leader, node: ScriptedNode, replica: Replica, thrash: str = "", **facts: Any) -> None:
    telemetry = ReplicaTelemetry(window_seconds=10.0, kv_thrash_reason=thrash)
    node.beat(
        seen(replica, ObservedState.READY, telemetry=telemetry),
        kv_pools=(pool_of(str(replica.pk), **facts),),
    )
    leader.work()


def test_shortage_thrash_damage_and_reclaim_are_on_record_once_each(
    leader: Leader, node: ScriptedNode, replica: Replica
) -> None:
    watch = KvWatch(leader.state, AT_ONCE)
    beat(leader, node, replica)
    watch.step()
    assert told() == []
    for _ in range(3):
        beat(
            leader, node, replica, "came and left", waiting_requests=3, short_blocks=8, damaged_blocks=16,
            reclaimed_extents=2, attempt=2,
        )  # fmt: skip
        watch.step()
    assert sorted(told()) == [
        ("kv_damaged", "node"),
        ("kv_out_of_blocks", "replica"),
        ("kv_reclaimed", "node"),
        ("kv_thrash", "replica"),
    ]
    assert f"held by {replica.name}" in Event.objects.get(event="kv_reclaimed").reason
    beat(leader, node, replica, reclaimed_extents=2, attempt=2)
    watch.step()
    assert [event for event, _ in told()[4:]] == ["kv_blocks_again", "kv_thrash_over", "kv_repaired"]


def test_next_leader_goes_on_from_the_record(leader: Leader, node: ScriptedNode, replica: Replica) -> None:
    first = KvWatch(leader.state, AT_ONCE)
    beat(leader, node, replica, waiting_requests=3, short_blocks=8, reclaimed_extents=2)
    first.step()
    second = KvWatch(leader.state, AT_ONCE)
    second.step()
    assert told() == [("kv_out_of_blocks", "replica")]
    beat(leader, node, replica, reclaimed_extents=2)
    second.step()
    assert [event for event, _ in told()[1:]] == ["kv_blocks_again"]


def test_node_that_names_strangers_writes_nothing_of_them(
    leader: Leader, node: ScriptedNode, replica: Replica
) -> None:
    watch = KvWatch(leader.state, AT_ONCE)
    for replica_id in ("nobody", "00000000-0000-4000-8000-000000000000"):
        node.beat(kv_pools=(pool_of(replica_id, waiting_requests=3, short_blocks=8),))
        leader.work()
        watch.step()
    assert told() == []
    assert replica.status


def test_live_store_hands_pools_out_with_their_map(
    leader: Leader, node: ScriptedNode, replica: Replica
) -> None:
    beat(leader, node, replica)
    leader.live.step()
    reader = RedisLiveReader(settings.ENV.redis_url)
    found = reader.read_kv(node.node_id)
    assert found is not None
    [pool] = found["pools"]
    assert (pool["capacity_blocks"], pool["members"][0]["replica_id"]) == (64, str(replica.pk))
    assert pool["members"][0]["borrowed_blocks"] == 16
    assert [cell[0] for cell in pool["cells"]] == [1, 1, 0, 0]


def asked(leader: Leader, node: ScriptedNode, replica: Replica) -> v1.SetKvLimits:
    """What the agent is told, once the hint of the wish has rung."""
    leader.queue.add("kv_limits", LimitsWish(node.node_id, str(replica.pk), 32, 48).text())
    leader.drain()
    [command] = [c for c in node.commands() if isinstance(c, v1.SetKvLimits)]
    return command


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        ("done", ("kv_limits_set", "at least 32 and at most 48 blocks")),
        ("refused", ("kv_limits_refused", "at least 32 and at most 48 blocks: too much")),
    ],
)
def test_limits_go_to_the_agent_and_its_answer_is_on_record(
    leader: Leader, node: ScriptedNode, replica: Replica, outcome: str, told: tuple[str, str]
) -> None:
    ask_kv_limits(
        UUID(node.node_id), replica.pk, minimum_blocks=32, ceiling_blocks=48, reason="busy", actor="user:o",
        now=NOW,
    )  # fmt: skip
    assert Event.objects.get(event="kv_limits_asked").reason == "at least 32 and at most 48 blocks: busy"
    command = asked(leader, node, replica)
    assert (command.replica_id, command.minimum_blocks, command.ceiling_blocks) == (str(replica.pk), 32, 48)
    assert command.lease_epoch == leader.state.node(node.node_id).lease_epoch
    result = v1.CommandResult(
        node_id=node.node_id, command_id=command.command_id, outcome=outcome, reason="too much"
    )
    node._send(result)
    leader.work()
    assert Event.objects.get(event=told[0]).reason == told[1]


def test_one_node_cannot_answer_for_another(leader: Leader, node: ScriptedNode, replica: Replica) -> None:
    wish = LimitsWish("00000000-0000-4000-8000-000000000000", str(replica.pk), 32, 48)
    node._send(v1.CommandResult(node_id=node.node_id, command_id=wish.text(), outcome="done"))
    leader.work()
    assert told() == []


def test_what_cannot_hold_or_reach_anybody_is_not_asked(node: ScriptedNode, replica: Replica) -> None:
    node_id = UUID(node.node_id)
    fields: dict[str, Any] = {"reason": "x", "actor": "user:o", "now": NOW}
    with pytest.raises(InvalidInputError, match="minimum_blocks"):
        ask_kv_limits(node_id, replica.pk, minimum_blocks=64, ceiling_blocks=32, **fields)
    with pytest.raises(ConflictError, match="no such replica"):
        ask_kv_limits(node_id, node_id, minimum_blocks=1, ceiling_blocks=32, **fields)
    Node.objects.filter(pk=node_id).update(liveness="dead")
    with pytest.raises(ConflictError, match="is dead"):
        ask_kv_limits(node_id, replica.pk, minimum_blocks=1, ceiling_blocks=32, **fields)
    assert told() == []
