"""A store never promises room that it has not, and never deletes in vain or what is needed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.weights.planning import Ready, StoreFacts, StorePlan, StorePolicy, Wanted, plan_store

GB = 10**9


def plan(
    wanted: list[Wanted],
    ready: dict[str, Ready] | None = None,
    *,
    staged: dict[str, int] | None = None,
    free: int = 100 * GB,
    damaged: int = 0,
    policy: StorePolicy | None = None,
) -> StorePlan:
    ready, staged = ready or {}, staged or {}
    used = sum(r.own_bytes for r in ready.values()) + sum(staged.values()) + damaged
    facts = StoreFacts(wanted, ready, staged, free, used, damaged)
    return plan_store(facts, policy or StorePolicy(margin_bytes=10 * GB))


def test_the_most_urgent_come_first_and_a_few_at_once() -> None:
    wanted = [Wanted("c", GB, 10), Wanted("a", GB, 100), Wanted("b", GB, 50)]
    decided = plan(wanted)
    assert decided.fetch == ("a", "b")
    assert "others are fetched first" in decided.waits["c"]


def test_margin_and_limit_count_before_the_first_byte() -> None:
    assert plan([Wanted("a", 90 * GB)]).fetch == ("a",)
    refused = plan([Wanted("a", 90 * GB + 1)]).refused["a"]
    assert "insufficient space: 90,000,000,001" in refused
    assert "90,000,000,000 are left" in refused
    limited = StorePolicy(margin_bytes=0, limit_bytes=50 * GB)
    assert plan([Wanted("a", 51 * GB)], policy=limited).refused
    assert plan([Wanted("a", 50 * GB)], policy=limited).fetch == ("a",)


def test_what_is_staged_already_needs_no_room_again() -> None:
    assert plan([Wanted("a", 90 * GB)], staged={"a": 80 * GB}, free=20 * GB).fetch == ("a",)


def test_only_as_many_go_as_are_needed_the_longest_unused_first() -> None:
    ready = {name: Ready(30 * GB, used, in_use=False) for name, used in (("x", 3), ("y", 1), ("z", 2))}
    decided = plan([Wanted("a", 40 * GB)], ready, free=20 * GB)
    assert decided.evict == ("y",)
    assert decided.fetch == ("a",)
    assert plan([Wanted("a", 60 * GB)], ready, free=20 * GB).evict == ("y", "z")


def test_nothing_goes_in_vain() -> None:
    ready = {"x": Ready(30 * GB, 1, in_use=False), "y": Ready(30 * GB, 2, in_use=True)}
    decided = plan([Wanted("a", 60 * GB)], ready, free=20 * GB)
    assert decided.evict == ()
    assert "30,000,000,000 may go" in decided.refused["a"]


def test_files_that_were_put_aside_go_first_and_what_nobody_wants_is_dropped() -> None:
    ready = {"x": Ready(30 * GB, 1, in_use=False)}
    decided = plan([Wanted("a", 15 * GB)], ready, free=20 * GB, damaged=5 * GB, staged={"old": GB})
    assert decided.delete_damaged
    assert decided.evict == ()
    assert decided.drop == ("old",)


def test_paused_and_blocked_take_no_place_from_others() -> None:
    wanted = [Wanted("a", GB, 100, paused=True), Wanted("b", GB, 90, blocked="no manifest"), Wanted("c", GB)]
    decided = plan(wanted, policy=StorePolicy(0, 0, 1))
    assert decided.fetch == ("c",)
    assert decided.waits == {"a": "paused", "b": "no manifest"}


NAMES = st.sampled_from("abcdefgh")
SIZES = st.integers(0, 60).map(lambda n: n * GB)
WANTED = st.lists(
    st.builds(Wanted, NAMES, SIZES, st.integers(0, 100), st.booleans()),
    max_size=8,
    unique_by=lambda one: one.revision,
)
READY = st.dictionaries(NAMES, st.builds(Ready, SIZES, st.integers(0, 9), st.booleans()), max_size=8)


@given(WANTED, READY, st.integers(0, 200), st.integers(0, 20), st.integers(0, 150))
def test_whatever_is_asked_room_is_kept_and_what_is_needed_stays(
    wanted: list[Wanted], ready: dict[str, Ready], free: int, margin: int, limit: int
) -> None:
    policy = StorePolicy(margin * GB, limit * GB)
    decided = plan(wanted, ready, free=free * GB, policy=policy)
    sizes = {one.revision: one.total_bytes for one in wanted}
    freed = sum(ready[name].own_bytes for name in decided.evict)
    taken = sum(sizes[name] for name in decided.fetch)
    if taken > 0:
        assert free * GB + freed - taken >= margin * GB
        used = sum(r.own_bytes for r in ready.values())
        assert not limit or used - freed + taken <= limit * GB
    assert not any(ready[name].in_use or name in sizes for name in decided.evict)
    if decided.evict:
        last = decided.evict[-1]
        assert free * GB + freed - ready[last].own_bytes - taken < margin * GB or limit, "the last was needed"
    missing = sizes.keys() - ready.keys()
    told = set(decided.fetch) | decided.waits.keys() | decided.refused.keys()
    assert told == missing, "each one that is missing has an answer"
