"""The rules of sharing, alone and over thousands of random nodes."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from workers.kv.sharing import Member, decide, grant, idle_surplus, share_out

QUICK = set(Phase) - {Phase.explain}  # explaining traces every line, which takes ten times as long
MANY = settings(max_examples=1000, deadline=None, phases=QUICK)


def member(slot: int, **fields: int) -> Member:
    base = {"minimum": 0, "ceiling": 1000, "leased": 0, "live": 0, "needed": 0}
    return Member(slot=slot, **{**base, **fields})


def test_smallest_share_is_as_large_as_can_be() -> None:
    members = [member(0, needed=2), member(1, needed=50), member(2, needed=50)]
    assert share_out(30, members) == [2, 14, 14]


def test_guarantee_comes_before_fairness() -> None:
    members = [member(0, needed=20, minimum=20), member(1, needed=50), member(2, needed=50)]
    assert share_out(30, members) == [20, 5, 5]


def test_guarantee_that_is_not_needed_is_lent() -> None:
    members = [member(0, minimum=20), member(1, needed=50)]
    assert share_out(30, members) == [0, 30]


def test_requests_are_set_back_for_a_guarantee_and_never_for_a_fair_share() -> None:
    full = member(0, leased=30, live=30, needed=30)
    for minimum, preempt in ((0, 0), (10, 10)):
        verdict, _ = decide(30, [full, member(1, needed=15, minimum=minimum)])
        assert (verdict.give_back, verdict.preempt) == (15, preempt)


def test_cached_extents_are_asked_back_before_live_ones() -> None:
    caching = member(0, leased=15, live=2, needed=2)
    working = member(1, leased=15, live=15, needed=15)
    verdicts = decide(30, [caching, working, member(2, needed=10, minimum=10)])
    assert [(v.give_back, v.preempt) for v in verdicts] == [(10, 0), (0, 0), (0, 0)]


def test_nobody_may_take_what_another_one_is_guaranteed_and_waits_for() -> None:
    waiting = member(1, needed=10, minimum=10, leased=4)
    assert grant(30, [member(0, leased=18, live=18, needed=40), waiting], 0, 8).extents == 2


def test_cache_takes_only_what_nobody_needs() -> None:
    caching = member(0, leased=10, live=1, needed=1)
    assert grant(30, [caching, member(1, leased=10, live=10, needed=18)], 0, 50).extents == 2


@pytest.mark.parametrize(
    ("leased", "minimum", "peak", "surplus"), [(10, 2, 3, 6), (10, 9, 3, 1), (4, 2, 3, 0), (3, 5, 0, 0)]
)
def test_a_steady_load_keeps_one_extent_in_reserve(
    leased: int, minimum: int, peak: int, surplus: int
) -> None:
    assert idle_surplus(leased=leased, minimum=minimum, recent_peak=peak) == surplus


@dataclass
class Node:
    """A node in which every replica follows the rules at once."""

    capacity: int
    members: list[Member]

    def round(self) -> int:
        """Each replica gives what it is asked for and can, then asks; returns how many extents moved."""
        moved = 0
        for index in range(len(self.members)):
            moved += self._give(index)
        for index in range(len(self.members)):
            me = self.members[index]
            asked = max(0, me.useful - me.leased)
            got = grant(self.capacity, self.members, me.slot, asked).extents
            assert 0 <= got <= asked
            # What it got it fills at once: nothing is left that could be asked back cheaply.
            leased = me.leased + got
            self.members[index] = replace(me, leased=leased, live=min(leased, me.needed))
            moved += got
            self.check()
        return moved

    def _give(self, index: int) -> int:
        me = self.members[index]
        verdict = decide(self.capacity, self.members)[index]
        empty = me.leased - me.live
        given = min(verdict.give_back, max(empty, 0)) if verdict.preempt == 0 else verdict.give_back
        leased = me.leased - given
        self.members[index] = replace(me, leased=leased, live=min(me.live, leased))
        return given

    def check(self) -> None:
        assert sum(m.leased for m in self.members) <= self.capacity
        assert all(m.leased <= m.ceiling for m in self.members)


def random_node(seed: int) -> Node:
    """Make one of many nodes; a seed instead of drawn values makes thousands of them cheap."""
    numbers = random.Random(seed)  # noqa: S311 - test data
    brought = [numbers.randint(1, 20) for _ in range(numbers.randint(1, 12))]
    capacity = left = sum(brought)
    members = []
    for slot, mine in enumerate(brought):
        minimum = numbers.choice([0, mine, numbers.randint(0, mine)])
        ceiling = numbers.choice([capacity + 5, numbers.randint(max(minimum, 1), capacity + 5)])
        leased = numbers.choice([0, min(left, ceiling), numbers.randint(0, min(left, ceiling))])
        left -= leased
        live = numbers.choice([0, leased, numbers.randint(0, leased)])
        needed = numbers.choice([0, live, numbers.randint(0, 2 * capacity)])
        members.append(
            member(slot, minimum=minimum, ceiling=ceiling, leased=leased, live=live, needed=needed)
        )
    return Node(capacity, members)


nodes = st.builds(random_node, st.integers(0, 1 << 48))


@MANY
@given(node=nodes)
def test_guarantees_are_reached_in_two_rounds_whatever_the_others_hold(node: Node) -> None:
    for _ in range(2):
        node.round()
    for replica in node.members:
        assert replica.leased >= replica.floor, node


@MANY
@given(node=nodes)
def test_steady_demand_comes_to_rest_and_stays(node: Node) -> None:
    for _ in range(4):
        node.round()
    assert node.round() == 0
    before = list(node.members)
    node.round()
    assert node.members == before


@MANY
@given(node=nodes)
def test_once_running_requests_end_every_share_is_fair(node: Node) -> None:
    for index, replica in enumerate(node.members):
        node.members[index] = replace(replica, live=0)
    for _ in range(4):
        node.round()
        # Requests end and others take their place: everything above a share can be given back.
        verdicts = decide(node.capacity, node.members)
        node.members = [
            replace(m, live=min(m.live, max(0, m.leased - v.give_back)))
            for m, v in zip(node.members, verdicts, strict=True)
        ]
    shares = share_out(node.capacity, node.members)
    for replica, share in zip(node.members, shares, strict=True):
        assert replica.leased >= share
    assert_max_min_fair(node.capacity, node.members, shares)


def assert_max_min_fair(capacity: int, members: list[Member], shares: list[int]) -> None:
    """No share can grow but by shrinking one that is not larger, or one that is guaranteed."""
    assert sum(shares) <= capacity
    short = [(share, m) for share, m in zip(shares, members, strict=True) if share < m.useful]
    if short:
        assert sum(shares) == capacity, "something is free while somebody is short"
    for share, _ in short:
        for other, m in zip(shares, members, strict=True):
            assert other <= share + 1 or other <= m.floor


@MANY
@given(node=nodes)
def test_what_is_asked_back_is_what_is_short_and_comes_from_excess_alone(node: Node) -> None:
    verdicts = decide(node.capacity, node.members)
    free = node.capacity - sum(m.leased for m in node.members)
    short = sum(max(0, v.target - m.leased) for v, m in zip(verdicts, node.members, strict=True))
    assert sum(v.give_back for v in verdicts) == max(0, short - free)
    for verdict, replica in zip(verdicts, node.members, strict=True):
        assert 0 <= verdict.preempt <= verdict.give_back <= max(0, replica.leased - verdict.target)
        assert replica.leased - verdict.give_back >= min(replica.leased, replica.floor)
