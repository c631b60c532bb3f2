"""Nodes that want the same weights are told who gives what to whom, and told anew when one is lost."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest
import redis

from exaserve_ops.adapters.model_folder import ModelFolder
from exaserve_ops.adapters.swarm_board import KEY, RedisSwarmBoard
from exaserve_ops.controllers.swarm_record import SwarmRecorder
from exaserve_ops.controllers.swarms import LINK_LABEL, SwarmDirector
from exaserve_ops.inventory.domain.liveness import DEAD
from exaserve_ops.inventory.models import Node
from exaserve_ops.serving.models import Model
from exaserve_ops.serving.services.models import register_model
from exaserve_ops.serving.services.weights import change_storage, want_weights
from tests.fakes.fleet import NOW, ScriptedNode
from tests.fakes.leader import Leader
from workers.engines.demo_model import make_demo_model
from workers.protocol import v1
from workers.protocol.weights import (
    SwarmComplaint,
    SwarmOrder,
    SwarmPull,
    SwarmSeen,
    WeightsFrom,
    WeightsHeld,
    WeightsReport,
    WeightsState,
)

pytestmark = pytest.mark.django_db


@pytest.fixture
def model(tmp_path: Path) -> Model:
    make_demo_model(tmp_path / "demo", seed=0)
    facts = ModelFolder().read(str(tmp_path / "demo"))
    model = register_model(name="demo", facts=facts, actor="test", now=NOW)
    return change_storage(model.pk, storage="node", actor="test", now=NOW)


class Nodes:
    """Scripted nodes that want one model, and the orders that they were told last."""

    def __init__(self, client: redis.Redis, leader: Leader, model: Model, count: int) -> None:
        self.leader = leader
        self.model = model
        self.nodes = [ScriptedNode(client, name=f"node-{n}") for n in range(count)]
        self.told: dict[str, SwarmOrder | None] = {}
        self.held: dict[str, WeightsHeld] = {}
        for node in self.nodes:
            node.enrol()
            node.say_hello()
        leader.work()
        for node in self.nodes:
            node.commands()
        ids = [UUID(node.node_id) for node in self.nodes]
        want_weights(model.pk, ids, owner="person", actor="test", now=NOW, reason="")

    def look(self, *, port: int = 7000, able: bool = True) -> dict[str, SwarmOrder | None]:
        """Report, let the leader look, and take in what it says. Returns all newest orders."""
        for number, node in enumerate(self.nodes):
            held = self.held.get(node.node_id)
            report = WeightsReport(
                disk_total_bytes=1000,
                held=(held,) if held else (),
                in_swarms=able,
                piece_port=port and port + number,
            )
            node.beat(weights=report)
        self.leader.work()
        self.leader.weights.step()
        for node in self.nodes:
            for command in node.commands():
                if isinstance(command, v1.ApplyWeights):
                    self.told[node.node_id] = command.weights[0].swarm
        return self.told

    def has(
        self,
        node: ScriptedNode,
        state: WeightsState,
        swarm: SwarmSeen | None = None,
        *,
        from_origin: int = 0,
        from_peers: int = 0,
    ) -> None:
        total = 1000
        have = total if state is WeightsState.READY else total // 2
        self.held[node.node_id] = WeightsHeld(
            revision=self.model.digest,
            state=state,
            total_bytes=total,
            have_bytes=have,
            swarm=swarm,
            sources=(
                WeightsFrom(kind="http", name="origin", bytes=from_origin),
                WeightsFrom(kind="peer", name="other", bytes=from_peers),
            ),
        )


@pytest.fixture
def nodes(redis_client: redis.Redis, leader: Leader, model: Model) -> Nodes:
    return Nodes(redis_client, leader, model, 4)


def parents(told: dict[str, SwarmOrder | None]) -> dict[str, list[str]]:
    """The planned parent of each stripe, by child."""
    return {child: [s[0].node_id for s in order.stripes] for child, order in told.items() if order}


def test_each_stripe_leaves_the_origin_once_and_all_are_fed_with_one_key(nodes: Nodes) -> None:
    told = nodes.look()
    given = parents(told)
    assert sorted(map(len, given.values())) == [2, 2, 2, 2]
    assert sum(parent == "origin" for each in given.values() for parent in each) == 2
    orders = [order for order in told.values() if order]
    assert len({(order.epoch, order.key) for order in orders}) == 1
    assert len(bytes.fromhex(orders[0].key)) == 32
    ports = {node.node_id: 7000 + n for n, node in enumerate(nodes.nodes)}
    for order in orders:
        for parent in (p for stripe in order.stripes for p in stripe if p.node_id != "origin"):
            assert (parent.host, parent.port) == ("127.0.0.1", ports[parent.node_id])


def test_one_node_alone_and_agents_that_give_nothing_fetch_by_themselves(
    redis_client: redis.Redis, leader: Leader, model: Model
) -> None:
    alone = Nodes(redis_client, leader, model, 1)
    assert set(alone.look().values()) == {None}


def test_nodes_are_planned_with_once_they_said_where_they_give_pieces(nodes: Nodes) -> None:
    told = nodes.look(port=0)
    assert all(order is not None and order.stripes == () for order in told.values())
    assert all(order is not None and len(order.stripes) == 2 for order in nodes.look().values())


def test_agents_that_give_nothing_are_in_no_swarm(nodes: Nodes) -> None:
    assert set(nodes.look(able=False).values()) == {None}


def test_nothing_is_said_again_while_the_plan_holds(nodes: Nodes) -> None:
    before = dict(nodes.look())
    for node in nodes.nodes:
        nodes.has(node, WeightsState.FETCHING)
    nodes.told.clear()
    nodes.look()
    assert all(before[child] == order for child, order in nodes.told.items())
    assert set(nodes.told) == set()


def test_children_of_a_node_that_is_dead_get_other_parents(nodes: Nodes) -> None:
    given = parents(nodes.look())
    dead = next(parent for each in given.values() for parent in each if parent != "origin")
    orphans = [child for child, each in given.items() if dead in each]
    nodes.nodes = [node for node in nodes.nodes if node.node_id != dead]
    nodes.leader.state.node(dead).liveness = DEAD
    after = parents(nodes.look())
    assert all(dead not in after[orphan] for orphan in orphans)


def test_the_label_of_a_nodes_link_decides_how_much_it_is_to_give(nodes: Nodes) -> None:
    slow = nodes.nodes[0]
    Node.objects.filter(pk=slow.node_id).update(labels={LINK_LABEL: "1"})
    given = parents(nodes.look())
    assert slow.node_id not in {parent for each in given.values() for parent in each}


def test_whoever_sent_damaged_pieces_is_pulled_from_no_more(nodes: Nodes) -> None:
    given = parents(nodes.look())
    child, parent = next((c, p) for c, each in given.items() for p in each if p != "origin")
    node = next(node for node in nodes.nodes if node.node_id == child)
    seen = SwarmSeen(complaints=(SwarmComplaint(parent=parent, bad_pieces=2),))
    nodes.has(node, WeightsState.FETCHING, seen)
    after = nodes.look()
    named = {p.node_id for order in after.values() if order for stripe in order.stripes for p in stripe}
    assert parent not in named


def test_whole_nodes_give_and_are_told_no_parents_and_the_swarm_ends_with_the_last(nodes: Nodes) -> None:
    nodes.look()
    first, *rest = nodes.nodes
    nodes.has(first, WeightsState.READY)
    order = nodes.look()[first.node_id]
    assert order is not None
    assert order.stripes == ()
    for node in rest:
        nodes.has(node, WeightsState.READY)
    assert set(nodes.look().values()) == {None}


def test_a_new_leader_goes_on_from_what_nodes_report(nodes: Nodes) -> None:
    given = parents(nodes.look())
    for node in nodes.nodes:
        pulls = tuple(
            SwarmPull(stripe=stripe, parent=parent, stage="flowing", bytes_per_second=1e6)
            for stripe, parent in enumerate(given[node.node_id])
        )
        nodes.has(node, WeightsState.FETCHING, SwarmSeen(pulls=pulls))
    nodes.leader.weights._swarms = director = SwarmDirector()
    nodes.look()
    (plan,) = director.plans.values()
    assert {(f.child, f.stripe): f.parent for f in plan.feeds} == {
        (child, stripe): parent for child, each in given.items() for stripe, parent in enumerate(each)
    }


def test_people_are_told_the_plan_and_what_left_the_origin_and_a_new_leader_counts_on(
    nodes: Nodes, redis_client: redis.Redis
) -> None:
    nodes.look()
    board = RedisSwarmBoard(redis_client)
    noted = board.read()[nodes.model.digest]
    assert {(feed.child, feed.stripe) for feed in noted.feeds} == {
        (node.node_id, stripe) for node in nodes.nodes for stripe in (0, 1)
    }
    assert all(feed.why for feed in noted.feeds)
    first, *rest = nodes.nodes
    nodes.has(first, WeightsState.FETCHING, from_origin=300)
    nodes.leader.weights._swarm_record = SwarmRecorder(board)
    nodes.look()
    nodes.has(first, WeightsState.READY, from_origin=900, from_peers=100)
    for node in rest:
        nodes.has(node, WeightsState.READY, from_peers=1000)
    # Another leader, and with it the end: it counts on from what was noted.
    nodes.leader.weights._swarm_record = SwarmRecorder(board)
    nodes.look()
    noted = board.read()[nodes.model.digest]
    assert noted.ended_at_seconds is not None
    assert (noted.origin_bytes, noted.peer_bytes) == (900, 3100)
    assert noted.points[-1].whole_nodes == 4
    assert noted.feeds == ()


def test_notes_that_cannot_be_read_cost_no_page_and_no_plan(nodes: Nodes, redis_client: redis.Redis) -> None:
    redis_client.hset(KEY, mapping={nodes.model.digest: b"{", "sha256:other": b'{"x": 1}'})
    assert all(order is not None for order in nodes.look().values())
    assert set(RedisSwarmBoard(redis_client).read()) == {nodes.model.digest}
