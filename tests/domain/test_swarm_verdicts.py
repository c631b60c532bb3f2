"""Who is slow, and who is not: a child that waits, or caps itself, says nothing about its parent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from exaserve_ops.rollouts.domain.swarm import SwarmPlan
from exaserve_ops.rollouts.domain.swarm_health import Complaint, FeedSeen, judge

SHARE = 50e6
PLAN = SwarmPlan(2, (), (), 2 * SHARE, 10.0)


def seen(child: str, parent: str, rate: float = SHARE, *, stripe: int = 0) -> FeedSeen:
    return FeedSeen(child, stripe, parent, rate, 0.0, 9.0)


USUAL = [seen("a", "p"), seen("b", "p"), seen("c", "q"), seen("d", "q")]


def test_a_parent_whose_every_child_gets_little_is_slow_and_its_rate_is_what_it_gave() -> None:
    feeds = [*USUAL, seen("e", "slow", 9e6), seen("f", "slow", 11e6)]
    assert judge(PLAN, feeds, []).sends == {"slow": 20e6}


def test_a_child_that_gets_little_from_parents_that_serve_others_well_is_slow_itself() -> None:
    feeds = [*USUAL, seen("e", "p", 5e6), seen("e", "q", 5e6, stripe=1)]
    verdicts = judge(PLAN, feeds, [])
    assert verdicts.receives == {"e": 10e6}
    assert verdicts.sends == {}


@pytest.mark.parametrize(
    "facts",
    [{"starved_ratio": 0.5}, {"capped": True}, {"lasted_seconds": 1.0}, {"parent": "origin"}],
    ids=["its parent has nothing newer", "its own cap", "it has just begun", "from the origin"],
)
def test_a_slow_stream_with_another_reason_blames_nobody(facts: dict[str, Any]) -> None:
    verdicts = judge(PLAN, [*USUAL, replace(seen("e", "r", 1e6), **facts)], [])
    assert (verdicts.sends, verdicts.receives) == ({}, {})


def test_links_that_are_all_slower_than_they_were_said_to_be_make_nobody_slow() -> None:
    assert judge(PLAN, [replace(feed, bytes_per_second=4e6) for feed in USUAL], []).sends == {}


def test_verdicts_stay_and_only_get_lower() -> None:
    before = judge(PLAN, [*USUAL, seen("e", "slow", 10e6)], [Complaint("e", "bad", bad_pieces=2)])
    after = judge(PLAN, USUAL, [], before)
    assert after.sends == {"slow": 10e6}
    assert after.barred == {"bad": "2 of its pieces were damaged"}
    lower = judge(PLAN, [*USUAL, seen("e", "slow", 3e6)], [], after)
    assert lower.sends == {"slow": 3e6}


def test_one_child_that_cannot_reach_a_parent_is_parted_and_two_bar_it() -> None:
    one = judge(PLAN, [], [Complaint("a", "p", unreachable=True)])
    assert (one.barred, one.apart) == ({}, frozenset({("a", "p")}))
    two = judge(PLAN, [], [Complaint("a", "p", unreachable=True), Complaint("b", "p", unreachable=True)])
    assert two.barred == {"p": "a, b cannot pull from it"}
