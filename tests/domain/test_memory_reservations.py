"""No accelerator is promised twice, no slice has two replicas, and shared weights count exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from exaserve_ops.serving.domain.accelerator_wish import (
    AcceleratorWish,
    MpsShare,
    read_wish,
)
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
from exaserve_ops.serving.domain.reservation import AcceleratorSize, Holding, Terms, margin_bytes, tally
from exaserve_ops.serving.domain.spread import view_spread
from tests.fakes.accelerator_rooms import GIB, MIB, card, node, part

SLICES = ("3g.40gb", "2g.20gb", "1g.10gb")


# -- a fleet of all sorts, and deployments of all sorts -------------------------------------------------
@st.composite
def nodes(draw: st.DrawFn, index: int) -> NodeRoom:
    rooms: list[AcceleratorRoom] = []
    for place in range(draw(st.integers(0, 3))):
        name = f"n{index}-{place}"
        sort = draw(st.sampled_from(["whole", "cut", "cpu", "empty"]))
        if sort == "cpu":
            rooms.append(card(f"CPU-{name}", draw(st.integers(0, 64)), kind="cpu"))
        else:
            rooms.append(card(f"GPU-{name}", 80, split=sort != "whole", shares_memory=draw(st.booleans())))
        if sort == "cut":
            cut = draw(st.lists(st.sampled_from(SLICES), max_size=3))
            rooms += [part(f"MIG-{name}-{i}", profile, f"GPU-{name}") for i, profile in enumerate(cut)]
    mps = draw(st.sampled_from(["", "no daemon"]))
    return node(f"n{index}", *rooms, rack=draw(st.sampled_from(["", "r1", "r2"])), mps=mps)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[NodeRoom, ...]:
    return tuple(draw(nodes(index)) for index in range(draw(st.integers(0, 4))))


@st.composite
def terms(draw: st.DrawFn, needed: int, mps: MpsShare | None) -> Terms:
    sort = draw(st.sampled_from(["plain", "shared", "claims"]))
    if sort == "shared":
        copy_bytes = draw(st.integers(0, needed))
        name = f"{draw(st.sampled_from('ab'))}/{copy_bytes}"
        return Terms(name, copy_bytes, f"card {name}", copy_bytes, mps=mps)
    return Terms(claimed_millionths=draw(st.integers(1, 1_000_000)) if sort == "claims" else 0, mps=mps)


@st.composite
def wishes(draw: st.DrawFn) -> AcceleratorWish:
    accelerator = draw(st.sampled_from(["any", "whole", "slice", "slice:3g.40gb", "slice:7g.80gb"]))
    spill = accelerator.startswith("slice") and draw(st.booleans())
    return read_wish(
        accelerator,
        slice_memory_bytes=draw(st.sampled_from([0, 15 * GIB])) if accelerator.startswith("slice") else 0,
        mps_thread_percent=draw(st.sampled_from([0, 0, 20, 60])),
        spill=spill,
        spill_reason="load" if spill else "",
    )


@st.composite
def requests(draw: st.DrawFn) -> PlacementRequest:
    wish = draw(wishes())
    accelerators = 1 if wish.wants_slice else draw(st.sampled_from([1, 1, 1, 2]))
    request = PlacementRequest("torch", draw(st.integers(1, 60)) * GIB, accelerators, wish=wish)
    return replace(request, terms=draw(terms(request.bytes_each, wish.mps)))


def holdings_of(request: PlacementRequest, choice: Placement) -> list[Holding]:
    return [Holding(uuid, request.bytes_each, request.terms) for uuid in choice.accelerator_uuids]


def sizes_of(fleet: Iterable[NodeRoom]) -> dict[str, AcceleratorSize]:
    return {a.uuid: a.size for room in fleet for a in room.accelerators}


@settings(deadline=None)
@given(fleets(), st.lists(requests(), min_size=1, max_size=4), st.lists(st.integers(0, 3), max_size=40))
def test_filling_a_fleet_never_overcommits_and_never_gives_a_slice_twice(
    fleet: tuple[NodeRoom, ...], deployments: list[PlacementRequest], order: list[int]
) -> None:
    rooms = {room.node_id: room for room in fleet}
    held: list[Holding] = []
    clients: Counter[str] = Counter()
    for turn in order:
        request = deployments[turn % len(deployments)]
        choice = choose_placement(request, tuple(rooms.values()))
        if isinstance(choice, Refusal):
            assert choice.summary()
            continue
        before = {a.uuid: a for a in rooms[choice.node_id].accelerators}
        rooms[choice.node_id] = reserve(request, choice, rooms[choice.node_id])
        held += holdings_of(request, choice)
        for uuid in choice.accelerator_uuids:
            chosen = before[uuid]
            assert not chosen.split, "a card that is cut into slices is never used as a whole"
            assert not (chosen.parent_uuid and chosen.replicas) or (request.wish.mps and chosen.mps_replicas)
            if request.wish.wants_slice and not choice.opened:
                assert chosen.parent_uuid
                assert request.wish.profile in ("", chosen.profile)
            clients[uuid] += 1
    promises = tally(held, sizes_of(fleet))
    for room in rooms.values():
        for a in room.accelerators:
            promise = promises.get(a.uuid)
            assert a.reserved_bytes == (promise.reserved_bytes if promise else 0)
            assert a.reserved_bytes <= a.memory_bytes - margin_bytes(a.memory_bytes)
            assert a.replicas == clients[a.uuid]
            assert a.mps_replicas in (0, a.replicas), "with and without MPS do not mix"
            assert a.mps_percent <= 100


@settings(deadline=None)
@given(fleets(), requests(), st.lists(st.booleans(), max_size=20), st.randoms(use_true_random=False))
def test_plan_is_the_same_for_any_order_of_nodes_and_all_at_once(
    fleet: tuple[NodeRoom, ...], request: PlacementRequest, standbys: list[bool], random: object
) -> None:
    shuffled = list(fleet)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # Hypothesis's Random
    board, rooms = PlacementBoard(request, shuffled), {room.node_id: room for room in fleet}
    for standby in standbys:
        asked = replace(request, standby=standby)
        expected = choose_placement(asked, tuple(rooms.values()))
        assert board.place(standby=standby) == expected
        if isinstance(expected, Placement):
            rooms[expected.node_id] = reserve(asked, expected, rooms[expected.node_id])


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_shared_weights_count_once_until_the_last_sharer_leaves(
    replicas: list[tuple[str, int]], random: object
) -> None:
    weights = {"a": 10, "b": 7, "c": 0}
    held = [
        Holding("CPU", weights[model] + own, Terms(f"{model}", weights[model])) for model, own in replicas
    ]
    random.shuffle(held)  # type: ignore[attr-defined]  # Hypothesis's Random
    sizes = {"CPU": AcceleratorSize("cpu", 10_000)}
    while held:
        promise = tally(held, sizes)["CPU"]
        private = sum(one.needed_bytes - one.terms.copy_bytes for one in held)
        present = {one.terms.copy for one in held}
        assert promise.reserved_bytes == private + sum(weights[model] for model in present)
        assert promise.copies.keys() == present
        held.pop()
    assert tally(held, sizes) == {}


# -- one thing at a time -------------------------------------------------------------------------
def test_twelve_replicas_fit_where_four_copies_of_the_weights_would() -> None:
    request = PlacementRequest("torch", 250 * MIB, terms=Terms("model", 200 * MIB))
    board = PlacementBoard(request, [node("n1", card("CPU-n1", 1, kind="cpu"))])
    placed = [board.place(standby=False) for _ in range(20)]
    fitting = [choice for choice in placed if isinstance(choice, Placement)]
    assert len(fitting) == (GIB - margin_bytes(GIB) - 200 * MIB) // (50 * MIB) == 16
    assert not fitting[0].shares_weights
    assert fitting[0].reserved_bytes == 250 * MIB
    assert all(choice.shares_weights and choice.reserved_bytes == 50 * MIB for choice in fitting[1:])
    assert "its weights lie there already, it adds 50 MiB" in fitting[1].why
    (refused, *_) = [choice for choice in placed if isinstance(choice, Refusal)]
    assert "needs 50 MiB an accelerator beside the weights that lie there" in refused.summary()
    assert "are kept free" in refused.summary()


def test_weights_are_not_shared_on_a_card_nor_with_other_weights() -> None:
    request = PlacementRequest("torch", 30 * GIB, terms=Terms("model", 20 * GIB))
    cards = choose_placement(request, [node("n1", card("GPU-1", copies=frozenset({"model"})))])
    assert isinstance(cards, Placement)
    assert cards.reserved_bytes == 30 * GIB
    other = node("n1", card("CPU-n1", 64, kind="cpu", copies=frozenset({"other"})))
    first = choose_placement(request, [other])
    assert isinstance(first, Placement)
    assert (first.reserved_bytes, first.shares_weights) == (30 * GIB, False)


def test_claims_of_one_card_add_up_to_no_more_than_is_planned_with() -> None:
    def place(*ratios: float) -> list[bool]:
        rooms = {"id-n": node("n", card("GPU-1", 24))}
        done = []
        for ratio in ratios:
            claims = Terms(claimed_millionths=round(ratio * 1_000_000))
            request = PlacementRequest("torch", 2 * GIB, terms=claims)
            choice = choose_placement(request, tuple(rooms.values()))
            done.append(isinstance(choice, Placement))
            if isinstance(choice, Placement):
                rooms["id-n"] = reserve(request, choice, rooms["id-n"])
        return done

    assert place(0.5, 0.4) == [True, True]
    assert place(0.5, 0.48) == [True, True]
    assert place(0.5, 0.4, 0.1) == [True, True, False]
    assert place(0.9, 0.1) == [True, False]
    assert place(0.98) == [True]
    assert place(0.99) == [False]


def test_what_is_promised_beyond_the_need_is_told_with_both_figures() -> None:
    claims = PlacementRequest("torch", 2 * GIB, terms=Terms(claimed_millionths=900_000))
    choice = choose_placement(claims, [node("n", card("GPU-1", 24))])
    assert isinstance(choice, Placement)
    assert "22118 MiB are promised to it by its engine's share, and it needs 2048 MiB" in choice.why
    share = MpsShare(memory_bytes=5 * GIB)
    limited = PlacementRequest("torch", 2 * GIB, wish=AcceleratorWish(mps=share), terms=Terms(mps=share))
    choice = choose_placement(limited, [node("n", card("GPU-1", 24))])
    assert isinstance(choice, Placement)
    assert "5120 MiB are promised to it by its MPS limit, and it needs 2048 MiB" in choice.why


def test_claim_that_is_less_than_what_is_needed_is_refused_with_both_figures() -> None:
    request = PlacementRequest("torch", 20 * GIB, terms=Terms(claimed_millionths=400_000))
    refusal = choose_placement(request, [node("n", card("GPU-1", 24))])
    assert isinstance(refusal, Refusal)
    assert "claims 9830 MiB of it, and the replica needs 20480 MiB: raise the share" in refusal.summary()


def test_slices_that_are_all_taken_are_counted_for_the_whole_fleet() -> None:
    request = PlacementRequest("torch", 20 * GIB, wish=read_wish("slice:3g.40gb"))
    fleet = [
        node("n1", card("GPU-0", split=True), part("MIG-1", "3g.40gb"), part("MIG-2", "3g.40gb")),
        node("n2"),
    ]
    board = PlacementBoard(request, fleet)
    first, second, third = (board.place(standby=False) for _ in range(3))
    assert isinstance(first, Placement)
    assert isinstance(second, Placement)
    assert {*first.accelerator_uuids, *second.accelerator_uuids} == {"MIG-1", "MIG-2"}
    assert isinstance(third, Refusal)
    assert third.summary() == "2 slices 3g.40gb in the fleet, both taken"
    assert ("n1", "2 slices 3g.40gb, both taken") in third.reasons
    assert ("n2", "has no slice 3g.40gb") in third.reasons


def test_slice_that_nobody_has_is_told_as_such() -> None:
    refusal = choose_placement(
        PlacementRequest("torch", GIB, wish=read_wish("slice:7g.80gb")),
        [node("n1", part("MIG-1", "3g.40gb"))],
    )
    assert isinstance(refusal, Refusal)
    assert refusal.summary() == "no node that may be used has a slice 7g.80gb"


def test_smallest_slice_that_will_do_is_taken() -> None:
    fleet = [node("n1", *(part(f"MIG-{i}", profile) for i, profile in enumerate(SLICES)))]
    choice = choose_placement(
        PlacementRequest("torch", 5 * GIB, wish=read_wish("slice", slice_memory_bytes=15 * GIB)), fleet
    )
    assert isinstance(choice, Placement)
    assert choice.accelerator_uuids == ("MIG-1",)


def test_opened_pool_takes_whole_cards_only_while_no_slice_is_free() -> None:
    wish = read_wish("slice:3g.40gb", spill=True, spill_reason="launch day")
    request = PlacementRequest("torch", 20 * GIB, wish=wish)
    board = PlacementBoard(request, [node("n1", part("MIG-1", "3g.40gb"), card("GPU-1"))])
    first, second, third = (board.place(standby=False) for _ in range(3))
    assert isinstance(first, Placement)
    assert isinstance(second, Placement)
    assert (first.accelerator_uuids, first.opened) == (("MIG-1",), "")
    assert second.accelerator_uuids == ("GPU-1",)
    assert "no slice 3g.40gb is free, and whole cards are opened to it: launch day" in second.why
    assert isinstance(third, Placement), "a card has room for more than one"
    closed = choose_placement(replace(request, wish=read_wish("slice:3g.40gb")), [node("n1", card("GPU-1"))])
    assert isinstance(closed, Refusal)
    full = choose_placement(request, [node("n1", part("MIG-1", "3g.40gb", replicas=1), card("GPU-1", 10))])
    assert isinstance(full, Refusal)
    assert full.summary().startswith("1 slice 3g.40gb in the fleet, taken; opened, too: n1: needs 20480 MiB")


def test_mps_shares_fill_one_card_before_the_next_and_never_mix_with_others() -> None:
    shared = PlacementRequest(
        "torch", 5 * GIB, wish=read_wish(mps_thread_percent=40, mps_memory_bytes=10 * GIB)
    )
    shared = replace(shared, terms=Terms(mps=shared.wish.mps))
    alone = PlacementRequest("torch", 5 * GIB)
    rooms = {"id-n1": node("n1", card("GPU-1"), card("GPU-2"))}
    got = []
    for request in (shared, shared, shared, alone):
        choice = choose_placement(request, tuple(rooms.values()))
        assert isinstance(choice, Placement) == (request is shared), choice
        if isinstance(choice, Placement):
            got.append(choice.accelerator_uuids[0])
            assert choice.reserved_bytes == 10 * GIB, "it may use all that its limit allows"
            rooms["id-n1"] = reserve(request, choice, rooms["id-n1"])
        else:
            assert "takes replicas with an MPS share only" in choice.summary()
    assert got == ["GPU-1", "GPU-1", "GPU-2"]


def test_mps_goes_where_a_daemon_answers_and_only_to_cuda() -> None:
    request = PlacementRequest(
        "torch", GIB, wish=AcceleratorWish(mps=MpsShare(10)), terms=Terms(mps=MpsShare(10))
    )
    absent = choose_placement(request, [node("n1", card("GPU-1"), mps="no MPS control daemon answers")])
    assert isinstance(absent, Refusal)
    assert absent.summary() == "n1: no MPS here: no MPS control daemon answers"
    assert isinstance(choose_placement(request, [node("n1", card("X", kind="xpu"))]), Refusal)
    assert isinstance(choose_placement(request, [node("n1", card("GPU-1"))]), Placement)


def test_unknown_size_blocks_placement_with_one_plain_reason() -> None:
    request = PlacementRequest("torch", 0, blocked="how much it needs is not known")
    board = PlacementBoard(request, [node("n1", card("GPU-1")), node("n2", card("GPU-2"))])
    for refusal in (choose_placement(request, [node("n1", card("GPU-1"))]), board.place(standby=True)):
        assert isinstance(refusal, Refusal)
        assert refusal.summary() == "how much it needs is not known"


def test_loss_of_a_domain_is_told_in_memory_with_weights_once() -> None:
    request = PlacementRequest("torch", 3 * GIB, terms=Terms("model", 2 * GIB))
    rooms = {"id-n1": node("n1", card("CPU-n1", 64, kind="cpu"), rack="r1")}
    for _ in range(3):
        choice = choose_placement(request, tuple(rooms.values()))
        assert isinstance(choice, Placement)
        rooms["id-n1"] = reserve(request, choice, rooms["id-n1"])
    losses = view_spread(tuple(rooms.values()), request).losses
    assert [(loss.kind, loss.serving, loss.memory_bytes) for loss in losses] == [
        ("rack", 3, 5 * GIB),
        ("node", 3, 5 * GIB),
    ]
