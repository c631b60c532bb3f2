"""What rollouts decide: policies, waves, gates, and the next step."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exaserve_ops.rollouts.domain.actions import Leave, LetGo, MoveRollout, MoveWave, Roll, Stay, Wait
from exaserve_ops.rollouts.domain.driving import decide
from exaserve_ops.rollouts.domain.gates import (
    CLOSED,
    CRASHES,
    ERRORS,
    NO_DATA,
    OPEN,
    READINESS,
    TTFT,
    Answers,
    Gate,
    Health,
    judge,
)
from exaserve_ops.rollouts.domain.policy import PolicyError, RolloutPolicy, read_policy, resolve
from exaserve_ops.rollouts.domain.preflight import PreflightFacts, ReleaseContent, plan_rollout
from exaserve_ops.rollouts.domain.spread_of_values import bucket_of, quantile_seconds, upper_seconds
from exaserve_ops.rollouts.domain.view import RolloutView, Seat, WaveState, WeightsUnderWay
from exaserve_ops.rollouts.domain.waves import Candidate, plan_waves

NOW = datetime(2026, 1, 1, tzinfo=UTC)
POLICY = RolloutPolicy(min_requests=10)


def test_both_zero_leaves_no_way_and_is_refused() -> None:
    with pytest.raises(PolicyError, match="allow one of them"):
        read_policy({"max_surge": "0%", "max_unavailable": 0})
    assert read_policy({"max_surge": 0, "max_unavailable": 1}).max_unavailable == "1"


@pytest.mark.parametrize(
    ("count", "wanted", "found"), [("3", 10, 3), ("25%", 10, 2), ("1%", 10, 1), ("0%", 10, 0)]
)
def test_counts_and_shares(count: str, wanted: int, found: int) -> None:
    assert resolve(count, wanted) == found


def test_kept_policy_is_read_back() -> None:
    policy = read_policy({"growth": ["2", "50%"], "approve_waves": [3, 2], "max_ttft_ratio": 2})
    assert read_policy(policy.to_json()) == policy
    assert policy.approve_waves == (2, 3)


@given(
    domains=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    growth=st.lists(st.sampled_from(["1", "3", "10%", "100%"]), min_size=1, max_size=4),
)
def test_waves_have_everybody_once_start_with_the_canary_and_cross_no_domain(
    domains: list[int], growth: list[str]
) -> None:
    candidates = [
        Candidate(f"r{domain}-{index}", f"r{domain}-{index}", f"rack {domain}")
        for domain, count in enumerate(domains)
        for index in range(count)
    ]
    policy = read_policy({"growth": growth})
    waves = plan_waves(candidates, policy)
    members = [key for wave in waves for key in wave.replica_ids]
    assert sorted(members) == sorted(c.replica_id for c in candidates)
    assert len(waves[0].replica_ids) == 1
    assert [wave.number for wave in waves] == list(range(1, len(waves) + 1))
    home = {c.replica_id: c.domain for c in candidates}
    for wave in waves:
        assert {home[key] for key in wave.replica_ids} == {wave.domain}
    assert plan_waves(reversed(candidates), policy) == waves


def answers(requests: int, failed: int = 0, ttft_seconds: float = 0.3) -> Answers:
    kinds = {"stream:64": {bucket_of(ttft_seconds): requests}} if requests else {}
    return Answers(requests, failed, kinds, {bucket_of(0.02): requests} if requests else {})


def gate(name: str, new: Answers, old: Answers, health: Health | None = None) -> Gate:
    gates = judge(new, old, health or Health(1, 1), POLICY)
    return next(one for one in gates if one.name == name)


@pytest.mark.parametrize(
    ("new", "old", "name", "state"),
    [
        (answers(50), answers(50), ERRORS, OPEN),
        (answers(50, 5), answers(50), ERRORS, CLOSED),
        (answers(50, 5), answers(50, 5), ERRORS, OPEN),
        (answers(5), answers(50), ERRORS, NO_DATA),
        (answers(5, 5), answers(50), ERRORS, CLOSED),
        (answers(50), answers(50), TTFT, OPEN),
        (answers(50, ttft_seconds=2.0), answers(50), TTFT, CLOSED),
        (answers(50, ttft_seconds=2.0), answers(50, ttft_seconds=1.9), TTFT, OPEN),
        (answers(50, ttft_seconds=2.0), answers(3), TTFT, OPEN),
        (answers(50, ttft_seconds=0.2), answers(50, ttft_seconds=0.01), TTFT, OPEN),
        (answers(3), answers(50), TTFT, NO_DATA),
    ],
)
def test_gates_compare_with_the_old_release(new: Answers, old: Answers, name: str, state: str) -> None:
    found = gate(name, new, old)
    assert found.state == state
    assert found.why


def test_gates_of_health() -> None:
    fine = answers(50)
    assert gate(READINESS, fine, fine, Health(2, 1, ("b is loading",))).state == NO_DATA
    assert gate(CRASHES, fine, fine, Health(1, 0, failed=("a: corrupt",))).state == CLOSED
    assert gate(CRASHES, fine, fine, Health(1, 1, restarts=2, restarted="a")).state == CLOSED
    assert gate(CRASHES, fine, fine, Health(1, 1, restarts=1, restarted="a")).state == OPEN


@given(st.lists(st.floats(0.001, 100.0), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_quantiles_are_at_most_a_tenth_too_long(values: list[float], share: float) -> None:
    buckets: dict[int, int] = {}
    for value in values:
        buckets[bucket_of(value)] = buckets.get(bucket_of(value), 0) + 1
    exact = sorted(values)[max(0, -(-int(share * len(values) * 1000) // 1000) - 1)]
    found = quantile_seconds(buckets, share)
    assert found is not None
    assert found >= exact * 0.9999
    assert upper_seconds(bucket_of(exact)) <= exact * 1.1001
    assert quantile_seconds({}, share) is None


def seat(name: str, release: str = "old", **changes: object) -> Seat:
    fields: dict[str, object] = {"status": "ready", "is_wanted": True, "domain": "rack a", "node_id": "n"}
    return Seat(name, name, release, **(fields | changes))  # type: ignore[arg-type]  # fields of a seat


def view(*seats: Seat, **changes: object) -> RolloutView:
    fields: dict[str, object] = {
        "status": "running",
        "policy": RolloutPolicy(min_requests=0),
        "wanted": 2,
        "surge": 1,
        "unavailable": 1,
        "waves": (wave("moving", ("a", "b")),),
        "running_since": NOW,
        "move_seconds": 600.0,
    }
    return RolloutView(
        id="r", old_release="old", new_release="new", seats=seats, **(fields | changes)  # type: ignore[arg-type]  # of a view
    )  # fmt: skip


def wave(status: str, members: tuple[str, ...] = (), **changes: object) -> WaveState:
    fields: dict[str, object] = {
        "soak_seconds": 60,
        "needs_approval": False,
        "since": NOW,
        "members": members,
    }
    given = {"number": 1, "status": status, "domain": "rack a", "planned": 2, **fields, **changes}
    return WaveState(**given)  # type: ignore[arg-type]  # of a wave


def test_only_as_many_make_way_at_once_as_may_surge() -> None:
    [roll] = [a for a in decide(view(seat("a"), seat("b")), NOW) if isinstance(a, Roll)]
    assert (roll.replica_ids, roll.in_place) == (("a",), False)
    begun = view(seat("a", rolls_to="new"), seat("b"), seat("c", "new", replaces="a", status="loading"))
    assert [a for a in decide(begun, NOW) if isinstance(a, Wait)] == [Wait("c is loading")]


def test_sessions_have_their_time_before_the_old_one_goes() -> None:
    new = seat("c", "new", replaces="a")
    left = seat("a", rolls_to="new", leaving_since=NOW, sessions_left=2)
    assert not [a for a in decide(view(left, seat("b"), new), NOW) if isinstance(a, LetGo)]
    later = NOW + timedelta(seconds=61)
    assert [a.replica_ids for a in decide(view(left, seat("b"), new), later) if isinstance(a, LetGo)] == [
        ("a",)
    ]


def test_in_place_waits_while_others_are_missing_by_whatever_cause() -> None:
    moving = (wave("moving", ("a", "b"), mode="in_place"),)
    lost = seat("b", status="unreachable", node_alive=False)
    taken = [
        a.replica_ids for a in decide(view(seat("a"), lost, waves=moving), NOW) if isinstance(a, Roll | Leave)
    ]
    assert taken == [("b",)], "who serves nobody may go; who serves may not"
    steps = decide(view(seat("a"), seat("c", status="loading"), waves=moving, wanted=2), NOW)
    assert [type(step) for step in steps if isinstance(step, Roll | Wait)] == [Wait]


def test_wave_that_failed_turns_back_even_if_the_controller_died_in_between() -> None:
    failed = (wave("failed", why="given up: c"),)
    [turn] = decide(view(seat("a"), waves=failed), NOW)
    assert turn == MoveRollout("roll_back", "wave 1 failed: given up: c")
    resumed = view(seat("a"), waves=failed, running_since=NOW + timedelta(seconds=1))
    assert decide(resumed, NOW) == [MoveWave(1, "retry", "somebody lets it go on")]


def test_weights_that_are_spoilt_turn_the_rollout_back_before_anybody_moved() -> None:
    waves = (wave("prewarming", ("a", "b")),)
    old = seat("a", node_name="node-1")
    away = WeightsUnderWay({"node-1": "the origin is away"})
    assert [type(step) for step in decide(view(old, waves=waves, weights=away), NOW)] == [Wait]
    told = {"node-1": "3 pieces from /models were damaged"}
    [fail, back] = decide(view(old, waves=waves, weights=WeightsUnderWay(told, told)), NOW)
    assert isinstance(fail, MoveWave)
    assert (fail.event, fail.why) == (
        "fail",
        "weights are spoilt: node-1: 3 pieces from /models were damaged",
    )
    assert back == MoveRollout("roll_back", fail.why)


def test_standing_still_undoes_only_what_has_not_begun() -> None:
    pair = (seat("a", rolls_to="new"), seat("c", "new", replaces="a", status="loading"))
    steps = decide(view(*pair, seat("b", leaving_since=NOW), status="halted"), NOW)
    assert steps == [Stay(("b",), "the rollout stands still")]


def test_going_back_marks_all_that_serve_nobody_and_ends_when_none_is_left() -> None:
    back = view(seat("a"), seat("c", "new", status="failed"), status="rolling_back", surge=1)
    assert any(
        isinstance(a, Roll) and a.replica_ids == ("c",) and a.release == "old" for a in decide(back, NOW)
    )
    assert decide(view(seat("a"), seat("b"), status="rolling_back"), NOW) == [
        MoveRollout("finish_back", "every replica runs the old release again")
    ]


def test_those_that_are_about_to_go_count_as_missing_already() -> None:
    """The plan may not have let the first one go yet when the second one's sessions have left."""
    moving = (wave("moving", ("a", "b"), mode="in_place"),)
    going = seat("a", rolls_to="new", in_place=True, leaving_since=NOW)
    steps = decide(view(going, seat("b", leaving_since=NOW), waves=moving), NOW)
    assert not [a for a in steps if isinstance(a, Roll)]


def test_nothing_but_the_canary_tries_the_release_first_even_if_the_canary_came_to_nothing() -> None:
    passed = wave("passed", why="nothing of it is left to make way")
    waves = (replace(passed, planned=1), replace(wave("waiting"), number=2))
    [opened] = decide(view(seat("a"), seat("b"), waves=waves), NOW)
    assert isinstance(opened, MoveWave)
    assert opened.members == ("a",)
    proven = view(seat("a"), seat("b"), seat("c", "new"), waves=waves)
    assert [a.members for a in decide(proven, NOW) if isinstance(a, MoveWave)] == [("a", "b")]


@pytest.mark.parametrize("status", ["moving", "soaking"])
def test_wave_of_which_nothing_runs_the_new_release_is_opened_anew(status: str) -> None:
    """Healing or scaling took the one new replica away: no gate may open for want of anything to look at."""
    steps = decide(view(seat("b"), seat("d"), waves=(wave(status, ("a",)),)), NOW + timedelta(hours=1))
    assert [a.event for a in steps if isinstance(a, MoveWave)] == ["reopen"]


def test_wave_that_comes_on_slowly_is_let_go_on_and_one_that_stands_says_what_it_lacks() -> None:
    moving = (wave("moving", ("a", "b"), mode="in_place"),)
    lost = seat("b", status="unreachable", node_alive=False, node_name="n7")
    late = NOW + timedelta(seconds=700)
    came = seat("c", "new", since=NOW + timedelta(seconds=300))
    away = seat("d", status="loading", rolls_to="new")
    assert not [
        a
        for a in decide(view(seat("a"), lost, came, waves=moving, wanted=4), late)
        if isinstance(a, MoveRollout)
    ]
    [halt] = [
        a for a in decide(view(seat("a"), away, waves=moving, wanted=4), late) if isinstance(a, MoveRollout)
    ]
    assert halt.event == "halt"
    assert "3 of 4 replicas are missing, 1 may be: d is loading" in halt.why


def test_release_is_blamed_only_for_what_starts_without_end() -> None:
    late = NOW + timedelta(seconds=700)
    moving = (wave("moving", ("a",)),)
    fresh = seat("c", "new", status="loading", since=late - timedelta(seconds=20))
    assert [a.event for a in decide(view(fresh, waves=moving), late) if isinstance(a, MoveRollout)] == [
        "halt"
    ]
    stuck = replace(fresh, since=NOW)
    turned = [a for a in decide(view(stuck, waves=moving), late) if isinstance(a, MoveRollout)]
    assert [a.event for a in turned] == ["roll_back"]
    assert "c is loading" in turned[0].why


def test_node_that_is_away_holds_no_weights_up() -> None:
    prewarming = (wave("prewarming", ("a", "b")),)
    unready = WeightsUnderWay({"n1": "its store does not answer"})
    away = seat("a", status="unreachable", node_alive=False, node_name="n1")
    [begun] = decide(view(away, seat("b", node_name="n2"), waves=prewarming, weights=unready), NOW)
    assert isinstance(begun, MoveWave)
    assert begun.event == "begin"
    waits = decide(view(seat("a", node_name="n1"), waves=prewarming, weights=unready), NOW)
    assert [type(a) for a in waits] == [Wait]


def test_no_room_for_a_while_is_waited_out() -> None:
    full = view(seat("a"), unavailable=0, has_surge_room=False, waves=(wave("waiting"),))
    assert [type(a) for a in decide(full, NOW)] == [Wait]
    [halt] = decide(full, NOW + timedelta(seconds=601))
    assert isinstance(halt, MoveRollout)
    assert "no room for one more replica" in halt.why


def test_way_back_does_not_undo_the_pair_that_took_the_last_room() -> None:
    pair = (seat("a", "new", rolls_to="old"), seat("c", replaces="a", status="loading"))
    steps = decide(view(*pair, status="rolling_back", has_surge_room=False), NOW)
    assert not [a for a in steps if isinstance(a, Stay)]


def lone(node: int, count: int = 4) -> list[Candidate]:
    name = f"n{node:03}"
    return [Candidate(f"{name}-{index}", f"{name}-{index}", f"node {name}", name) for index in range(count)]


def test_nodes_without_a_rack_make_way_together_as_many_as_may_at_once() -> None:
    """Else a fleet of hundreds of nodes would be hundreds of waves, each of them watched."""
    candidates = [one for node in range(10) for one in lone(node)]
    policy = read_policy({"growth": ["100%"]})
    waves = plan_waves(candidates, policy, width=12)
    assert len(waves[0].replica_ids) == 1, "the canary"
    groups = list(dict.fromkeys(one.domains for one in waves))
    assert [len(group) for group in groups] == [3, 3, 3, 1]
    assert sorted(key for one in waves for key in one.replica_ids) == sorted(c.replica_id for c in candidates)
    assert waves[1].domain == "3 nodes without a rack, n000 to n002"
    assert waves[-1].domain == "node n009"
    mixed = [*lone(1), Candidate("r", "r", "rack a"), Candidate("s", "s", "rack b")]
    racked = plan_waves(mixed, policy, width=99)
    assert [one.domains for one in racked[:3]] == [("rack a",), ("rack b",), ("node n001",)]


def test_wave_over_several_nodes_takes_members_from_all_of_them_and_from_no_other() -> None:
    waves = (wave("waiting", domain="2 nodes", domains=("node a", "node b"), planned=4),)
    seats = [seat(name, domain=f"node {name}") for name in "abc"]
    [opened] = decide(view(*seats, seat("n", "new"), waves=waves), NOW)
    assert isinstance(opened, MoveWave)
    assert opened.members == ("a", "b")


def test_nodes_without_a_rack_go_back_together_too() -> None:
    new = [
        seat(f"{node}{index}", "new", domain=f"node {node}", status="ready")
        for node in "abcd"
        for index in range(2)
    ]
    steps = decide(view(*new, status="rolling_back", surge=0, unavailable=4, wanted=8), NOW)
    assert [a.replica_ids for a in steps if isinstance(a, Leave)] == [("a0", "a1", "b0", "b1")]
    racked = [replace(one, domain=one.domain.replace("node", "rack")) for one in new]
    steps = decide(view(*racked, status="rolling_back", surge=0, unavailable=4, wanted=8), NOW)
    assert [a.replica_ids for a in steps if isinstance(a, Leave)] == [("a0", "a1")]


def test_plan_over_nodes_without_racks_says_that_they_stand_together_and_how_long_it_takes() -> None:
    content = ReleaseContent(1, "m", "m", "torch", {}, 1 << 30)
    facts = PreflightFacts(
        deployment="d",
        wanted=3072,
        old=content,
        new=replace(content, number=2),
        candidates=tuple(one for node in range(256) for one in lone(node, 12)),
        surge_room=0,
        no_surge_why="",
    )
    plan = plan_rollout(facts, read_policy({"max_unavailable": "5%", "max_surge": 0}))
    assert 20 < len(plan.waves) < 60
    assert any("up to 12 nodes make way in one wave" in warning for warning in plan.warnings)
    alone = plan_rollout(facts, read_policy({"max_unavailable": "12", "max_surge": 0}))
    assert len(alone.waves) > 256
    assert not any("make way in one wave" in warning for warning in alone.warnings)
    assert plan.estimate.seconds < alone.estimate.seconds / 5


def test_one_that_was_away_while_its_sessions_left_goes_in_its_turn_all_the_same() -> None:
    """It was marked for serving nobody, and answers again: without room for a successor nobody lets it go."""
    moving = (wave("moving", ("a", "b"), mode="in_place"),)
    back = seat("a", rolls_to="new", leaving_since=NOW)
    [roll] = [a for a in decide(view(back, seat("b"), waves=moving), NOW) if isinstance(a, Roll)]
    assert (roll.replica_ids, roll.in_place) == (("a",), True)
