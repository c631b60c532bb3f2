"""Losing any one failure domain costs a deployment at most its fair share plus one."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

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
    view = view_spread(fill(nodes, count, PlacementRequest("torch", 1)))
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
    for loss in view_spread(world.snapshot().nodes).losses:
        assert loss.serving <= math.ceil(loss.fair_share) + 1


def test_replacements_keep_the_spread_of_those_that_are_left() -> None:
    world = HealingWorld(9, boxes=[Box(f"n{i}", f"r{i % 3}", 9) for i in range(9)])
    world.settle(60)
    for name in ("n0", "n3", "n6"):  # the whole rack r0
        world.kill(name)
    world.run(30)
    losses = {loss.name: loss.serving for loss in view_spread(world.snapshot().nodes).losses}
    assert sorted((losses["r1"], losses["r2"])) == [4, 5]


def test_losses_are_named_greatest_first_with_their_share() -> None:
    view = view_spread([room(0, "r0", serving=3), room(1, "r1", serving=1, standbys=1), room(2, "r1")])
    assert [(loss.kind, loss.name, loss.serving, loss.standbys) for loss in view.losses] == [
        ("rack", "r0", 3, 0),
        ("node", "n0", 3, 0),
        ("rack", "r1", 1, 1),
        ("node", "n1", 1, 1),
    ]
    assert view.worst_ratio == 0.75


def test_skewed_spread_gets_advice_that_names_the_domain_and_where_to() -> None:
    view = view_spread([room(0, "r0", serving=6), room(1, "r1"), room(2, "r2", refusal="cordoned")])
    assert view.losses[0].is_crowded
    assert any("rack r0 holds 6 serving replicas" in line and "rack r1" in line for line in view.advice)
    assert not any("rack r2" in line for line in view.advice)


def test_no_replica_means_no_loss_and_no_advice() -> None:
    view = view_spread([room(0, "r0")])
    assert (view.losses, view.advice, view.worst_ratio) == ((), (), 0.0)
