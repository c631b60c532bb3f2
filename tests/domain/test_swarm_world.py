"""Whole swarms in virtual time: they finish whatever happens to their members, and spare the origin."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.swarm_world import PIECE_BYTES, SimNode, SwarmWorld

RATE = 10.0 * PIECE_BYTES
PIECES = 120


def world(count: int, *, per_rack: int = 4, pieces: int = PIECES, **rates: float) -> SwarmWorld:
    made = SwarmWorld(pieces, RATE)
    for number in range(count):
        name = f"n{number:02d}"
        made.join(SimNode(name, f"r{number // per_rack}", rates.get(name, RATE)))
    return made


def bound(made: SwarmWorld) -> float:
    return made.pieces * PIECE_BYTES / RATE


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_undisturbed_a_swarm_takes_little_more_than_one_copy_over_one_link(count: int) -> None:
    made = world(count)
    made.run(600)
    assert made.done
    assert made.now < bound(made) * 1.1 + (math.log2(count) + 4) * 2 * PIECE_BYTES / RATE
    assert made.origin_bytes <= 1.01 * PIECES * PIECE_BYTES


def test_three_of_eight_that_die_cost_less_than_half_more() -> None:
    made = world(8, pieces=600)
    for second, name in ((10, "n01"), (20, "n04"), (30, "n06")):
        made.run(second - made.now)
        made.kill(name)
    made.run(600)
    assert made.done
    assert made.now < bound(made) * 1.5


def test_a_control_plane_that_is_away_makes_nobody_storm_the_origin() -> None:
    made = world(20, pieces=600)
    made.run(10)
    made.control_away = True
    made.kill("n00")
    made.kill("n05")
    made.run(30)
    at_most = 2 + 2 * made.policy.stripes
    assert made.most_at_origin <= at_most
    made.control_away = False
    made.run(600)
    assert made.done
    assert made.origin_bytes <= 2.0 * 600 * PIECE_BYTES


def test_a_control_plane_that_begins_anew_in_the_middle_costs_no_second_copy() -> None:
    made = world(20, pieces=600)
    made.run(10)
    for second, name in ((20, "n03"), (30, "n11")):
        made.control_away = True
        made.kill(name)
        made.run(second - made.now - 5)
        made.restart_control()
        made.run(second - made.now)
    made.run(600)
    assert made.done
    assert made.most_at_origin <= 2 + 2 * made.policy.stripes
    assert made.origin_bytes <= 2.0 * 600 * PIECE_BYTES
    assert made.now < bound(made) * 1.5


def test_four_hundred_nodes_whose_parents_are_busy_all_finish_and_spare_the_origin() -> None:
    made = world(400, per_rack=16, pieces=40)
    made.most_streams = 2
    made.run(1)
    # Orphans turn to nodes that give as much as they may already, and nobody tells them of others yet.
    made.control_away = True
    dead = {f"n{number:02d}" for number in range(7, 400, 13)}
    for name in dead:
        made.kill(name)
    made.run(8)
    made.control_away = False
    made.run(300)
    assert made.done
    assert made.turned_away, "some had to come again"
    assert made.verdicts.barred.keys() <= dead, "to be busy is no fault"
    assert made.origin_bytes <= 2.0 * 40 * PIECE_BYTES


def test_one_seed_feeds_eight_at_half_their_links_rate_from_the_start() -> None:
    made = world(8, pieces=600)
    made.join(SimNode("seed", "r9", RATE, here=set(range(600))))
    made.run(6)
    begun = {node.name: len(node.here) for node in made.nodes.values()}
    made.run(15)
    took = {name: (len(made.nodes[name].here) - have) / 15 for name, have in begun.items() if name != "seed"}
    assert min(took.values()) >= 0.5 * RATE / PIECE_BYTES, took
    made.run(600)
    assert made.done
    assert made.origin_bytes == 0, "a seed gives before the origin does"


def test_a_node_that_spoils_pieces_is_found_out_and_left() -> None:
    made = world(8)
    made.nodes["n02"].spoils_every = 2
    made.run(600)
    assert made.done
    assert "n02" in made.verdicts.barred
    assert made.spoilt_sent <= 2 * 8


def test_a_slow_node_becomes_a_leaf_and_holds_up_nobody_else() -> None:
    made = world(8, pieces=600, n00=RATE, n02=RATE / 8)
    others = [node for node in made.nodes.values() if node.name != "n02"]
    while not all(len(node.here) == made.pieces for node in others):
        made.step()
        assert made.now < bound(made) * 1.7, {n.name: len(n.here) for n in others}
    assert made.plan is not None
    assert all(feed.parent != "n02" for feed in made.plan.feeds)


def test_an_origin_that_goes_and_comes_back_is_waited_for() -> None:
    made = world(6)
    made.run(4)
    made.origin_away = True
    made.run(30)
    assert not made.done
    made.origin_away = False
    made.run(600)
    assert made.done
    assert made.origin_bytes <= 1.2 * PIECES * PIECE_BYTES


def test_whoever_comes_back_with_a_part_goes_on_from_there() -> None:
    made = SwarmWorld(PIECES, RATE)
    for number in range(6):
        kept = set(range(0, PIECES, number + 1)) if number else set()
        made.join(SimNode(f"n{number:02d}", "r0", RATE, here=kept))
    made.run(600)
    assert made.done
    assert made.origin_bytes <= 1.01 * PIECES * PIECE_BYTES


happenings = st.lists(
    st.tuples(
        st.integers(0, 25),
        st.sampled_from(["kill", "join", "spoil", "away", "back", "mute", "heard"]),
        st.integers(0, 11),
    ),
    max_size=8,
).map(sorted)


@settings(max_examples=25, deadline=None)
@given(
    rates=st.lists(st.sampled_from([0.3, 0.5, 1.0, 1.0, 1.0, 2.0]), min_size=2, max_size=10),
    happens=happenings,
)
def test_whatever_happens_the_living_finish_and_the_origin_is_spared(
    rates: list[float], happens: list[tuple[int, str, int]]
) -> None:
    made = SwarmWorld(60, RATE)
    for number, rate in enumerate(rates):
        made.join(SimNode(f"n{number:02d}", f"r{number % 3}", rate * RATE))
    for second, what, which in happens:
        made.run(second - made.now)
        happen(made, what, which)
    made.origin_away = made.control_away = False
    made.run(400)
    assert made.done, {n.name: len(n.here) for n in made.living()}
    assert made.most_at_origin <= 2 + 2 * made.policy.stripes
    joined = sum(what == "join" for _, what, _ in happens)
    killed = sum(what in ("kill", "spoil") for _, what, _ in happens)
    assert made.origin_bytes <= (2.0 + killed + joined) * 60 * PIECE_BYTES


def happen(made: SwarmWorld, what: str, which: int) -> None:
    """One happening; at least one sound node is left alive."""
    names = sorted(made.nodes)
    name = names[which % len(names)]
    sound = [node for node in made.living() if not node.spoils_every and node.name != name]
    if what == "kill" and sound:
        made.kill(name)
    elif what == "join":
        made.join(SimNode(f"n{len(names):02d}", f"r{which % 3}", RATE))
    elif what == "spoil" and sound:
        made.nodes[name].spoils_every = 2
    elif what in ("away", "back"):
        made.origin_away = what == "away"
    elif what in ("mute", "heard"):
        made.control_away = what == "mute"
