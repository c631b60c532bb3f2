"""Plans of swarms: everyone is fed, links carry what they can, racks are crossed once, deaths move few."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exaserve_ops.rollouts.domain.swarm import ORIGIN, Feed, Origin, Peer, Swarm, SwarmPlan, SwarmPolicy
from exaserve_ops.rollouts.domain.swarm_planning import plan_swarm

RATE = 1.25e9
GB = 10**9


def peer(number: int, rack: str = "", **changes: object) -> Peer:
    plain = Peer(f"n{number:03d}", rack, 0.0, RATE, RATE)
    return replace(plain, **changes)  # type: ignore[arg-type]  # fields by name


def swarm(count: int, per_rack: int = 16) -> Swarm:
    peers = tuple(peer(n, f"r{n // per_rack:02d}") for n in range(count))
    return Swarm(140 * GB, 4 << 20, peers, Origin(RATE))


def racks(of: Swarm) -> dict[str, str]:
    return {p.node_id: p.rack for p in of.peers}


def load(plan: SwarmPlan) -> Counter[str]:
    return Counter(feed.parent for feed in plan.feeds)


def roots_of(plan: SwarmPlan, child: str, stripe: int) -> str:
    """Follow parents up; fails on a circle."""
    parents = {feed.child: feed.parent for feed in plan.feeds if feed.stripe == stripe}
    seen = {child}
    while child in parents:
        child = parents[child]
        assert child not in seen, "a circle of parents"
        seen.add(child)
    return child


@pytest.mark.parametrize(
    ("count", "per_rack"), [(1, 1), (2, 2), (3, 3), (4, 2), (5, 5), (16, 4), (16, 1), (64, 8)]
)
def test_every_node_gets_every_stripe_and_no_uplink_is_over_its_rate(count: int, per_rack: int) -> None:
    of = swarm(count, per_rack)
    plan = plan_swarm(of)
    assert {(f.child, f.stripe) for f in plan.feeds} == {(p.node_id, s) for p in of.peers for s in (0, 1)}
    assert max(load(plan).values()) <= 2, "with two stripes an uplink carries two of them"
    assert plan.origin_copies() == 1.0
    assert {roots_of(plan, f.child, f.stripe) for f in plan.feeds} == {ORIGIN}


@pytest.mark.parametrize(("count", "per_rack"), [(256, 16), (256, 256), (256, 8)])
def test_a_stripe_comes_into_each_rack_once_and_a_fleet_is_not_deep(count: int, per_rack: int) -> None:
    of = swarm(count, per_rack)
    plan = plan_swarm(of)
    assert plan.crossings(racks(of)) == 2 * (count // per_rack - 1)
    assert max(f.depth for f in plan.feeds) <= count // per_rack + 8
    assert plan.expected_seconds < 1.05 * 140 * GB / RATE


def test_a_death_moves_only_the_orphans_of_the_dead() -> None:
    of = swarm(64, 8)
    plan = plan_swarm(of)
    dead = next(f.parent for f in plan.feeds if f.depth == 4)
    after = plan_swarm(replace(of, peers=tuple(p for p in of.peers if p.node_id != dead)), plan)
    before = {(f.child, f.stripe): f.parent for f in plan.feeds}
    moved = [f for f in after.feeds if before[f.child, f.stripe] != f.parent]
    assert {(f.child, f.stripe) for f in moved} == {key for key, p in before.items() if p == dead}
    assert max(load(after).values()) <= 2


def test_a_latecomer_changes_nothing_for_the_others() -> None:
    of = swarm(16)
    plan = plan_swarm(of)
    ahead = tuple(replace(p, have_ratio=0.6) for p in of.peers)
    after = plan_swarm(replace(of, peers=(*ahead, peer(99, "r00"))), plan)
    assert [f for f in after.feeds if f.child != "n099"] == [
        replace(f, alternatives=g.alternatives)
        for f, g in zip(plan.feeds, (f for f in after.feeds if f.child != "n099"), strict=True)
    ]
    assert len(after.of("n099")) == 2
    assert "n099" not in load(after)


def test_nobody_pulls_from_a_node_whose_pieces_were_damaged() -> None:
    of = swarm(8)
    plan = plan_swarm(of)
    worst = plan.feeds[3].child
    barred = tuple(replace(p, gives_nothing="2 damaged") if p.node_id == worst else p for p in of.peers)
    after = plan_swarm(replace(of, peers=barred), plan)
    assert worst not in load(after)
    assert not any(worst in f.alternatives for f in after.feeds)
    assert len(after.of(worst)) == 2, "it is still given what it needs"


def test_whole_nodes_give_instead_of_the_origin_and_near_ones_first() -> None:
    seeds = (peer(0, "a", have_ratio=1.0), peer(1, "b", have_ratio=1.0))
    of = Swarm(GB, 1 << 20, (*seeds, peer(2, "a"), peer(3, "b"), peer(4, "b")), Origin(RATE))
    plan = plan_swarm(of)
    assert plan.origin_copies() == 0
    assert plan.crossings(racks(of)) == 0
    assert {f.parent for f in plan.of("n002")} == {"n000"}


def test_one_seed_gives_each_stripe_once_and_the_others_pass_it_on() -> None:
    of = Swarm(24 * GB, 4 << 20, (peer(0, have_ratio=1.0), *(peer(n) for n in range(1, 9))), Origin(RATE))
    plan = plan_swarm(of)
    assert load(plan)["n000"] == 2
    assert max(load(plan).values()) <= 2


def test_slow_nodes_are_leaves() -> None:
    of = swarm(16)
    slow = {"n001", "n002", "n003"}
    peers = tuple(
        replace(p, receive_bytes_per_second=RATE / 5, send_bytes_per_second=RATE / 5)
        if p.node_id in slow
        else p
        for p in of.peers
    )
    plan = plan_swarm(replace(of, peers=peers))
    assert not slow & load(plan).keys()
    assert {roots_of(plan, f.child, f.stripe) for f in plan.feeds} == {ORIGIN}


def test_without_origin_and_seed_nodes_wait_and_say_why() -> None:
    of = replace(swarm(3), origin=Origin(RATE, reachable=False))
    plan = plan_swarm(of)
    assert plan.feeds == ()
    assert [w.node_id for w in plan.waiting] == ["n000", "n001", "n002"]
    assert "origin" in plan.waiting[0].why


def test_only_nodes_near_the_root_may_ever_turn_to_the_origin() -> None:
    plan = plan_swarm(swarm(64, 8))
    may = [f for f in plan.feeds if f.parent == ORIGIN or ORIGIN in f.alternatives]
    assert len(may) / plan.stripes <= 1 + SwarmPolicy().origin_alternative_depth
    assert all(f.depth <= SwarmPolicy().origin_alternative_depth for f in may)


def test_alternatives_never_wait_for_the_child_that_names_them() -> None:
    plan = plan_swarm(swarm(64, 8))
    depth = {(f.child, f.stripe): f.depth for f in plan.feeds}
    for feed in plan.feeds:
        others = [a for a in feed.alternatives if a != ORIGIN]
        assert all(depth[other, feed.stripe] < feed.depth for other in others)
        assert feed.parent not in others


def test_ends_that_do_not_reach_one_another_are_parted() -> None:
    of = swarm(8)
    plan = plan_swarm(of)
    cut = next(f for f in plan.feeds if f.parent != ORIGIN)
    after = plan_swarm(replace(of, apart=frozenset({(cut.child, cut.parent)})), plan)
    assert all((f.child, f.parent) != (cut.child, cut.parent) for f in after.feeds)
    assert len(after.of(cut.child)) == 2


peers = st.builds(
    Peer,
    node_id=st.just(""),
    rack=st.sampled_from("abc"),
    have_ratio=st.sampled_from([0.0, 0.0, 0.3, 0.9, 1.0]),
    send_bytes_per_second=st.floats(1e6, 1e10),
    receive_bytes_per_second=st.floats(1e6, 1e10),
    gives_nothing=st.sampled_from(["", "", "", "damaged"]),
)
fleets = st.lists(peers, min_size=1, max_size=24).map(
    lambda drawn: Swarm(
        GB, 1 << 20, tuple(replace(p, node_id=f"n{i:02d}") for i, p in enumerate(drawn)), Origin(1e9)
    )
)


def sound(of: Swarm, plan: SwarmPlan) -> None:
    """What must hold of every plan."""
    known = {p.node_id: p for p in of.peers}
    keys = [(f.child, f.stripe) for f in plan.feeds]
    assert len(keys) == len(set(keys))
    waiting = {w.node_id for w in plan.waiting}
    for p in of.peers:
        fed = {f.stripe for f in plan.of(p.node_id)}
        assert fed == (set() if p.whole else {0, 1}) or p.node_id in waiting
    for feed in plan.feeds:
        fits(known, feed)
        root = roots_of(plan, feed.child, feed.stripe)
        assert root == ORIGIN or known[root].whole or root in waiting
        assert feed.why
    assert plan.origin_copies() <= of.origin.copies_at_once


def fits(known: dict[str, Peer], feed: Feed) -> None:
    if feed.parent != ORIGIN:
        assert not known[feed.parent].gives_nothing
    assert feed.child not in (feed.parent, *feed.alternatives)


@settings(max_examples=120, deadline=None)
@given(fleets, st.data())
def test_any_fleet_is_planned_soundly_and_again_after_any_change(of: Swarm, data: st.DataObject) -> None:
    plan = plan_swarm(of)
    sound(of, plan)
    assert plan == plan_swarm(replace(of, peers=tuple(reversed(of.peers)))), "the order of nodes matters not"
    for _ in range(3):
        changed = data.draw(fleets)
        gone = data.draw(st.sets(st.sampled_from([p.node_id for p in changed.peers]), max_size=4))
        left = tuple(p for p in changed.peers if p.node_id not in gone)
        of = replace(changed, peers=left or changed.peers)
        plan = plan_swarm(of, plan)
        sound(of, plan)
