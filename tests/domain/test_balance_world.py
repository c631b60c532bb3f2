"""Balancing on a virtual clock: what must never happen, and where it must end once load stands still."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from exaserve_ops.sessions.domain.pace import BytePace, MoveLimits
from exaserve_ops.sessions.domain.relocation import Thresholds
from tests.fakes.session_world import SessionWorld

SEEDS = st.integers(0, 2**32)


def lively(seed: int) -> SessionWorld:
    """Conversations come, grow and go quiet; replicas begin to leave; leaders change."""
    world = SessionWorld(
        seed,
        MoveLimits(
            moves_per_node=1 + seed % 3,
            moves_per_fleet=1 + seed % 5,
            fleet_bytes_per_second=(seed % 4 + 1) * 200_000,
        ),
        grows=True,
        sees_turns=bool(seed % 2),
    )
    replicas = 2 + seed % 5
    world.populate(replicas=replicas, talks=10 + seed % 30, skew=(seed % 7) / 6)
    for part in range(10):
        world.run(30)
        world.change_leader()
        for _ in range(world.random.randrange(3)):
            home = f"r{world.random.randrange(replicas)}"
            world.arrive(f"s{part}-{len(world.talks)}", home, world.random.randint(100, 2_500))
        if part == 6 and replicas > 2 and seed % 3 == 0:
            world.places["r1"].leaves = "node n0 is drained"
    return world


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_budget_rest_and_direction_hold_whatever_happens(seed: int) -> None:
    world = lively(seed)
    assert world.most_underway <= world.limits.moves_per_fleet
    assert world.most_on_a_node <= world.limits.moves_per_node
    limits = world.thresholds
    by_session: dict[str, list[float]] = {}
    by_pair: dict[tuple[str, str], list[float]] = {}
    for began, move in world.done:
        by_session.setdefault(move.session_id, []).append(began)
        by_pair.setdefault((move.source_id, move.target_id), []).append(began)
    for times in by_session.values():
        assert all(later - sooner >= limits.rest_seconds for sooner, later in pairwise(times))
    swaps = [
        (when, move.source_id, move.target_id) for when, move in world.swapped if move.trigger == "balance"
    ]
    for when, source, target in swaps:
        back = [t for t in by_pair.get((target, source), ()) if 0 <= t - when < limits.return_seconds]
        assert not back, "two replicas exchange sessions"


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_known_turns_are_never_interrupted_and_bytes_stay_within_the_pace(seed: int) -> None:
    world = SessionWorld(
        seed, MoveLimits(99, 99, fleet_bytes_per_second=400_000), grows=True, sees_turns=True
    )
    world.populate(replicas=4, talks=40, skew=0.7)
    world.run(200)
    assert world.sent
    for when in {at for at, _ in world.sent}:
        window = [size for at, size in world.sent if when - 60 <= at <= when]
        assert sum(window) <= world.limits.burst_bytes + 60 * 400_000 + max(window)
    assert world.begun_in_turn == []


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_imbalance_falls_under_the_lower_threshold_and_everything_comes_to_rest(seed: int) -> None:
    world = SessionWorld(seed, MoveLimits(moves_per_node=2, moves_per_fleet=4))
    world.populate(replicas=2 + seed % 5, talks=40, skew=0.8, largest=600)
    world.run(600)
    begun = len(world.done)
    if world.levelled_once:
        assert world.gap() <= world.thresholds.stop_gap_ratio
        assert world.balancing == frozenset()
    world.run(400)
    assert len(world.done) == begun, "load stands still, and so does who has it"


def test_levelling_really_levels() -> None:
    """One world looked at closely, so that the properties above do not hold of nothing."""
    world = SessionWorld(1, MoveLimits(moves_per_node=2, moves_per_fleet=4))
    world.populate(replicas=4, talks=40, skew=0.9, largest=600)
    before = world.gap()
    world.run(600)
    assert before > 0.8
    assert world.gap() <= Thresholds().stop_gap_ratio
    assert 10 <= len(world.swapped) <= 40


def test_pace_grows_back_to_its_burst_and_no_further() -> None:
    limits = MoveLimits(fleet_bytes_per_second=100)
    pace = BytePace(limits, 0.0)
    pace.take(500)
    assert pace.budget(0.0).bytes_available == -300
    assert pace.budget(2.0).bytes_available == -100
    assert pace.budget(99.0).bytes_available == limits.burst_bytes == 200
    assert pace.budget(98.0).bytes_available == 200, "a clock that goes back takes nothing away"
