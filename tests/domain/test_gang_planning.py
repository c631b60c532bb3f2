"""Members of a replica over several nodes lie inside one fabric, as near as can be, and refusals count."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exaserve_ops.serving.domain.closeness import UNKNOWN, Closeness
from exaserve_ops.serving.domain.gangs import Gang, GangRefusal, Seat, plan_gang
from exaserve_ops.serving.domain.placement import Placement, PlacementBoard
from exaserve_ops.serving.domain.rooms import AcceleratorRoom, NodeRoom, PlacementRequest

GIB = 1 << 30
EIGHT = PlacementRequest("vllm", 8 * 80 * GIB, accelerators=8)


def node(name: str, rack: str = "r1", *, cards: int = 8, taken: int = 0, refusal: str = "") -> NodeRoom:
    accelerators = tuple(
        AcceleratorRoom(f"{name}-{i}", "cuda", 80 * GIB, 80 * GIB if i < taken else 0) for i in range(cards)
    )
    return NodeRoom(f"id-{name}", name, not refusal, refusal, frozenset({"vllm"}), rack, accelerators, 0, 0)


def islands(name: str, *groups: tuple[int, ...]) -> Closeness:
    """Cards of a group are next to one another, all others across the CPU; one adapter a group."""
    ways = {}
    everyone = [i for group in groups for i in group]
    for one, other in combinations(everyone, 2):
        near = any(one in group and other in group for group in groups)
        ways[frozenset((f"{name}-{one}", f"{name}-{other}"))] = 0 if near else 9
    for number, group in enumerate(groups):
        for card in everyone:
            ways[frozenset((f"{name}-{card}", f"mlx5_{number}"))] = 1 if card in group else 9
    return Closeness(ways, tuple(f"mlx5_{number}" for number in range(len(groups))))


def placed(choice: Gang | GangRefusal) -> Gang:
    assert isinstance(choice, Gang), choice
    return choice


def test_four_nodes_of_eight_cards_lie_in_one_rack_of_one_supernode() -> None:
    seats = [Seat(node(f"n{i}", f"r{i % 3}"), "s1") for i in range(12)]
    gang = placed(plan_gang(EIGHT, 4, seats))
    assert [member.number for member in gang.members] == [0, 1, 2, 3]
    assert {member.node_name for member in gang.members} == {"n0", "n3", "n6", "n9"}
    assert all(len(member.accelerator_uuids) == 8 for member in gang.members)
    assert gang.why == "all 4 nodes in one rack of supernode s1"


def test_nodes_without_racks_are_not_called_racks() -> None:
    gang = placed(plan_gang(EIGHT, 2, [Seat(node(f"n{i}", ""), "s1") for i in range(2)]))
    assert gang.why == "all 2 nodes in racks that are not known of supernode s1"


def test_refusal_counts_what_is_free_and_says_why_the_rest_is_not() -> None:
    seats = [
        Seat(node("n0"), "s1"),
        Seat(node("n1"), "s1"),
        Seat(node("n2", refusal="dead"), "s1"),
        Seat(node("n3", refusal="cordoned: kernel update"), "s1"),
        Seat(node("n4"), ""),
    ]
    refusal = plan_gang(EIGHT, 4, seats)
    assert isinstance(refusal, GangRefusal)
    assert refusal.summary() == (
        "1 node with room of 1 cannot be used: its supernode is not known: label it `supernode`; "
        "2 of 4 nodes free in supernode s1 (1: cordoned: kernel update, 1: dead)"
    )
    assert plan_gang(EIGHT, 4, ()) == GangRefusal(())


def test_two_supernodes_with_half_the_room_each_are_no_place() -> None:
    seats = [Seat(node(f"a{i}"), "s1") for i in range(2)] + [Seat(node(f"b{i}"), "s2") for i in range(2)]
    refusal = plan_gang(EIGHT, 4, seats)
    assert isinstance(refusal, GangRefusal)
    assert "2 of 4 nodes free in supernode s1, which has no more" in refusal.summary()
    assert "2 of 4 nodes free in supernode s2" in refusal.summary()


def test_supernode_that_just_suffices_is_taken_and_the_larger_one_stays_whole() -> None:
    seats = [Seat(node(f"a{i}"), "s1") for i in range(8)] + [Seat(node(f"b{i}"), "s2") for i in range(4)]
    gang = placed(plan_gang(EIGHT, 4, seats))
    assert gang.supernode == "s2"
    assert "the best of 2 supernodes" in gang.why


def test_rack_that_just_suffices_is_taken_and_the_larger_one_stays_whole() -> None:
    seats = [Seat(node(f"a{i}", "r1"), "s1") for i in range(3)]
    seats += [Seat(node(f"b{i}", "r2"), "s1") for i in range(2)]
    gang = placed(plan_gang(EIGHT, 2, seats))
    assert {member.node_name for member in gang.members} == {"b0", "b1"}


def test_second_replica_goes_to_another_supernode() -> None:
    rooms = [replace(node(f"{s}-{i}"), supernode=s) for s in ("s1", "s2") for i in range(4)]
    board = PlacementBoard(replace(EIGHT, nodes_per_replica=2), rooms)
    taken = []
    for _ in range(4):
        choice = board.place(standby=False)
        assert isinstance(choice, Placement), choice
        taken.append({member.node_name for member in choice.members})
    assert {name[:2] for name in taken[0] | taken[1]} == {"s1", "s2"}
    assert [{name[:2] for name in names} for names in taken[:2]] in ([{"s1"}, {"s2"}], [{"s2"}, {"s1"}])
    assert len(set().union(*taken)) == 8, "nobody is placed on cards that are taken"
    refusal = board.place(standby=False)
    assert not isinstance(refusal, Placement)
    assert "0 of 2 nodes free in supernode s1" in refusal.summary()


def test_cards_of_a_member_are_one_island_with_its_adapter() -> None:
    four = PlacementRequest("vllm", 4 * 80 * GIB, accelerators=4)
    near = islands("n0", (0, 2, 4, 6), (1, 3, 5, 7))
    rooms = [node("n0", taken=1), node("n1")]
    seats = [Seat(rooms[0], "s1", near), Seat(rooms[1], "s1", islands("n1", (0, 1, 2, 3), (4, 5, 6, 7)))]
    first, second = placed(plan_gang(four, 2, seats)).members
    assert set(first.accelerator_uuids) == {"n0-1", "n0-3", "n0-5", "n0-7"}
    assert first.adapters == ("mlx5_1",) * 4
    assert set(second.accelerator_uuids) in ({f"n1-{i}" for i in range(4)}, {f"n1-{i}" for i in range(4, 8)})


def test_two_cards_break_no_island_of_four() -> None:
    near = islands("n", (0, 1, 2, 3), (4, 5))
    assert set(near.choose([f"n-{i}" for i in range(6)], 2)) == {"n-4", "n-5"}


def test_cards_as_near_to_two_adapters_have_one_each() -> None:
    ways = {frozenset((f"g{i}", f"mlx5_{a}")): 2 for i in range(2) for a in range(2)}
    assert Closeness(ways, ("mlx5_0", "mlx5_1")).adapters_of(["g0", "g1"]) == ("mlx5_0", "mlx5_1")
    assert UNKNOWN.adapters_of(["g0"]) == ("",)


def test_more_cards_than_there_are_cannot_be_chosen() -> None:
    with pytest.raises(ValueError, match="3 of 2"):
        UNKNOWN.choose(["a", "b"], 3)
    with pytest.raises(ValueError, match="two members"):
        plan_gang(EIGHT, 1, ())


@st.composite
def fleets(draw: st.DrawFn) -> tuple[Seat, ...]:
    seats = []
    for index in range(draw(st.integers(0, 9))):
        rack = draw(st.sampled_from(["", "r1", "r2", "r3"]))
        refusal = draw(st.sampled_from(["", "", "", "dead"]))
        room = node(
            f"n{index}", rack, cards=draw(st.integers(1, 4)), taken=draw(st.integers(0, 2)), refusal=refusal
        )
        room = replace(room, same_deployment=draw(st.integers(0, 1)))
        halves = (tuple(range(2)), tuple(range(2, 4)))
        closeness = islands(room.name, *halves) if draw(st.booleans()) else UNKNOWN
        seats.append(Seat(room, draw(st.sampled_from(["", "s1", "s2"])), closeness))
    return tuple(seats)


requests = st.builds(
    PlacementRequest,
    engine=st.just("vllm"),
    memory_bytes=st.just(2 * GIB),
    accelerators=st.integers(1, 3),
    shun=st.sampled_from([frozenset(), frozenset({"id-n0", "id-n1"})]),
    stored_on=st.sampled_from([None, frozenset({"id-n2"})]),
)


def has_room(seat: Seat, request: PlacementRequest) -> bool:
    free = [a for a in seat.room.accelerators if a.free_bytes >= request.bytes_each]
    return seat.room.accepts and len(free) >= request.accelerators


@given(requests, st.integers(2, 4), fleets())
def test_gang_is_whole_in_one_supernode_in_as_few_racks_as_there_can_be(
    request: PlacementRequest, nodes: int, fleet: tuple[Seat, ...]
) -> None:
    free = Counter(seat.supernode for seat in fleet if seat.supernode and has_room(seat, request))
    choice = plan_gang(request, nodes, fleet)
    if isinstance(choice, GangRefusal):
        assert max(free.values(), default=0) < nodes
        assert {name for name, _ in choice.reasons} == {seat.supernode for seat in fleet}
        return
    by_id = {seat.room.node_id: seat for seat in fleet}
    chosen = [by_id[member.node_id] for member in choice.members]
    assert len({member.node_id for member in choice.members}) == nodes == len(choice.members)
    assert {seat.supernode for seat in chosen} == {choice.supernode}
    assert all(has_room(seat, request) for seat in chosen)
    for member, seat in zip(choice.members, chosen, strict=True):
        uuids = set(member.accelerator_uuids)
        assert len(uuids) == request.accelerators
        held = [a for a in seat.room.accelerators if a.uuid in uuids]
        assert all(a.free_bytes >= request.bytes_each for a in held)
        assert member.reserved_bytes == sum(a.cost_bytes(request) for a in held)
    good = [s for s in fleet if s.supernode == choice.supernode and has_room(s, request)]
    unshunned = [s for s in good if s.room.node_id not in request.shun]
    pool = unshunned if len(unshunned) >= nodes else good
    fewest = min(len({s.room.domain for s in some}) for some in combinations(pool, nodes))
    assert len({seat.room.domain for seat in chosen}) == fewest


@given(requests, st.integers(2, 3), fleets(), st.randoms(use_true_random=False))
def test_gang_does_not_depend_on_the_order_of_nodes(
    request: PlacementRequest, nodes: int, fleet: tuple[Seat, ...], random: object
) -> None:
    shuffled = list(fleet)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # Hypothesis's Random
    assert plan_gang(request, nodes, shuffled) == plan_gang(request, nodes, fleet)


@given(st.integers(1, 4), st.permutations(range(8)))
def test_what_lies_together_in_islands_is_found(count: int, order: list[int]) -> None:
    near = islands("n", (0, 1, 2, 3), (4, 5, 6, 7))
    chosen = near.choose([f"n-{i}" for i in order], count)
    assert near.length(chosen)[0] == 0
