"""No accelerator is promised twice, no slice has two replicas, and shared weights count exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exaserve_ops.serving.domain.accelerator_wish import (
    ANYTHING,
    AcceleratorWish,
    MpsShare,
    WishError,
    check_size,
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
from exaserve_ops.serving.domain.terms import terms_of

MIB = 1 << 20
GIB = 1 << 30
SLICES = ("3g.40gb", "2g.20gb", "1g.10gb")


def card(uuid: str, gib: int = 80, kind: str = "cuda", **changes: object) -> AcceleratorRoom:
    room = AcceleratorRoom(uuid, kind, gib * GIB, 0, margin_bytes=margin_bytes(gib * GIB))
    return replace(room, **changes)  # type: ignore[arg-type]  # fields of the room


def part(uuid: str, profile: str, parent: str = "GPU-0", *, replicas: int = 0) -> AcceleratorRoom:
    gib = int(profile.partition(".")[2][:-2])
    return card(uuid, gib, parent_uuid=parent, profile=profile, replicas=replicas)


def node(name: str, *accelerators: AcceleratorRoom, rack: str = "", mps: str = "") -> NodeRoom:
    return NodeRoom(
        f"id-{name}",
        name,
        accepts=True,
        refusal="",
        engines=frozenset({"torch"}),
        rack=rack,
        accelerators=accelerators,
        same_deployment=0,
        replicas=0,
        mps_problem=mps,
    )


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
    losses = view_spread(tuple(rooms.values())).losses
    assert [(loss.kind, loss.serving, loss.memory_bytes) for loss in losses] == [
        ("rack", 3, 5 * GIB),
        ("node", 3, 5 * GIB),
    ]


# -- what engines claim --------------------------------------------------------------------------
def claims(engine: str, options: dict[str, object]) -> float:
    found = terms_of(engine, options, digest="d", parameter_count=10, weights_bytes=20, needed_bytes=100)
    return found.claimed_millionths / 1_000_000


@pytest.mark.parametrize(
    ("engine", "options", "ratio"),
    [
        ("vllm", {}, 0.92),
        ("vllm", {"gpu_memory_utilization": 0.45}, 0.45),
        ("vllm", {"extra_arguments": "--gpu-memory-utilization 0.85"}, 0.85),
        ("vllm", {"extra_arguments": "--gpu_memory_utilization=0.5"}, 0.5),
        ("vllm", {"gpu_memory_utilization": "much"}, 0.92),
        ("vllm", {"kv_cache_memory_bytes": 1 << 30}, 0.0),
        ("sglang", {"mem_fraction_static": 0.5}, 0.6),
        ("sglang", {"mem_fraction_static": 0.93}, 0.98),
        ("torch", {}, 0.0),
        ("simulated", {}, 0.0),
    ],
)
def test_engines_claim_by_their_own_rules(engine: str, options: dict[str, object], ratio: float) -> None:
    assert claims(engine, options) == pytest.approx(ratio)


def torch_terms(options: dict[str, object], **changes: Any) -> Terms:
    facts: dict[str, Any] = {"digest": "a", "parameter_count": 10, "weights_bytes": 20, "needed_bytes": 100}
    return terms_of("torch", options, **(facts | changes))


@pytest.mark.parametrize(
    ("options", "on_cpu", "on_card"),
    [
        ({}, 40, 20),
        ({"dtype": "bfloat16"}, 20, 20),
        ({"dtype": "float32"}, 40, 40),
        ({"weights": "private"}, 0, 0),
        ({"dtype": "int4"}, 0, 0),
    ],
)
def test_torch_shares_weights_in_the_type_it_computes_in(
    options: dict[str, object], on_cpu: int, on_card: int
) -> None:
    found = torch_terms(options)
    assert found.copy_on(AcceleratorSize("cpu", 1000))[1] == on_cpu
    assert found.copy_on(AcceleratorSize("cuda", 1000, shares_memory=True))[1] == on_card
    assert found.copy_on(AcceleratorSize("cuda", 1000)) == ("", 0), "a card whose memory nobody shares"


def test_copies_of_other_content_or_type_are_not_shared() -> None:
    names = {
        torch_terms({"dtype": dtype}, digest=digest).copy for digest in "ab" for dtype in ("auto", "bfloat16")
    }
    assert len(names) == 4
    assert torch_terms({}).copy == torch_terms({"dtype": "float32"}).copy
    assert torch_terms({}, parameter_count=None).copy == ""
    assert torch_terms({}, accelerators=2) == Terms()
    assert torch_terms({}, needed_bytes=40).copy == "", "too small for its weights: it counts whole"


def test_card_whose_memory_is_shared_holds_weights_once_but_not_for_clients_of_mps() -> None:
    terms = Terms(card_copy="model", card_copy_bytes=20 * GIB)
    request = PlacementRequest("torch", 24 * GIB, terms=terms)

    def count(room: AcceleratorRoom, request: PlacementRequest) -> int:
        board = PlacementBoard(request, [node("n", room)])
        return sum(isinstance(board.place(standby=False), Placement) for _ in range(30))

    apart, together = card("GPU-1"), card("GPU-1", shares_memory=True)
    assert count(apart, request) == 3
    assert count(together, request) == (80 * GIB - margin_bytes(80 * GIB) - 20 * GIB) // (4 * GIB) == 14
    mps = replace(request, wish=read_wish(mps_thread_percent=1), terms=replace(terms, mps=MpsShare(1)))
    assert count(together, mps) == 3


# -- what may be asked for -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ("any", "any"),
        ("whole", "whole"),
        ("slice", "slice"),
        (" Slice:3G.40GB ", "slice:3g.40gb"),
        ("slice:1g.10gb+me", "slice:1g.10gb+me"),
        ("nvidia.com/mig-4g.71gb", "slice:4g.71gb"),
    ],
)
def test_accelerators_are_asked_for_in_words(asked: str, text: str) -> None:
    assert read_wish(asked).text == text


@pytest.mark.parametrize(
    ("wish", "field"),
    [
        ({"accelerator": "gpu"}, "accelerator"),
        ({"accelerator": "whole:3g.40gb"}, "accelerator"),
        ({"accelerator": "slice:"}, "accelerator"),
        ({"accelerator": "slice:3g"}, "accelerator"),
        ({"slice_memory_bytes": 1}, "slice_memory_bytes"),
        ({"mps_thread_percent": 101}, "mps_thread_percent"),
        ({"mps_memory_bytes": -1}, "mps_memory_bytes"),
        ({"spill": True, "spill_reason": "x"}, "spill"),
        ({"accelerator": "slice", "spill": True, "spill_reason": "  "}, "spill_reason"),
        ({"accelerator": "slice", "spill_reason": "x"}, "spill"),
    ],
)
def test_wishes_that_make_no_sense_are_refused_by_field(wish: dict[str, object], field: str) -> None:
    with pytest.raises(WishError) as caught:
        read_wish(**wish)  # type: ignore[arg-type]  # as people would send it
    assert caught.value.field == field


def test_sizes_that_cannot_work_are_refused() -> None:
    with pytest.raises(WishError, match="one slice only"):
        check_size(read_wish("slice"), memory_bytes=1, accelerators=2)
    with pytest.raises(WishError, match="below what a replica needs"):
        check_size(read_wish(mps_memory_bytes=5), memory_bytes=12, accelerators=2)
    check_size(read_wish(mps_memory_bytes=6), memory_bytes=12, accelerators=2)
    check_size(ANYTHING, memory_bytes=0, accelerators=8)


def test_host_memory_for_kv_counts_on_a_cpu_whose_memory_it_is_and_not_on_a_card() -> None:
    terms = terms_of(
        "torch",
        {"kv_host_bytes": 3 * GIB},
        digest="model",
        parameter_count=GIB // 4,
        weights_bytes=GIB,
        needed_bytes=2 * GIB,
    )
    sizes = {"CPU": AcceleratorSize("cpu", 64 * GIB), "GPU": AcceleratorSize("cuda", 80 * GIB)}
    held = [Holding(uuid, 2 * GIB, terms) for uuid in ("CPU", "CPU", "GPU")]
    promised = tally(held, sizes)
    assert promised["CPU"].reserved_bytes == GIB + 2 * (GIB + 3 * GIB), "weights once, the rest for each"
    assert promised["GPU"].reserved_bytes == 2 * GIB
    assert (
        terms_of(
            "vllm", {"kv_host_bytes": GIB}, digest="m", parameter_count=1, weights_bytes=1, needed_bytes=1
        ).host_bytes
        == 0
    )
