"""Which conversations move between turns: budgets, hysteresis, reasons."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exaserve_ops.sessions.domain.relocation import (
    ACTIVE_SECONDS,
    MOST_PREFILL_SECONDS,
    PREFILL,
    RECOMPUTE,
    TRANSFER,
    Budget,
    FleetSessions,
    HeldSession,
    Holder,
    Rates,
    RelocationPlan,
    Thresholds,
    Underway,
    break_even_tokens,
    estimate_move,
)
from exaserve_ops.sessions.domain.relocation_plan import plan_relocations
from exaserve_ops.sessions.domain.sending import UNMEASURED, Sending, fit_sending

RATES = Rates(
    kv_bytes_per_token=1000,
    prefill_tokens_per_second=5_000.0,
    same_node=Sending(1e9),
    across=Sending(1e8),
)
LIMITS = Thresholds()
PLENTY = Budget(moves_per_node=1000, moves_per_fleet=1000)

Part = Holder | HeldSession | Underway


def holder(name: str, node: str = "n1", **changes: object) -> Holder:
    made = Holder(name, node, "rack1", "chat", "layout", kv_capacity_tokens=10_000)
    return replace(made, **changes)  # type: ignore[arg-type]  # test sugar: names are checked by replace


def session(name: str, replica: str, tokens: int = 1000, **changes: object) -> HeldSession:
    made = HeldSession(name, replica, owner_epoch=1, context_tokens=tokens, idle_seconds=10.0)
    return replace(made, **changes)  # type: ignore[arg-type]  # test sugar: names are checked by replace


def fleet(
    *parts: Part, balancing: frozenset[str] = frozenset(), limits: Thresholds = LIMITS
) -> FleetSessions:
    made = FleetSessions(
        holders=tuple(p for p in parts if isinstance(p, Holder)),
        sessions=tuple(p for p in parts if isinstance(p, HeldSession)),
        rates=(("chat", RATES),),
        underway=tuple(p for p in parts if isinstance(p, Underway)),
        thresholds=(("chat", limits),),
        balancing=balancing,
    )
    return counted(made)


def counted(fleet: FleetSessions) -> FleetSessions:
    """With what each replica holds, and what is on its way, summed up from the sessions."""
    tokens: Counter[str] = Counter()
    active = {s.session_id: s.context_tokens for s in fleet.sessions if s.idle_seconds <= ACTIVE_SECONDS}
    for held in fleet.sessions:
        tokens[held.replica_id] += active.get(held.session_id, 0)
    return replace(
        fleet,
        holders=tuple(replace(h, active_tokens=tokens[h.replica_id]) for h in fleet.holders),
        underway=tuple(replace(u, active_tokens=active.get(u.session_id, 0)) for u in fleet.underway),
    )


def crowd(replica: str, count: int, tokens: int = 1000) -> list[HeldSession]:
    return [session(f"{replica}-s{i}", replica, tokens) for i in range(count)]


def test_fullest_gives_to_the_emptiest_until_the_gap_is_small() -> None:
    plan = plan_relocations(fleet(holder("a"), holder("b"), *crowd("a", 12), *crowd("b", 2)), PLENTY)
    assert len(plan.moves) == 5, "12:2 becomes 7:7; one more would turn it round"
    assert {(m.source_id, m.target_id) for m in plan.moves} == {("a", "b")}
    assert plan.balancing == {"chat"}
    assert plan.notes == (("chat", "the fullest replica is 120% full, another 83 points less"),)
    assert plan.pressures == (("a", 1.2), ("b", 0.2))


def test_balance_takes_nothing_to_another_release_however_empty_it_is() -> None:
    """A rollout has moved these conversations: balance would take them back, to come again."""
    old = [holder("a", release="1"), holder("b", release="1")]
    new = [holder("c", release="2"), holder("d", release="2")]
    alone = plan_relocations(fleet(*old, new[0], *crowd("c", 12)), PLENTY)
    assert (alone.moves, alone.balancing) == ((), frozenset())
    plan = plan_relocations(fleet(*old, *new, *crowd("c", 12), *crowd("a", 12)), PLENTY)
    assert {(m.source_id, m.target_id) for m in plan.moves} == {("a", "b"), ("c", "d")}
    assert plan.balancing == {"chat"}


def test_small_gap_starts_nothing_and_a_begun_levelling_goes_on() -> None:
    parts: tuple[Part, ...] = (holder("a"), holder("b"), *crowd("a", 9), *crowd("b", 7))
    assert plan_relocations(fleet(*parts), PLENTY) == replace(
        RelocationPlan(), pressures=(("a", 0.9), ("b", 0.7))
    )
    resumed = plan_relocations(fleet(*parts, balancing=frozenset({"chat"})), PLENTY)
    assert len(resumed.moves) == 1
    done = plan_relocations(
        fleet(holder("a"), holder("b"), *crowd("a", 8), *crowd("b", 8), balancing=frozenset({"chat"})),
        PLENTY,
    )
    assert (done.moves, done.balancing) == ((), frozenset())


def test_a_light_fleet_is_left_alone_however_uneven() -> None:
    plan = plan_relocations(fleet(holder("a"), holder("b"), *crowd("a", 8)), PLENTY)
    assert plan.moves == ()


def test_one_huge_conversation_is_not_passed_back_and_forth() -> None:
    plan = plan_relocations(fleet(holder("a"), holder("b"), session("s", "a", 9_500)), PLENTY)
    assert plan.moves == (), "whoever has it is the fullest"


def test_conversation_that_runs_or_was_moved_or_went_cold_is_not_moved_for_balance() -> None:
    for change in (
        {"in_turn": True},
        {"moved_seconds_ago": 5.0},
        {"idle_seconds": 0.2},
    ):
        sessions = [replace(s, **change) for s in crowd("a", 12)]
        assert plan_relocations(fleet(holder("a"), holder("b"), *sessions), PLENTY).moves == ()
    cold = [replace(s, idle_seconds=5000.0) for s in crowd("a", 12)]
    assert plan_relocations(fleet(holder("a"), holder("b"), *cold), PLENTY).pressures[0][1] == 0.0


def test_all_leave_a_draining_replica_and_those_that_run_wait_with_the_reason() -> None:
    parts: tuple[Part, ...] = (
        holder("a", leaves="node n1 drains", accepts=False),
        holder("b", "n2"),
        session("busy", "a", in_turn=True),
        session("recent", "a", idle_seconds=1.0),
        session("cold", "a", idle_seconds=9000.0),
    )
    plan = plan_relocations(fleet(*parts), PLENTY)
    assert [(m.session_id, m.target_id, m.why) for m in plan.moves] == [
        ("recent", "b", "node n1 drains"),
        ("cold", "b", "node n1 drains"),
    ]
    assert [(s.session_id, s.why) for s in plan.stays] == [
        ("busy", "a turn runs; it moves when that has ended")
    ]


def test_budget_bounds_moves_of_a_node_of_the_fleet_and_bytes() -> None:
    leaving = holder("a", leaves="drain", accepts=False)
    parts: tuple[Part, ...] = (leaving, holder("b", "n2"), holder("c", "n3"), *crowd("a", 5))
    plan = plan_relocations(fleet(*parts), Budget(moves_per_node=2))
    assert len(plan.moves) == 2
    assert {s.why for s in plan.stays} == {"2 moves are under way on its source's or target's node"}
    plan = plan_relocations(fleet(*parts), Budget(moves_per_node=9, moves_per_fleet=3))
    assert len(plan.moves) == 3
    small = Budget(moves_per_node=9, bytes_available=1_500_000, bytes_full=2_000_000)
    plan = plan_relocations(fleet(*parts), small)
    assert len(plan.moves) == 1
    assert {s.why for s in plan.stays} == {"the limit of bytes per second is used up for now"}
    tiny = Budget(moves_per_node=9, bytes_available=10, bytes_full=10)
    assert len(plan_relocations(fleet(*parts), tiny).moves) == 1, "larger than the bucket, but alone"


def test_moves_under_way_count_where_they_go_and_are_not_begun_again() -> None:
    leaving = holder("a", leaves="drain", accepts=False)
    parts: tuple[Part, ...] = (leaving, holder("b", "n2"), session("s", "a"), Underway("s", "a", "b"))
    assert plan_relocations(fleet(*parts), PLENTY).moves == ()
    twelve = crowd("a", 12)
    going = [Underway(s.session_id, "a", "b") for s in twelve[:6]]
    plan = plan_relocations(fleet(holder("a"), holder("b"), *twelve, *going), PLENTY)
    assert plan.moves == ()


def test_near_target_is_preferred_until_it_is_fuller() -> None:
    def target_with(tokens_near: int) -> str:
        leaving = holder("a", leaves="drain", accepts=False)
        parts: tuple[Part, ...] = (leaving, holder("near"), holder("far", "n2", rack="r2"), session("s", "a"))
        filled = (*parts, session("x", "near", tokens_near), session("y", "far", 1000))
        return plan_relocations(fleet(*filled), PLENTY).moves[0].target_id

    assert target_with(1200) == "near"
    assert target_with(3000) == "far"


def test_asked_move_is_done_or_refused_with_the_reason() -> None:
    other = holder("c", deployment="other")
    closed = holder("d", accepts=False)
    parts: tuple[Part, ...] = (holder("a"), holder("b"), other, closed)
    for target, why in (
        ("b", ""),
        ("c", "the replica that was asked for serves another deployment"),
        ("d", "the replica that was asked for takes no conversations now"),
        ("gone", "the replica that was asked for takes no conversations now"),
    ):
        plan = plan_relocations(fleet(*parts, session("s", "a", asked_target=target)), PLENTY)
        assert [s.why for s in plan.stays] == ([why] if why else [])
        assert [m.target_id for m in plan.moves] == ([] if why else ["b"])


def test_kv_goes_along_only_where_that_is_faster_and_possible() -> None:
    fast = estimate_move(8000, RATES, same_node=True, same_layout=True)
    assert (fast.way, fast.kv_bytes) == (TRANSFER, 8_000_000)
    assert fast.transfer_seconds == 0.02 + 8e6 / 1e9
    assert fast.sentence() == "transfer 0.028 s < recompute 1.600 s"
    short = estimate_move(16, RATES, same_node=True, same_layout=True)
    assert (short.way, short.kv_bytes) == (RECOMPUTE, 0)
    assert estimate_move(8000, RATES, same_node=True, same_layout=False).way == RECOMPUTE
    assert estimate_move(0, RATES, same_node=True, same_layout=True).way == TRANSFER, (
        "its length is not known"
    )
    unknown = estimate_move(8000, Rates(1000), same_node=True, same_layout=True)
    assert unknown.way == TRANSFER
    assert "not both ways were measured" in unknown.sentence()


def test_target_computes_between_the_turns_what_its_engine_can_be_told_as_text() -> None:
    even = break_even_tokens(RATES, same_node=True)
    assert even is not None
    for tokens, way in ((even - 1, PREFILL), (even + 1, TRANSFER)):
        found = estimate_move(int(tokens), RATES, same_node=True, same_layout=True, knows_text=True)
        assert found.way == way, "below the break-even it computes, above it KV is sent"
    without = estimate_move(8000, RATES, same_node=True, same_layout=False, knows_text=True)
    assert (without.way, without.kv_bytes) == (PREFILL, 0)
    assert without.sentence() == "the target computes it before the next turn, about 1.600 s"
    long = int(MOST_PREFILL_SECONDS * 5_000) + 1
    assert estimate_move(long, RATES, same_node=True, same_layout=False, knows_text=True).way == RECOMPUTE
    unknown = estimate_move(long, Rates(1000), same_node=True, same_layout=False, knows_text=True)
    assert (unknown.way, unknown.sentence()) == (PREFILL, "the target computes it before the next turn")


def test_balance_has_nobody_compute_what_it_could_leave_alone() -> None:
    full = holder("a", kv_layout="", knows_text=True)
    parts: tuple[Part, ...] = (full, holder("b", kv_layout="", knows_text=True))
    crowd = [session(f"s{n}", "a", 2_000) for n in range(8)]
    assert plan_relocations(fleet(*parts, *crowd), PLENTY).moves == ()
    leaving = replace(full, leaves="node a drains", accepts=False)
    plan = plan_relocations(fleet(leaving, parts[1], *crowd), PLENTY)
    assert {move.estimate.way for move in plan.moves} == {PREFILL}


def test_balance_moves_no_conversation_that_would_have_to_be_computed_again() -> None:
    short = [session(f"s{i}", "a", 50) for i in range(240)]
    plan = plan_relocations(fleet(holder("a"), holder("b"), *short), PLENTY)
    assert plan.moves == ()
    [(deployment, note)] = plan.notes
    assert deployment == "chat"
    assert note.endswith("nothing may move for that now")


def test_unknown_capacity_is_neither_full_nor_empty() -> None:
    leaving = holder("a", leaves="drain", accepts=False)
    parts: tuple[Part, ...] = (
        leaving,
        holder("unknown", kv_capacity_tokens=None),
        holder("full"),
        session("s", "a"),
    )
    plan = plan_relocations(fleet(*parts, session("x", "full", 9000)), PLENTY)
    assert plan.moves[0].target_id == "unknown"
    plan = plan_relocations(fleet(*parts), PLENTY)
    assert plan.moves[0].target_id == "full", "which is empty here"


@st.composite
def fleets(draw: st.DrawFn) -> FleetSessions:
    count = draw(st.integers(1, 6))
    holders = [
        Holder(
            f"r{i}",
            f"n{draw(st.integers(0, 2))}",
            draw(st.sampled_from(["", "k1", "k2"])),
            draw(st.sampled_from(["chat", "code"])),
            draw(st.sampled_from(["", "L1", "L2"])),
            draw(st.sampled_from([None, 0, 4_000, 16_000])),
            accepts=draw(st.booleans()),
            leaves=draw(st.sampled_from(["", "", "drain"])),
            knows_text=draw(st.booleans()),
        )
        for i in range(count)
    ]
    sessions = [
        HeldSession(
            f"s{i}",
            f"r{draw(st.integers(0, count))}",
            draw(st.integers(1, 5)),
            draw(st.integers(0, 9_000)),
            draw(st.sampled_from([0.0, 2.0, 100.0, 9_000.0])),
            in_turn=draw(st.booleans()),
            moved_seconds_ago=draw(st.sampled_from([None, 1.0, 500.0])),
            asked_target=draw(st.sampled_from(["", "", "r0", "gone"])),
        )
        for i in range(draw(st.integers(0, 14)))
    ]
    balancing = frozenset(draw(st.sets(st.sampled_from(["chat", "code"]))))
    rates = (("chat", RATES), ("code", Rates(2000)))
    underway = [
        Underway(s.session_id, s.replica_id, f"r{draw(st.integers(0, count - 1))}") for s in sessions[:2]
    ]
    thresholds = (("chat", LIMITS), ("code", LIMITS))
    made = FleetSessions(tuple(holders), tuple(sessions), rates, tuple(underway), thresholds, balancing)
    return counted(made)


@settings(max_examples=300, deadline=None)
@given(fleets(), st.integers(1, 4), st.integers(1, 6), st.integers(0, 20_000_000))
def test_no_plan_breaks_a_turn_or_a_budget(
    world: FleetSessions, per_node: int, per_fleet: int, available: int
) -> None:
    budget = Budget(per_node, per_fleet, available, 20_000_000)
    plan = plan_relocations(world, budget)
    sessions = {s.session_id: s for s in world.sessions}
    holders = {h.replica_id: h for h in world.holders}
    begun = [m.session_id for m in plan.moves]
    assert len(begun) == len(set(begun))
    assert not set(begun) & {u.session_id for u in world.underway}
    nodes: Counter[str] = Counter()
    pairs = [(u.source_id, u.target_id) for u in world.underway]
    before = Counter(node for pair in pairs for node in {holders[r].node_id for r in pair if r in holders})
    for move in plan.moves:
        held, target = sessions[move.session_id], holders[move.target_id]
        assert not held.in_turn
        assert move.source_id == held.replica_id != move.target_id
        assert move.owner_epoch == held.owner_epoch
        assert target.accepts
        assert not target.leaves
        source = holders.get(move.source_id)
        if source is not None:
            assert source.deployment == target.deployment
            assert move.estimate.way != TRANSFER or source.kv_layout == target.kv_layout != ""
            assert move.estimate.way != PREFILL or (source.knows_text and target.knows_text)
        nodes.update({h.node_id for h in (source, target) if h is not None})
    assert len(plan.moves) <= max(0, per_fleet - len(world.underway))
    assert all(nodes[n] <= max(0, per_node - before[n]) for n in nodes)
    sent = [m.estimate.kv_bytes for m in plan.moves if m.estimate.kv_bytes]
    assert sum(sent) <= available or len(sent) == 1
    assert not {s.session_id for s in plan.stays} & set(begun)
    assert plan == plan_relocations(world, budget)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(100, 3_000), min_size=1, max_size=40), st.integers(2, 5), st.data())
def test_repeated_plans_come_to_rest(tokens: list[int], replicas: int, data: st.DataObject) -> None:
    """Applied again and again, with no rest asked for between moves, levelling ends."""
    holders = [holder(f"r{i}", f"n{i}") for i in range(replicas)]
    places = [data.draw(st.integers(0, replicas - 1)) for _ in tokens]
    sessions = [
        session(f"s{i}", f"r{place}", count)
        for i, (count, place) in enumerate(zip(tokens, places, strict=True))
    ]
    eager = replace(LIMITS, rest_seconds=0.0)
    balancing: frozenset[str] = frozenset()
    for _ in range(len(tokens) * 2 + 2):
        plan = plan_relocations(fleet(*holders, *sessions, balancing=balancing, limits=eager), Budget())
        if not plan.moves:
            return
        balancing = plan.balancing
        targets = {m.session_id: m.target_id for m in plan.moves}
        sessions = [replace(s, replica_id=targets.get(s.session_id, s.replica_id)) for s in sessions]
    raise AssertionError("conversations keep moving")


def test_seconds_of_talk_are_not_put_down_to_bytes() -> None:
    moves = [(size, 0.5 + size / 1e9) for size in (2_000, 4_000, 300_000_000, 50_000_000, 1_000)]
    sending = fit_sending(moves)
    assert sending.bytes_per_second == pytest.approx(1e9)
    assert sending.talk_seconds == pytest.approx(0.5)
    rates = Rates(100_000, prefill_tokens_per_second=1000, same_node=sending)
    assert estimate_move(100, rates, same_node=True, same_layout=True).way == RECOMPUTE
    long = estimate_move(8000, rates, same_node=True, same_layout=True)
    assert long.way == TRANSFER
    assert long.transfer_seconds == pytest.approx(0.02 + 0.5 + 0.8)
    even = break_even_tokens(rates, same_node=True)
    assert even == pytest.approx(0.52 / (1 / 1000 - 1e-4))


@pytest.mark.parametrize(
    "moves",
    [
        [(1_000, 2.0), (1_100, 2.1), (1_050, 1.9)],  # alike in size
        [(1_000, 2.0), (9_000, 1.0), (4_000, 1.5)],  # larger ones were faster
        [(1_000, 0.001), (9_000, 0.02), (90_000, 0.3)],  # less than nothing is left for talk
    ],
)
def test_moves_that_show_no_talk_count_as_speed_alone(moves: list[tuple[int, float]]) -> None:
    sending = fit_sending(moves)
    assert sending.talk_seconds == 0
    sent, took = sum(size for size, _ in moves), sum(seconds for _, seconds in moves)
    assert sending.bytes_per_second == pytest.approx(sent / took)


def test_two_moves_are_too_few_to_measure_by() -> None:
    assert fit_sending([(1_000, 1.0), (9_000, 2.0)]) == UNMEASURED
    assert UNMEASURED.seconds(1_000) is None


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.floats(0, 1e4)), max_size=20))
def test_whatever_was_measured_gives_times_that_grow_with_bytes(moves: list[tuple[int, float]]) -> None:
    sending = fit_sending(moves)
    assert sending.talk_seconds >= 0
    small, large = sending.seconds(1_000), sending.seconds(1_000_000)
    if small is not None and large is not None:
        assert 0 <= small <= large
