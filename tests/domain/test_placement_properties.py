"""Placement never promises what is not there, explains itself, and spreads."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from exaserve_ops.serving.domain.placement import (
    AcceleratorRoom,
    NodeRoom,
    Placement,
    PlacementBoard,
    PlacementRequest,
    Refusal,
    choose_placement,
    reserve,
)


@st.composite
def rooms(draw: st.DrawFn, index: int) -> NodeRoom:
    count = draw(st.integers(0, 4))
    accelerators = tuple(
        AcceleratorRoom(f"n{index}-a{i}", "cuda", draw(st.integers(0, 100)), draw(st.integers(0, 100)))
        for i in range(count)
    )
    accepts = draw(st.booleans())
    return NodeRoom(
        node_id=f"id-{index}",
        name=f"n{index}",
        accepts=accepts,
        refusal="" if accepts else "cordoned",
        engines=frozenset(draw(st.sets(st.sampled_from(["torch", "simulated"])))),
        rack=draw(st.sampled_from(["", "r1", "r2"])),
        accelerators=accelerators,
        same_deployment=draw(st.integers(0, 3)),
        replicas=3,
    )


@st.composite
def fleets(draw: st.DrawFn) -> tuple[NodeRoom, ...]:
    return tuple(draw(rooms(index)) for index in range(draw(st.integers(0, 6))))


requests = st.builds(
    PlacementRequest,
    engine=st.sampled_from(["torch", "simulated"]),
    memory_bytes=st.integers(0, 120),
    accelerators=st.integers(1, 3),
    nodes=st.sampled_from([(), ("n0",), ("n1", "n2")]),
    stored_on=st.sampled_from([None, frozenset(), frozenset({"id-0", "id-3"})]),
)


@given(requests, fleets())
def test_choice_fits_a_node_that_accepts(request: PlacementRequest, fleet: tuple[NodeRoom, ...]) -> None:
    choice = choose_placement(request, fleet)
    if isinstance(choice, Refusal):
        return
    [node] = [n for n in fleet if n.node_id == choice.node_id]
    assert node.accepts
    assert request.engine in node.engines
    assert not request.nodes or node.name in request.nodes
    chosen = [a for a in node.accelerators if a.uuid in choice.accelerator_uuids]
    assert len(chosen) == request.accelerators == len(set(choice.accelerator_uuids))
    assert all(a.free_bytes >= request.bytes_each for a in chosen)
    assert request.bytes_each * request.accelerators >= request.memory_bytes
    assert choice.why


@given(requests, fleets())
def test_refusal_has_a_reason_for_each_node(request: PlacementRequest, fleet: tuple[NodeRoom, ...]) -> None:
    choice = choose_placement(request, fleet)
    if isinstance(choice, Refusal):
        assert sorted(name for name, _ in choice.reasons) == sorted(n.name for n in fleet)
        assert all(reason for _, reason in choice.reasons)
        assert choice.summary()


@given(requests, fleets(), st.randoms(use_true_random=False))
def test_choice_does_not_depend_on_the_order_of_the_nodes(
    request: PlacementRequest,
    fleet: tuple[NodeRoom, ...],
    random: object,
) -> None:
    shuffled = list(fleet)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # Hypothesis's Random
    assert choose_placement(request, shuffled) == choose_placement(request, fleet)


@given(st.integers(1, 6), st.integers(0, 40), st.integers(1, 3))
def test_replicas_of_one_deployment_spread_evenly(nodes: int, replicas: int, racks: int) -> None:
    node_accepts = True
    fleet = {
        f"id-{i}": NodeRoom(
            f"id-{i}",
            f"n{i}",
            node_accepts,
            "",
            frozenset({"torch"}),
            f"r{i % racks}",
            (AcceleratorRoom(f"a{i}", "cuda", 10_000, 0),),
            0,
            0,
        )
        for i in range(nodes)
    }
    request = PlacementRequest("torch", 10)
    for _ in range(replicas):
        choice = choose_placement(request, tuple(fleet.values()))
        assert isinstance(choice, Placement)
        fleet[choice.node_id] = fleet[choice.node_id].reserve(choice.accelerator_uuids, request)
    counts = [node.same_deployment for node in fleet.values()]
    assert max(counts) - min(counts) <= 1
    assert sum(counts) == replicas


@given(requests, fleets())
def test_filling_the_fleet_never_promises_memory_twice(
    request: PlacementRequest, fleet: tuple[NodeRoom, ...]
) -> None:
    request = replace(request, memory_bytes=max(1, request.memory_bytes))
    rooms_by_id = {node.node_id: node for node in fleet}
    for _ in range(1000):
        choice = choose_placement(request, tuple(rooms_by_id.values()))
        if isinstance(choice, Refusal):
            break
        node = rooms_by_id[choice.node_id]
        before = {a.uuid: a.reserved_bytes for a in node.accelerators}
        rooms_by_id[choice.node_id] = node.reserve(choice.accelerator_uuids, request)
        for a in rooms_by_id[choice.node_id].accelerators:
            assert a.reserved_bytes == before[a.uuid] or a.reserved_bytes <= a.memory_bytes
    else:
        raise AssertionError("the fleet never fills")


def test_long_refusals_are_cut_short_for_people() -> None:
    refusal = Refusal(tuple((f"n{i}", "dead") for i in range(6)))
    assert refusal.summary() == "no node of many will do, mostly: dead"
    assert Refusal(()).summary() == "no nodes have joined"


@given(
    requests,
    fleets(),
    st.lists(st.booleans(), max_size=30),
    st.sets(st.sampled_from(["id-0", "id-1", "id-2"])),
)
def test_many_at_once_are_placed_as_one_after_the_other(
    request: PlacementRequest, fleet: tuple[NodeRoom, ...], standbys: list[bool], shun: set[str]
) -> None:
    request = replace(request, shun=frozenset(shun))
    board, rooms = PlacementBoard(request, fleet), {node.node_id: node for node in fleet}
    for standby in standbys:
        expected = choose_placement(replace(request, standby=standby), tuple(rooms.values()))
        assert board.place(standby=standby) == expected
        if isinstance(expected, Placement):
            room = rooms[expected.node_id]
            rooms[expected.node_id] = reserve(replace(request, standby=standby), expected, room)


@given(
    st.lists(requests, min_size=1, max_size=3),
    fleets(),
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
)
def test_many_of_several_kinds_are_placed_as_one_after_the_other(
    kinds: list[PlacementRequest], fleet: tuple[NodeRoom, ...], turns: list[int]
) -> None:
    board, rooms = PlacementBoard(kinds[0], fleet), {node.node_id: node for node in fleet}
    for turn in turns:
        request = kinds[turn % len(kinds)]
        expected = choose_placement(request, tuple(rooms.values()))
        chosen = board.place_as(request)
        if isinstance(expected, Placement):
            assert chosen == expected
            rooms[expected.node_id] = reserve(request, expected, rooms[expected.node_id])
        else:
            # Of how much is free it may say what was so when it was refused first.
            assert isinstance(chosen, Refusal)
            assert {name for name, _ in chosen.reasons} == {name for name, _ in expected.reasons}


def test_of_nodes_that_are_as_good_the_one_that_has_the_weights_is_taken() -> None:
    def node(name: str, rack: str, free: int, here: int = 0) -> NodeRoom:
        card = AcceleratorRoom(f"{name}-a", "cuda", 1000, 1000 - free)
        return NodeRoom(
            name,
            name,
            accepts=True,
            refusal="",
            engines=frozenset({"torch"}),
            rack=rack,
            accelerators=(card,),
            same_deployment=here,
            replicas=here,
        )

    request = PlacementRequest("torch", 10, stored_on=frozenset({"b", "d"}))
    fleet = (node("a", "r1", 900), node("b", "r1", 200))
    choice = choose_placement(request, fleet)
    assert isinstance(choice, Placement)
    assert choice.node_id == "b"
    assert "its weights are on that node's disk" in choice.why
    # Spreading counts for more than a fetch: it is over in minutes, and a lost rack is not.
    spread = choose_placement(request, (*fleet, node("c", "r2", 100), node("d", "r1", 500, here=3)))
    assert isinstance(spread, Placement)
    assert spread.node_id == "c"
    assert "its weights are fetched first" in spread.why
    in_place = choose_placement(replace(request, stored_on=None), fleet)
    assert isinstance(in_place, Placement)
    assert in_place.node_id == "a"
    assert "weights" not in in_place.why


def test_first_replica_is_told_so_and_later_ones_where_the_others_are() -> None:
    card = AcceleratorRoom("a", "cuda", 100, 0)
    fleet = [
        NodeRoom(
            f"id-{n}",
            n,
            accepts=True,
            refusal="",
            engines=frozenset({"torch"}),
            rack="",
            accelerators=(card,),
            same_deployment=0,
            replicas=0,
        )
        for n in ("n1", "n2")
    ]

    def why(*nodes: NodeRoom) -> str:
        choice = choose_placement(PlacementRequest("torch", 10), nodes)
        assert isinstance(choice, Placement)
        return choice.why

    assert why(*fleet) == "the first of this deployment: most nodes and memory beside it, of 2 nodes that fit"
    assert why(fleet[0]).endswith("of 1 node that fits")
    told = why(replace(fleet[0], same_deployment=1, replicas=1), fleet[1])
    assert told.startswith("0 of 1 replicas of this deployment are in its node n2, 0 on the node itself")
