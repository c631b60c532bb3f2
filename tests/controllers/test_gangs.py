"""A replica over several nodes is placed, started, restarted and ended as one, over real stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.db import connection

from exaserve_ops.audit.models import Event
from exaserve_ops.controllers.drains import DrainWatch
from exaserve_ops.inventory.domain.facts import NodeFacts
from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.services.drain import drain_node
from exaserve_ops.inventory.services.hardware import record_hardware
from exaserve_ops.lib import clock
from exaserve_ops.routing.selectors import routes
from exaserve_ops.serving.domain.observed import ObservedReplica
from exaserve_ops.serving.models import Deployment, Replica, ReplicaMember
from exaserve_ops.serving.selectors import node_rooms
from exaserve_ops.serving.selectors.wishes import wanted_of_node
from exaserve_ops.serving.services.deployments import delete_deployment, scale_deployment
from exaserve_ops.serving.services.observations import record_observations
from exaserve_ops.serving.services.replicas import restart_replica, retire_lost_node
from tests.fakes.fleet import GIB
from tests.fakes.gang_fleet import GangFleet, GangNode
from tests.fakes.leader import leading
from workers.protocol.wish import WantedState

pytestmark = pytest.mark.django_db


@pytest.fixture
def fleet(redis_client: redis.Redis) -> Iterator[GangFleet]:
    with leading(redis_client) as leader:
        yield GangFleet(leader, redis_client)


def test_cards_of_a_part_that_cannot_be_seen_for_a_while_stay_recorded(fleet: GangFleet) -> None:
    fleet.deploy()
    for one in fleet.of(fleet.until("ready")):
        node = Node.objects.get(pk=one.node.node_id)
        record_hardware(node, NodeFacts("h", "127.0.0.1", "1", 7, "b", accelerators=()), now=clock.now())
        assert node.accelerators.count() == 1
    idle = next(one for one in fleet.nodes if one.spec is None)
    node = Node.objects.get(pk=idle.node.node_id)
    record_hardware(node, NodeFacts("h", "127.0.0.1", "1", 7, "b", accelerators=()), now=clock.now())
    assert not node.accelerators.exists()


def promised() -> dict[str, int]:
    """GiB promised on each node, and it counts replicas there."""
    [deployment] = Deployment.objects.all()
    rooms = node_rooms(deployment.pk, now=clock.now())
    return {room.name: sum(a.reserved_bytes for a in room.accelerators) for room in rooms if room.replicas}


def test_members_are_placed_in_one_supernode_told_of_each_other_and_ready_as_one(fleet: GangFleet) -> None:
    fleet.deploy()
    replica = fleet.until("ready")
    head, other = fleet.of(replica)
    assert {head.node.labels["supernode"], other.node.labels["supernode"]} == {"s0"}
    assert replica.reason == ""
    assert (str(replica.node_id), replica.node_count) == (head.node.node_id, 2)
    assert [one.member.number for one in (head, other)] == [0, 1]
    assert {one.member.epoch for one in (head, other)} == {1}
    assert {len(one.launched) for one in (head, other)} == {1}
    assert other.member.head_address == replica.address == "127.0.0.1:41000"
    assert (head.member.head_address, head.member.rendezvous) == ("", "")
    assert other.member.rendezvous == "127.0.0.1:41001"
    assert head.member.hosts == ("127.0.0.1", "127.0.0.1")
    assert head.member.key == other.member.key != ""
    assert str(replica.pk) in routes()
    assert promised().keys() == {"n0", "n1"}, "memory is promised on both"
    assert [event.reason for event in Event.objects.filter(event="start_begun")] == [
        "start 1 of the whole, on 2 nodes"
    ]


def test_no_supernode_with_room_is_said_with_numbers(fleet: GangFleet) -> None:
    fleet.deploy(nodes_per_replica=4)
    replica = fleet.until("pending")
    fleet.round()
    replica.refresh_from_db()
    assert replica.reason == (
        "2 of 4 nodes free in supernode s0, which has no more; "
        "2 of 4 nodes free in supernode s1, which has no more"
    )


def test_death_of_a_member_ends_the_whole_and_starts_it_again_with_the_next_epoch(fleet: GangFleet) -> None:
    fleet.deploy()
    replica = fleet.until("ready")
    head, other = fleet.of(replica)
    other.die()
    replica = fleet.until("backing_off")
    assert replica.reason == (
        f"crash 1 of 6: start 1: node {other.node.name}, member 1 of 2: killed by signal 9 after 4.0 s"
    )
    assert str(replica.pk) not in routes()
    told = Event.objects.filter(event="exited", subject_id=str(replica.pk)).values_list("reason", flat=True)
    assert list(told) == [f"node {other.node.name}, member 1 of 2: attempt 1 killed by signal 9 after 4.0 s"]
    fleet.round()
    assert head.running == 0, "what is left of it stops before the next start"
    _pass_back_off(replica)
    replica = fleet.until("ready")
    assert (replica.gang_epoch, head.running, other.running) == (2, 2, 2)
    assert head.launched == other.launched == {1: 1, 2: 2}


def test_another_leader_goes_on_in_the_middle_of_a_restart(
    fleet: GangFleet, redis_client: redis.Redis
) -> None:
    fleet.deploy()
    replica = fleet.until("ready")
    fleet.of(replica)[1].die()
    replica = fleet.until("backing_off")
    with leading(redis_client) as another:
        fleet.leader = another
        for one in fleet.nodes:
            one.node.say_hello()
        fleet.round()
        _pass_back_off(replica)
        replica = fleet.until("ready")
        assert replica.gang_epoch == 2
        assert [one.running for one in fleet.of(replica)] == [2, 2]


def test_agent_that_was_put_back_to_one_without_members_is_given_no_part_until_it_is_updated(
    fleet: GangFleet,
) -> None:
    fleet.deploy()
    replica = fleet.until("ready")
    head, other = fleet.of(replica)
    node = Node.objects.filter(pk=other.node.node_id)
    node.update(protocol_minor=6)
    assert {one.wanted for one in wanted_of_node(node.get().pk)} == {"stop"}, "it would run it by itself"
    replica = fleet.until("backing_off")
    why = f"node {other.node.name}, member 1 of 2: its agent speaks 1.6, and parts need 1.7: update it"
    told = Event.objects.get(event="seen_backing_off", subject_id=str(replica.pk)).reason
    assert told == f"crash 1 of 6: start 1: {why}"
    fleet.rounds(2)
    _pass_back_off(replica)
    fleet.rounds(3)
    replica.refresh_from_db()
    assert (replica.gang_epoch, replica.reason) == (1, why), "no start is begun that cannot become ready"
    assert [one.running for one in (head, other)] == [0, 0]
    node.update(protocol_minor=7)
    replica = fleet.until("ready")
    assert (replica.gang_epoch, head.running, other.running) == (2, 2, 2)


def test_half_a_start_is_ended_when_its_time_is_up(fleet: GangFleet) -> None:
    fleet.deploy()
    fleet.nodes[1].is_stuck = fleet.nodes[0].is_stuck = True
    replica = fleet.until("loading")
    Replica.objects.filter(pk=replica.pk).update(gang_ready_by=clock.now() - timedelta(seconds=1))
    replica = fleet.until("backing_off")
    # From the event: the pause may be over by now, and then it says what the next start waits for.
    told = Event.objects.get(event="seen_backing_off", subject_id=str(replica.pk)).reason
    assert "not all ready after" in told
    assert "member 0 of 2: loading" in told
    fleet.round()
    assert [one.running for one in fleet.of(replica)] == [0, 0]


def test_death_of_a_members_node_moves_the_whole_and_frees_what_it_held(fleet: GangFleet) -> None:
    fleet.deploy()
    lost = fleet.until("ready")
    head, other = fleet.of(lost)
    fleet.leader.lose(other.node.node_id)
    fleet.rounds(3, other.node.name)
    lost.refresh_from_db()
    assert lost.status == "stopping"
    assert f"{other.node.name} is gone, and with it a part of the whole" in lost.reason
    assert head.running == 0
    assert promised().keys() == {other.node.name, "n2", "n3"}
    [new] = Replica.objects.exclude(pk=lost.pk)
    fleet.rounds(3, other.node.name)
    new.refresh_from_db()
    assert new.status == "ready"
    assert {one.node.labels["supernode"] for one in fleet.of(new)} == {"s1"}
    retire_lost_node(
        Node.objects.get(name=other.node.name).pk, reason="broken", actor="user:x", now=clock.now()
    )
    part = lost.members.get(node=other.node.node_id)
    assert part.reason == f"node {part.node.name} of it was retired: broken"
    assert part.node.name.startswith(f"{other.node.name} (retired ")
    fleet.round(other.node.name)
    lost.refresh_from_db()
    assert lost.status == "stopped"


def test_node_that_is_emptied_is_left_by_the_whole_once_its_successor_answers(fleet: GangFleet) -> None:
    fleet.deploy()
    old = fleet.until("ready")
    _, other = fleet.of(old)
    drain_node(
        Node.objects.get(name=other.node.name).pk, reason="update", actor="user:x", now=clock.now(),
        deadline_at=clock.now() + timedelta(hours=1),
    )  # fmt: skip
    fleet.rounds(6)
    old.refresh_from_db()
    assert old.status in {"draining", "stopping", "stopped"}
    new = Replica.objects.exclude(pk=old.pk).get()
    assert new.status == "ready"
    fleet.rounds(4)
    old.refresh_from_db()
    assert old.status == "stopped"
    assert set(old.members.filter(ended_at=None)) == set()
    assert all(one.forgotten for one in fleet.of(old))
    assert promised().keys() == {"n2", "n3"}


def test_node_whose_time_to_empty_is_up_is_left_in_order_the_head_first(fleet: GangFleet) -> None:
    fleet.deploy()
    replica = fleet.until("ready")
    head, other = fleet.of(replica)
    Node.objects.exclude(name=other.node.name).update(cordoned=True)
    node = Node.objects.get(name=other.node.name)
    drain_node(node.pk, reason="update", actor="user:x", now=clock.now(), deadline_at=clock.now())
    drains = DrainWatch(fleet.leader.queue)
    for _ in range(8):
        drains.step()
        fleet.leader.work()
        head.take_in()
        if head.spec and head.spec.wanted is WantedState.DRAIN and head.spec.drain_seconds == 0:
            break
    else:
        pytest.fail(f"the head was never told to end now: {head.spec}")
    other.take_in()
    assert other.running == 1, "the others run until the head has ended"
    other.report()
    drains.step()
    node.refresh_from_db()
    assert node.drain_status == "draining"
    told = Event.objects.filter(event="drain_ended", subject_id=str(replica.pk))
    assert [event.reason for event in told] == [f"the time to empty {node.name} is up"]
    fleet.rounds(3)
    replica.refresh_from_db()
    drains.step()
    node.refresh_from_db()
    assert (replica.status, other.running, node.drain_status) == ("stopped", 0, "drained")
    assert replica.reason == f"the time to empty {node.name} is up"
    assert told.count() == 1


def test_scaling_and_deleting_end_all_members(fleet: GangFleet) -> None:
    deployment = fleet.deploy(replicas=2)
    fleet.rounds(6)
    assert list(Replica.objects.values_list("status", flat=True)) == ["ready", "ready"]
    assert set(promised().values()) == {promised()["n0"]}
    scale_deployment(deployment.pk, replicas=1, actor="user:x", now=clock.now())
    fleet.rounds(6)
    assert sorted(Replica.objects.values_list("status", flat=True)) == ["ready", "stopped"]
    delete_deployment(deployment.pk, actor="user:x", now=clock.now())
    fleet.rounds(8)
    deployment.refresh_from_db()
    assert deployment.status == "deleted"
    assert not any(one.running for one in fleet.nodes)
    assert not ReplicaMember.objects.filter(ended_at=None).exists()


@pytest.mark.parametrize(("exit_code", "head_state"), [(0, "ready"), (1, "stopping")])
def test_a_part_that_ends_with_its_head_is_no_crash_of_what_is_let_go(
    fleet: GangFleet, exit_code: int, head_state: str
) -> None:
    replica, other = _let_go(fleet)
    replica.members.filter(number=0).update(state=head_state, generation=replica.generation)
    other.die(exit_code)
    fleet.round(fleet.of(replica)[0].node.name)
    replica.refresh_from_db()
    part = replica.members.get(number=1)
    assert (replica.status, part.state) == ("stopping", "stopped")
    assert part.reason == "ended with the whole, as it was told"
    assert replica.reason.startswith("0 replicas are wanted")
    assert replica.reason.endswith(f"; node {part.node.name}, member 1 of 2: {part.reason}")
    fleet.rounds(3)
    replica.refresh_from_db()
    assert replica.status == "stopped"


@pytest.mark.parametrize(
    ("exit_code", "words"), [(None, "killed by signal 9 after 4.0 s"), (1, "exited with code 1 after 4.0 s")]
)
def test_a_part_that_crashes_while_the_whole_is_let_go_is_named(
    fleet: GangFleet, exit_code: int | None, words: str
) -> None:
    replica, other = _let_go(fleet)
    other.die(exit_code)
    fleet.round(fleet.of(replica)[0].node.name)
    replica.refresh_from_db()
    assert replica.members.get(number=1).state == "failed"
    assert replica.reason.startswith("0 replicas are wanted")
    assert replica.reason.endswith(f"; node {other.node.name}, member 1 of 2: {words}")


def _let_go(fleet: GangFleet) -> tuple[Replica, GangNode]:
    """A replica that drains, and the node of its second member."""
    deployment = fleet.deploy()
    replica = fleet.until("ready")
    scale_deployment(deployment.pk, replicas=0, actor="user:x", now=clock.now())
    fleet.leader.work()
    replica.refresh_from_db()
    assert replica.status == "draining"
    return replica, fleet.of(replica)[1]


def test_given_up_it_is_started_again_by_a_person_with_a_new_epoch(fleet: GangFleet) -> None:
    fleet.deploy()
    replica = fleet.until("ready")
    Node.objects.update(cordoned=True)  # or healing would make another one
    Replica.objects.filter(pk=replica.pk).update(gang_crashes=5)
    fleet.of(replica)[0].die()
    replica = fleet.until("failed")
    assert replica.reason.startswith("ended 6 times in a row, given up: start 1: node n0, member 0 of 2: ")
    fleet.round()
    assert not any(one.running for one in fleet.nodes)
    restart_replica(replica.pk, why="fixed", actor="user:x", now=clock.now())
    replica = fleet.until("ready")
    assert (replica.gang_epoch, replica.gang_crashes) == (2, 0)


def _pass_back_off(replica: Replica) -> None:
    assert replica.gang_retry_at is not None
    Replica.objects.filter(pk=replica.pk).update(gang_retry_at=clock.now())


def test_promises_of_a_member_are_of_one_node(fleet: GangFleet) -> None:
    fleet.deploy()
    fleet.until("ready")
    rooms = promised()
    assert rooms["n0"] == rooms["n1"] >= GIB


def test_a_look_that_changes_nothing_has_nobody_told_and_no_routes_written(fleet: GangFleet) -> None:
    """It may load, or wait, for hours, and is looked at each second."""
    fleet.deploy()
    fleet.nodes[1].is_stuck = fleet.nodes[0].is_stuck = True
    loading = fleet.until("loading")
    assert _queued_by_a_look(fleet, loading) == 0
    fleet.of(loading)[1].die()
    replica = fleet.until("backing_off")
    assert _queued_by_a_look(fleet, replica) == 0
    _pass_back_off(replica)
    assert _queued_by_a_look(fleet, replica) == 0, "the reason is new, and nobody is told reasons"
    replica.refresh_from_db()
    assert "start 1 must be gone first" in replica.reason
    assert _queued_by_a_look(fleet, replica) == 0
    ReplicaMember.objects.filter(replica=replica).update(state="stopped", generation=replica.generation)
    assert _queued_by_a_look(fleet, replica) >= 2, "a start has begun, and both are told"


def test_nodes_are_told_at_once_where_the_head_is_and_that_a_part_is_over(fleet: GangFleet) -> None:
    fleet.deploy()
    replica = fleet.until("ready")
    head = replica.members.get(number=0)
    same = ObservedReplica(
        str(replica.pk), replica.generation, "ready", 1,
        pid=4242, address=head.address, epoch=1, rendezvous=head.rendezvous,
    )  # fmt: skip
    look, tell = ("gang", str(replica.pk)), ("gang_wish", str(replica.pk))
    assert _hints_of(same, head) & {look, tell} == {look}
    assert _hints_of(same._replace(rendezvous="127.0.0.1:41999"), head) & {look, tell} == {tell}
    scale_deployment(replica.deployment_id, replicas=0, actor="user:x", now=clock.now())
    fleet.leader.work()
    replica.refresh_from_db()
    Replica.objects.filter(pk=replica.pk).update(handed_over_at=clock.now())
    gone = same._replace(generation=replica.generation, state="stopped", rendezvous="127.0.0.1:41999")
    assert tell in _hints_of(gone, head)
    assert replica.members.get(number=0).ended_at is not None
    before = len(fleet.leader.queue)
    fleet.leader.reconcilers.ring(*tell)
    fleet.leader.reconcilers.reconcile(*tell)
    assert len(fleet.leader.queue) - before >= 1 + 2, "the hint itself, and both nodes"


def _queued_by_a_look(fleet: GangFleet, replica: Replica) -> int:
    """How many keys a look at it adds to those that wait."""
    before = len(fleet.leader.queue)
    fleet.leader.reconcilers.reconcile("gang", str(replica.pk))
    return len(fleet.leader.queue) - before


def _hints_of(seen: ObservedReplica, member: ReplicaMember) -> set[tuple[str, str]]:
    """What is rung for as this is written down."""
    rung: set[tuple[str, str]] = set()

    def listen(execute: Callable[..., object], sql: str, params: Any, many: bool, context: object) -> object:
        if "pg_notify" in sql:
            rung.update(tuple(hint.split(":", 1)) for hint in params[1])
        return execute(sql, params, many, context)

    with connection.execute_wrapper(listen):
        record_observations([seen], node_id=member.node_id, actor="agent", now=clock.now())
    return rung
