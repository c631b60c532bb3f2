"""Gates of durations and failures tell what is no chance from what may be one."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.gates import Setting, figures_of
from exaserve_ops.rollouts.domain.chance import (
    MOST_TRIALS,
    Stratum,
    most_above_by_chance,
    most_failures_by_chance,
)
from exaserve_ops.rollouts.domain.durations import compare, kind_of
from exaserve_ops.rollouts.domain.gates import (
    CLOSED,
    ERRORS,
    ITL,
    NO_DATA,
    OPEN,
    TTFT,
    Answers,
    Gate,
    Health,
    judge,
)
from exaserve_ops.rollouts.domain.policy import RolloutPolicy
from exaserve_ops.rollouts.domain.spread_of_values import Buckets, bucket_of

POLICY = RolloutPolicy(min_requests=20)
KIND = kind_of(streamed=True, computed_tokens=30)
durations = st.lists(st.floats(0.3, 30.0), min_size=1, max_size=40)


def buckets(*seconds: float) -> dict[int, int]:
    return dict(Counter(bucket_of(one) for one in seconds))


def gate(name: str, new: Answers, old: Answers, policy: RolloutPolicy = POLICY) -> Gate:
    return next(one for one in judge(new, old, Health(1, 1), policy) if one.name == name)


def answered(ttft: dict[str, Buckets], itl: Buckets | None = None, failed: int = 0) -> Answers:
    return Answers(sum(sum(one.values()) for one in ttft.values()), failed, ttft, itl or {})


# -- what may be by chance -------------------------------------------------------------------------------
@pytest.mark.parametrize(("new", "old", "rank"), [(4, 5, 1), (5, 4, 2), (3, 6, 3), (6, 3, 1)])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.99])
def test_count_that_may_be_by_chance_is_what_all_orders_of_answers_say(
    new: int, old: int, rank: int, confidence: float
) -> None:
    """Where both are alike every order is as likely as any other, so they can be counted."""
    counts: Counter[int] = Counter()
    for places in itertools.combinations(range(new + old), new):  # places of new answers, longest first
        taken, seen_old, above = set(places), 0, 0
        for place in range(new + old):
            if place in taken:
                above += 1
            else:
                seen_old += 1
                if seen_old == rank:
                    break
        counts[above] += 1
    total = math.comb(new + old, new)
    found = most_above_by_chance([Stratum(new, 0, old, rank)], confidence)
    beyond = sum(count for above, count in counts.items() if above > found) / total
    at_least = sum(count for above, count in counts.items() if above >= found) / total
    assert beyond <= 1 - confidence + 1e-9
    assert found == 0 or at_least > 1 - confidence - 1e-9, "and no smaller count would do"


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(5, 300)), min_size=1, max_size=4))
def test_more_confidence_puts_up_with_more(sizes: list[tuple[int, int]]) -> None:
    strata = [Stratum(new, 0, old, 1 + old // 20) for new, old in sizes]
    found = [most_above_by_chance(strata, confidence) for confidence in (0.5, 0.9, 0.99, 0.999)]
    assert found == sorted(found)
    assert found[-1] <= sum(new for new, _ in sizes)


def test_many_answers_are_judged_as_sharply_as_the_most_that_are_counted_one_by_one() -> None:
    many = most_above_by_chance([Stratum(40 * MOST_TRIALS, 0, 100_000, 5000)])
    few = most_above_by_chance([Stratum(MOST_TRIALS, 0, 100_000, 5000)])
    assert 39 * few <= many <= 41 * (few + 1)


@pytest.mark.parametrize(("requests", "ratio"), [(20, 0.02), (100, 0.02), (500, 0.05)])
def test_failures_by_chance_are_those_of_the_binomial_distribution(requests: int, ratio: float) -> None:
    found = most_failures_by_chance(requests, ratio, 0.99)

    def beyond(most: int) -> float:
        chances = (math.comb(requests, n) * ratio**n * (1 - ratio) ** (requests - n) for n in range(most + 1))
        return 1 - sum(chances)

    assert beyond(found) <= 0.01 + 1e-9
    assert beyond(found - 1) > 0.01


def test_nothing_fails_by_chance_where_nothing_may() -> None:
    assert most_failures_by_chance(50, 0.0, 0.99) == 0
    assert most_failures_by_chance(50, 1.0, 0.99) == 50


# -- durations -------------------------------------------------------------------------------------------
@given(durations, durations, st.floats(1.0, 4.0))
def test_slower_answers_never_speak_for_a_release(new: list[float], old: list[float], factor: float) -> None:
    def seen(values: list[float]) -> tuple[int, int]:
        found = compare({KIND: buckets(*values)}, {KIND: buckets(*old)}, most_ratio=1.5, floor_seconds=0.25)
        return found.above, found.by_chance

    above, by_chance = seen(new)
    slower, still = seen([one * factor for one in new])
    assert slower >= above
    assert still == by_chance, "what may be by chance depends on how many there are, not on how long"


@given(durations, durations)
def test_what_is_below_the_floor_is_never_too_slow(new: list[float], old: list[float]) -> None:
    quick = {KIND: buckets(*(one / 200 for one in new))}
    found = compare(quick, {KIND: buckets(*(one / 5000 for one in old))}, most_ratio=1.0, floor_seconds=0.25)
    assert (found.above, found.is_worse) == (0, False)


def test_context_that_is_computed_anew_after_a_move_is_not_held_against_the_release() -> None:
    old = {KIND: buckets(*[0.3] * 60)}
    moved = {kind_of(streamed=True, computed_tokens=900): buckets(*[4.0] * 15)}
    found = gate(TTFT, answered({KIND: buckets(*[0.3] * 20)} | moved), answered(old))
    assert (found.state, found.figure) == (OPEN, "0 of 20 above 0.49 s")
    alone = gate(TTFT, answered(moved), answered(old))
    assert alone.state == NO_DATA
    assert "15 more have no equals" in alone.why


def test_context_that_both_compute_anew_is_compared() -> None:
    large = kind_of(streamed=True, computed_tokens=900)
    found = gate(TTFT, answered({large: buckets(*[4.0] * 20)}), answered({large: buckets(*[1.0] * 40)}))
    assert found.state == CLOSED
    assert found.figure.startswith("20 of 20 above 1.5 s")


def test_one_late_answer_in_twenty_is_no_verdict_and_many_are() -> None:
    old = answered({KIND: buckets(*[0.3] * 60)})

    def state(late: int, of: int) -> str:
        return gate(TTFT, answered({KIND: buckets(*[3.0] * late, *[0.3] * (of - late))}), old).state

    assert [state(1, 20), state(4, 20), state(12, 20)] == [OPEN, NO_DATA, CLOSED]
    assert state(12, 12) == CLOSED, "what is as clear as this needs no twenty answers"
    assert state(6, 100) == OPEN, "what was in doubt is cleared by more answers"


def test_gate_says_how_many_may_be_by_chance() -> None:
    old = answered({KIND: buckets(*[0.3] * 60)})
    found = gate(TTFT, answered({KIND: buckets(*[3.0] * 12, *[0.3] * 10)}), old)
    assert found.figure == "12 of 22 above 0.49 s"
    assert found.limit.endswith(" by chance")
    assert 0 < int(found.limit.split()[0]) < 12


def test_where_nothing_is_streamed_time_between_tokens_holds_nobody_up() -> None:
    whole = kind_of(streamed=False, computed_tokens=30)
    both = answered({whole: buckets(*[0.3] * 40)})
    found = gate(ITL, both, both)
    assert (found.state, found.figure) == (OPEN, "none streamed")


def test_few_streams_hold_nobody_up_unless_they_are_slow() -> None:
    old = Answers(60, 0, {}, buckets(*[0.02] * 60))
    assert gate(ITL, Answers(40, 0, {}, buckets(0.02, 0.02)), old).state == OPEN
    assert gate(ITL, Answers(40, 0, {}, buckets(0.4, 0.4)), old).state == NO_DATA
    assert gate(ITL, Answers(40, 0, {}, buckets(*[0.4] * 10)), old).state == CLOSED


def test_streams_are_not_compared_with_answers_that_came_whole() -> None:
    """The time to the first byte of a whole answer is that of all its tokens."""
    old = answered({kind_of(streamed=True, computed_tokens=30): buckets(*[0.3] * 60)})
    new = answered({kind_of(streamed=False, computed_tokens=30): buckets(*[4.0] * 30)})
    found = gate(TTFT, new, old)
    assert (found.state, found.limit) == (OPEN, "none"), "and nobody waits for equals that may never come"
    both = answered({**new.ttft, KIND: buckets(*[0.3] * 3)})
    assert gate(TTFT, both, old).state == NO_DATA, "where some have equals, more of these are waited for"


@given(st.integers(0, 400))
def test_few_failures_are_put_up_with_and_many_are_not(requests: int) -> None:
    state = gate(ERRORS, Answers(requests, requests), Answers(400)).state
    assert state == (CLOSED if requests >= 2 else NO_DATA)
    assert gate(ERRORS, Answers(requests, 0), Answers(400)).state == (OPEN if requests >= 20 else NO_DATA)


def test_one_failure_in_twenty_waits_for_more_answers() -> None:
    assert gate(ERRORS, Answers(20, 1), Answers(400)).state == NO_DATA
    assert gate(ERRORS, Answers(60, 1), Answers(400)).state == OPEN


# -- how often they err ------------------------------------------------------------------------------------
@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_harmless_releases_are_hardly_ever_turned_back(spread: float) -> None:
    """Ten waves, each looked at fifty times: less than one rollout in a hundred."""
    found = figures_of(Setting(spread, answers_a_wave=100), 100, seed=7)
    assert found.rolled_back_ratio < 0.01


def test_three_times_slower_releases_are_caught_at_the_canary() -> None:
    found = figures_of(Setting(0.6, slowness=3.0, waves=1), 60, seed=7)
    assert found.rolled_back_ratio == 1.0
    assert found.answers_p95 is not None
    assert found.answers_p95 <= 100


def test_kinds_follow_what_was_computed() -> None:
    chance = random.Random(3)  # noqa: S311 - drawn anew the same in every run
    tokens = sorted(chance.randrange(0, 50_000) for _ in range(200))
    kinds = [kind_of(streamed=True, computed_tokens=one) for one in tokens]
    assert [kind for kind, _ in itertools.groupby(kinds)] == list(dict.fromkeys(kinds)), "each is one range"
    assert kind_of(streamed=False, computed_tokens=None) == "whole:unknown"
