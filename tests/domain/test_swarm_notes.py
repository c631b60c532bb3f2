"""What the leader counts of a swarm: only what came since, whoever restarts, in a line of bounded length."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from exaserve_ops.weights.domain.swarm_notes import (
    MOST_POINTS,
    Carried,
    MemberSight,
    SwarmNotes,
    with_sights,
)

NEW = SwarmNotes("sha256:0", 1000, 100.0)


def sight(origin: int, peer: int = 0, *, whole: bool = False, speed: float = 5.0) -> MemberSight:
    return MemberSight(Carried(origin, peer), whole, speed)


def test_what_a_seed_had_before_the_swarm_is_not_counted_as_egress_and_what_comes_later_is() -> None:
    noted = with_sights(NEW, {"seed": sight(1000, whole=True), "new": sight(10, 20)}, now_seconds=101.0)
    assert (noted.origin_bytes, noted.peer_bytes) == (10, 20)
    noted = with_sights(noted, {"seed": sight(1000, whole=True), "new": sight(30, 70)}, now_seconds=103.0)
    assert (noted.origin_bytes, noted.peer_bytes) == (30, 70)
    assert (noted.points[-1].whole_nodes, noted.points[-1].bytes_per_second) == (1, 10.0)


def test_an_agent_whose_counts_begin_anew_is_counted_on() -> None:
    noted = with_sights(NEW, {"a": sight(400)}, now_seconds=101.0)
    noted = with_sights(noted, {"a": sight(50)}, now_seconds=103.0)
    assert noted.origin_bytes == 450


def test_a_node_that_says_nothing_for_a_while_is_not_counted_twice() -> None:
    noted = with_sights(NEW, {"a": sight(400)}, now_seconds=101.0)
    noted = with_sights(noted, {}, now_seconds=103.0)
    noted = with_sights(noted, {"a": sight(400)}, now_seconds=105.0)
    assert noted.origin_bytes == 400


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.2, 60.0), min_size=1, max_size=700))
def test_the_line_over_time_is_bounded_rises_and_ends_with_the_newest_look(pauses: list[float]) -> None:
    noted, now, origin = NEW, 100.0, 0
    for pause in pauses:
        now += pause
        origin += 7
        noted = with_sights(noted, {"a": sight(origin)}, now_seconds=now)
    points = noted.points
    assert len(points) <= MOST_POINTS
    assert (points[-1].at_seconds, points[-1].origin_bytes) == (now, origin)
    assert points[0].at_seconds == 100.0 + pauses[0]
    assert all(a.at_seconds < b.at_seconds for a, b in itertools.pairwise(points))
    assert all(a.origin_bytes <= b.origin_bytes for a, b in itertools.pairwise(points))
