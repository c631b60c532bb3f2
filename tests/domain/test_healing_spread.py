"""Losing any one failure domain costs a deployment at most its fair share plus one."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from exaserve_ops.serving.domain.accelerator_wish import SLICE, AcceleratorWish
from exaserve_ops.serving.domain.placement import (
    AcceleratorRoom,
    NodeRoom,
    Placement,
    PlacementRequest,
    choose_placement,
)
from exaserve_ops.serving.domain.spread import view_spread
from tests.fakes.healing_world import Box, HealingWorld

ROOMY = 10_000
REQUEST = PlacementRequest("torch", 1)


def room(index: int, rack: str, *, serving: int = 0, standbys: int = 0, refusal: str = "") -> NodeRoom:
    device = AcceleratorRoom(f"a{index}", "cuda", ROOMY, 0)
    return NodeRoom(
        f"id{index}",
        f"n{index}",
        not refusal,
        refusal,
        frozenset({"torch"}),
        rack,
        (device,),
        serving,
        serving + standbys,
        same_standby=standbys,
    )


@st.composite
def topologies(draw: st.DrawFn) -> tuple[NodeRoom, ...]:
    """Racks of very different sizes, and some nodes of which no rack is known."""
    sizes = draw(st.lists(st.integers(1, 8), min_size=0, max_size=6))
    racks = [f"r{number}" for number, size in enumerate(sizes) for _ in range(size)]
    racks += [""] * draw(st.integers(0 if racks else 1, 4))
    return tuple(room(index, rack) for index, rack in enumerate(racks))


def fill(nodes: tuple[NodeRoom, ...], count: int, request: PlacementRequest) -> tuple[NodeRoom, ...]:
    by_id = {node.node_id: node for node in nodes}
    for _ in range(count):
        choice = choose_placement(request, tuple(by_id.values()))
        assert isinstance(choice, Placement)
        by_id[choice.node_id] = by_id[choice.node_id].reserve(choice.accelerator_uuids, request)
    return tuple(by_id.values())


@given(topologies(), st.integers(0, 60))
def test_losing_any_domain_costs_at_most_its_fair_share_plus_one(
    nodes: tuple[NodeRoom, ...], count: int
) -> None:
    view = view_spread(fill(nodes, count, REQUEST), REQUEST)
    for loss in view.losses:
        assert loss.serving <= math.ceil(loss.fair_share) + 1, loss
        if loss.kind == "rack":
            assert loss.serving < loss.fair_share + 1, loss
    assert view.advice == ()
    assert sum(loss.serving for loss in view.losses if loss.kind == "node") == count


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(0, 12), min_size=1, max_size=5))
def test_growing_keeps_the_spread_whatever_came_before(racks: int, course: list[int]) -> None:
    boxes = [Box(f"n{i}", f"r{i % racks}", 30) for i in range(2 * racks)]
    world = HealingWorld(0, boxes=boxes)
    for wanted in sorted(course):
        world.wanted = wanted
        world.settle(60)
    for loss in view_spread(world.snapshot().nodes, REQUEST).losses:
        assert loss.serving <= math.ceil(loss.fair_share) + 1


def test_replacements_keep_the_spread_of_those_that_are_left() -> None:
    world = HealingWorld(9, boxes=[Box(f"n{i}", f"r{i % 3}", 9) for i in range(9)])
    world.settle(60)
    for name in ("n0", "n3", "n6"):  # the whole rack r0
        world.kill(name)
    world.run(30)
    losses = {loss.name: loss.serving for loss in view_spread(world.snapshot().nodes, REQUEST).losses}
    assert sorted((losses["r1"], losses["r2"])) == [4, 5]


def test_losses_are_named_greatest_first_with_their_share() -> None:
    rooms = [room(0, "r0", serving=3), room(1, "r1", serving=1, standbys=1), room(2, "r1")]
    view = view_spread(rooms, REQUEST)
    assert [(loss.kind, loss.name, loss.serving, loss.standbys) for loss in view.losses] == [
        ("rack", "r0", 3, 0),
        ("node", "n0", 3, 0),
        ("rack", "r1", 1, 1),
        ("node", "n1", 1, 1),
    ]
    assert view.worst_ratio == 0.75


def test_skewed_spread_gets_advice_that_names_the_domain_and_where_to() -> None:
    rooms = [room(0, "r0", serving=6), room(1, "r1"), room(2, "r2", refusal="cordoned")]
    view = view_spread(rooms, REQUEST)
    assert view.losses[0].is_crowded
    assert any("rack r0 holds 6 serving replicas" in line and "rack r1" in line for line in view.advice)
    assert not any("rack r2" in line for line in view.advice)


def test_no_replica_means_no_loss_and_no_advice() -> None:
    view = view_spread([room(0, "r0")], REQUEST)
    assert (view.losses, view.advice, view.worst_ratio) == ((), (), 0.0)


# -- who could run it at all ----------------------------------------------------------------------------
def small(node: NodeRoom, memory_bytes: int) -> NodeRoom:
    return replace(node, accelerators=tuple(replace(a, memory_bytes=memory_bytes) for a in node.accelerators))


def full(node: NodeRoom) -> NodeRoom:
    return replace(node, accelerators=tuple(replace(a, reserved_bytes=ROOMY) for a in node.accelerators))


def test_fair_shares_are_of_the_nodes_that_can_run_it_and_the_others_are_told_why() -> None:
    request = PlacementRequest("vllm", 100)
    able = [replace(room(index, "r0"), engines=frozenset({"vllm"})) for index in range(2)]
    able[1] = full(able[1])
    others = [
        room(2, "r1"),
        room(3, "r1"),
        replace(room(4, "r1", refusal="cordoned: kernel"), engines=frozenset({"vllm"})),
        small(replace(room(5, "r2"), engines=frozenset({"vllm"})), 50),
    ]
    nodes = [replace(able[0], same_deployment=4), able[1], *others]
    view = view_spread(nodes, request)
    assert {(loss.name, loss.fair_share) for loss in view.losses} == {("r0", 4.0), ("n0", 2.0)}
    assert (view.able_nodes, view.nodes) == (2, 6)
    assert view.unable == (
        ("its agent has no engine 'vllm'", 2),
        ("cordoned: kernel", 1),
        ("needs 0 MiB an accelerator, at most 0 MiB is free", 1),
    )


def test_nodes_that_were_not_named_and_those_without_slices_count_for_nothing() -> None:
    nodes = [room(0, "r0"), room(1, "r1"), room(2, "r2")]
    named = view_spread(nodes, replace(REQUEST, nodes=("n0", "n1")))
    assert (named.able_nodes, named.unable) == (2, (("not among the deployment's nodes", 1),))
    sliced = view_spread(nodes, replace(REQUEST, wish=AcceleratorWish(SLICE)))
    assert (sliced.able_nodes, sliced.unable) == (0, (("has no slice", 3),))


def test_parts_of_a_replica_count_nodes_of_supernodes_that_can_hold_all_of_it() -> None:
    request = PlacementRequest("torch", 1, nodes_per_replica=2)
    nodes = [replace(room(index, ""), supernode=name) for index, name in enumerate(("s1", "s1", "s2", ""))]
    nodes.append(replace(room(4, ""), supernode="s1", members_problem="its agent is old"))
    assert view_spread(nodes, request).unable == (
        ("1 of 2 nodes that could run a part are in supernode s2", 1),
        ("it is in no supernode", 1),
        ("its agent is old", 1),
    )


@given(topologies(), st.integers(1, 40), st.data())
def test_nodes_that_could_never_run_it_draw_no_share_of_the_others(
    nodes: tuple[NodeRoom, ...], count: int, data: st.DataObject
) -> None:
    """However many there are, and wherever: the others are filled as if these were not there."""
    request = PlacementRequest("torch", 10)
    useless = data.draw(st.lists(st.booleans(), min_size=len(nodes), max_size=len(nodes)))
    able = tuple(node for node, is_useless in zip(nodes, useless, strict=True) if not is_useless)
    if not able:
        return
    mixed = tuple(small(n, 5) if is_useless else n for n, is_useless in zip(nodes, useless, strict=True))
    with_them = {n.node_id: n.same_deployment for n in fill(mixed, count, request) if n.same_deployment}
    without = {n.node_id: n.same_deployment for n in fill(able, count, request) if n.same_deployment}
    assert with_them == without
