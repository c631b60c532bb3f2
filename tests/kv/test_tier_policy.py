"""What moves between tiers and when: over drawn cases, against plain reckonings."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.kv.tiers.heat import EvictionOrder, Heat
from workers.kv.tiers.policy import (
    LOWER_TIERS,
    STALE_SECONDS,
    Candidate,
    Costs,
    DemotionRules,
    Level,
    LowerTier,
    choose_demotions,
    choose_fetch,
    current_cost,
    is_swap_cheaper,
    update_rate,
)
from workers.kv.tiers.thrash import SwapWindow, ThrashRules, ThrashState, judge_thrash

KEYS = st.integers(0, 7)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "pop", "heat", "cool", "age"]),
        KEYS,
        st.booleans(),
        st.integers(0, 3),
    ),
    max_size=60,
)
RUNS = st.lists(st.sampled_from(["host", "disk"]), max_size=12)
SECONDS = st.none() | st.floats(0.0, 1.0)


class PlainOrder:
    """The same order, by sorting a list each time."""

    def __init__(self) -> None:
        self.rows: list[tuple[bool, int, float, int]] = []
        self.clock = 0.0

    def file(self, key: int, *, hot: bool, uses: int, first: bool = False) -> None:
        self.rows = [row for row in self.rows if row[3] != key]
        self.clock += 1
        self.rows.append((hot, uses, -self.clock if first else self.clock, key))
        self.rows.sort()

    def find(self, key: int) -> tuple[bool, int, float, int] | None:
        return next((row for row in self.rows if row[3] == key), None)

    def age(self) -> None:
        for hot, uses, _, key in list(self.rows):
            self.file(key, hot=hot, uses=uses // 2)

    @property
    def keys(self) -> list[int]:
        return [row[3] for row in self.rows]


def change(order: EvictionOrder[int], plain: PlainOrder, what: str, key: int, *, coldest: bool) -> None:
    """Do to both what needs a key that is there."""
    row = plain.find(key)
    if row is None:
        assert key not in order
    elif what == "remove":
        order.remove(key)
        plain.rows.remove(row)
    elif what in ("heat", "cool") and row[0] != (what == "heat"):
        order.refile(key, hot=not row[0], coldest=coldest)
        plain.file(key, hot=not row[0], uses=row[1], first=coldest)


@settings(max_examples=100, deadline=None)
@given(steps=STEPS)
def test_coldest_key_is_the_cold_then_least_used_then_longest_untouched(
    steps: list[tuple[str, int, bool, int]],
) -> None:
    order: EvictionOrder[int] = EvictionOrder()
    plain = PlainOrder()
    for what, key, hot, uses in steps:
        if what == "add":
            order.add(key, hot=hot, uses=uses)
            plain.file(key, hot=hot, uses=uses)
        elif what == "pop" and plain.rows:
            assert order.pop() == plain.rows.pop(0)[3]
        elif what == "age":
            order.age()
            plain.age()
        else:
            change(order, plain, what, key, coldest=hot)
        assert list(order) == plain.keys
        assert order.hot == sum(row[0] for row in plain.rows)
        assert order.coldest(2) == plain.keys[:2]


@given(
    ages=st.lists(st.floats(0.0, 30.0), max_size=40),
    free=st.integers(0, 100),
    batch=st.integers(1, 20),
)
def test_only_what_was_idle_for_long_is_copied_down_and_never_more_than_a_batch(
    ages: list[float], free: int, batch: int
) -> None:
    rules = DemotionRules(batch_blocks=batch)
    candidates = [Candidate(bytes([n]), 100.0 - age) for n, age in enumerate(ages)]
    chosen = choose_demotions(Level(free, 100), candidates, rules, now=100.0)
    scarce = free < 100 * rules.scarce_ratio
    patience = rules.idle_seconds if scarce else rules.long_idle_seconds
    due = [c.digest for c in candidates if 100.0 - c.idle_since_seconds >= patience]
    assert list(chosen) == due[:batch]


@given(run=RUNS, compute=SECONDS, host=SECONDS, disk=SECONDS)
def test_fetch_is_as_long_as_starts_the_request_soonest(
    run: list[LowerTier], compute: float | None, host: float | None, disk: float | None
) -> None:
    costs = Costs(compute, host, disk)
    chosen = choose_fetch(run, costs)
    if compute is None:
        assert chosen == len(run)
        return

    def seconds(count: int) -> float:
        fetched = sum(costs.fetch(tier) for tier in run[:count])
        return fetched + (len(run) - count) * compute

    assert seconds(chosen) <= min(map(seconds, range(len(run) + 1))) + 1e-9


def test_nothing_is_fetched_from_a_disk_that_is_slower_than_computing() -> None:
    slow = Costs(compute=0.001, host=0.0001, disk=0.01)
    assert choose_fetch(["disk"] * 5, slow) == 0
    assert choose_fetch(["host", "host", "disk"], slow) == 2
    assert choose_fetch(["disk", *LOWER_TIERS[:1] * 20], slow) == 21  # the way to the rest pays for it


def test_swap_pays_only_if_out_and_in_cost_less_than_computing() -> None:
    assert is_swap_cheaper(4, "host", Costs(compute=0.03, host=0.01))
    assert not is_swap_cheaper(4, "host", Costs(compute=0.015, host=0.01))
    assert is_swap_cheaper(4, "disk", Costs())


def test_a_cost_that_was_measured_long_ago_is_found_out_anew() -> None:
    rate = update_rate(None, 0.5, now=10.0)
    assert current_cost(rate, now=10.0 + STALE_SECONDS) == 0.5
    assert current_cost(rate, now=10.1 + STALE_SECONDS) is None
    assert update_rate(rate, 0.1, now=11.0 + STALE_SECONDS).seconds_per_block == 0.1
    later = update_rate(rate, 0.1, now=11.0).seconds_per_block
    assert 0.1 < later < 0.5


def test_one_copy_that_was_held_up_does_not_make_a_tier_look_slow_and_a_slow_one_is_known_soon() -> None:
    rate = update_rate(None, 1.0, now=0.0)  # the very first was held up
    for _ in range(16):
        rate = update_rate(rate, 2e-5, now=0.0)
    assert rate.seconds_per_block < 4e-5
    held_up = update_rate(rate, 1.0, now=0.0)
    assert held_up.seconds_per_block < 2 * rate.seconds_per_block
    for _ in range(40):
        rate = update_rate(rate, 0.1, now=0.0)
    assert rate.seconds_per_block > 0.05
    assert update_rate(update_rate(None, 0.0, now=0.0), 1.0, now=0.0).seconds_per_block > 0


RULES = ThrashRules()
WINDOWS = st.lists(
    st.tuples(st.floats(0.1, 8.0), st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=60
)


@settings(max_examples=100, deadline=None)
@given(windows=WINDOWS)
def test_swapping_stops_only_for_a_reason_and_never_flutters(windows: list[tuple[float, int, int]]) -> None:
    state, now = ThrashState(), 0.0
    for pause, came_in, left in windows:
        now += pause
        window = SwapWindow(came_in, min(left, came_in))
        following = judge_thrash(state, window, RULES, now=now)
        if following.active and not state.active:
            assert came_in >= RULES.fewest_blocks
            assert window.vain_ratio > RULES.start_ratio
            assert following.reason
        if state.active and not following.active:
            assert now - state.since_seconds >= state.rest_seconds >= RULES.rest_seconds
            assert window.vain_ratio <= RULES.stop_ratio
        assert following.rest_seconds <= RULES.longest_rest_seconds
        state = following


def test_each_stop_that_follows_at_once_lasts_twice_as_long() -> None:
    vain, calm = SwapWindow(100, 90), SwapWindow(0, 0)
    state, now, rests = ThrashState(), 0.0, []
    for _ in range(6):
        state = judge_thrash(state, vain, RULES, now=now)
        assert state.active
        rests.append(state.rest_seconds)
        now += state.rest_seconds
        state = judge_thrash(state, calm, RULES, now=now)
        assert not state.active
    assert rests == [10, 20, 40, 80, 160, 160]
    assert judge_thrash(state, vain, RULES, now=now + 1000).rest_seconds == 10


def test_swapping_goes_on_between_the_two_ratios_and_stays_stopped_between_them() -> None:
    between = SwapWindow(100, 35)
    assert not judge_thrash(ThrashState(), between, RULES, now=0).active
    stopped = judge_thrash(ThrashState(), SwapWindow(100, 51), RULES, now=0)
    assert judge_thrash(stopped, between, RULES, now=1000).active
    assert "51% of 100 blocks" in stopped.reason
    assert replace(stopped, reason="").active is False


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.binary(min_size=1, max_size=1), max_size=4)), max_size=30)
)
def test_content_is_hot_as_long_as_there_is_a_reason(steps: list[tuple[bool, list[bytes]]]) -> None:
    heat = Heat()
    reasons: list[list[bytes]] = []
    for warm, digests in steps:
        if warm:
            heat.warm(digests)
            reasons.append(digests)
        elif reasons:
            heat.cool(reasons.pop(0), coldest=True)
        hot = {digest for reason in reasons for digest in reason}
        assert {digest for digest in map(bytes, [[n] for n in range(256)]) if heat.is_hot(digest)} == hot


@pytest.mark.parametrize(("eviction", "uses"), [("lru", 0), ("lfu", 15)])
def test_uses_count_only_by_frequency(eviction: str, uses: int) -> None:
    heat = Heat("lfu" if eviction == "lfu" else "lru")
    for _ in range(20):
        heat.note_use(b"d")
    assert heat.uses(b"d") == uses
