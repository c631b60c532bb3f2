from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engines.base import EngineSample, Histogram
from workers.engines.windows import RESTART_NOTE, estimate_quantile, measure_window

BOUNDS = (0.1, 0.2, 0.4, math.inf)


def histogram(*counts: float) -> Histogram:
    return Histogram(BOUNDS, counts, 0.0)


OLD = EngineSample(
    process_start_seconds=1000.0,
    generation_tokens=1.2e6,
    prompt_tokens=500.0,
    requests_finished=100.0,
    prefix_query_tokens=1000.0,
    prefix_hit_tokens=900.0,
    ttft=histogram(90, 95, 99, 100),
)


def test_rates_and_quantiles_are_of_the_window_alone() -> None:
    new = replace(
        OLD,
        requests_running=3,
        generation_tokens=1.2e6 + 500,
        requests_finished=110.0,
        prefix_query_tokens=1117.0,
        prefix_hit_tokens=964.0,
        ttft=histogram(90, 105, 109, 110),
    )
    load = measure_window(OLD, new, seconds=10.0)
    assert load.generation_tokens_per_second == 50
    assert load.requests_per_second == 1
    assert load.prompt_tokens_per_second == 0
    assert load.prefix_hit_ratio == pytest.approx(64 / 117)
    assert load.ttft_p50_seconds == pytest.approx(0.15)
    assert load.itl_p50_seconds is None
    assert load.requests_running == 3
    assert load.notes == ()


@pytest.mark.parametrize("start", [2000.0, 1000.0, None])
def test_restart_counts_only_the_new_life(start: float | None) -> None:
    new = EngineSample(
        process_start_seconds=start,
        generation_tokens=350.0,
        prompt_tokens=700.0,  # already over the old life's: the difference would look plausible
        requests_finished=4.0,
        ttft=histogram(0, 0, 4, 4),
    )
    load = measure_window(OLD, new, seconds=10.0)
    assert load.generation_tokens_per_second == 35
    assert load.prompt_tokens_per_second == 70
    assert load.requests_per_second == 0.4
    assert load.ttft_p50_seconds == pytest.approx(0.3)
    assert RESTART_NOTE in load.notes


def test_hit_ratio_of_nothing_is_unknown() -> None:
    load = measure_window(OLD, OLD, seconds=10.0)
    assert load.prefix_hit_ratio is None
    assert load.ttft_p95_seconds is None
    assert load.generation_tokens_per_second == 0


def test_first_sample_has_gauges_and_totals_but_no_rates() -> None:
    load = measure_window(None, replace(OLD, kv_used_ratio=0.5), seconds=10.0, age_seconds=1.5)
    assert load.kv_used_ratio == 0.5
    assert load.generation_tokens_total == 1.2e6
    assert load.generation_tokens_per_second is None
    assert load.ttft_p50_seconds is None
    assert load.window_seconds == 0
    assert load.age_seconds == 1.5


def test_what_either_sample_lacks_has_no_rate() -> None:
    bare = EngineSample(process_start_seconds=1000.0)
    assert measure_window(OLD, bare, seconds=5.0).generation_tokens_per_second is None
    assert measure_window(bare, OLD, seconds=5.0).generation_tokens_per_second is None
    assert measure_window(OLD, OLD, seconds=0.0).generation_tokens_per_second is None


def test_quantile_beyond_the_last_bound_is_that_bound_and_said_to_be_the_least() -> None:
    new = replace(OLD, ttft=histogram(90, 110, 114, 120))
    load = measure_window(OLD, new, seconds=10.0)
    assert load.ttft_p95_seconds == 0.4
    assert load.lower_bounds == ("ttft_p95_seconds", "ttft_p99_seconds")


def test_other_buckets_are_never_subtracted_from_one_another() -> None:
    new = replace(OLD, ttft=Histogram((0.5, math.inf), (100, 120), 0.0))
    assert measure_window(OLD, new, seconds=10.0).ttft_p50_seconds is None


COUNTER = st.none() | st.floats(0, 1e9)


@given(old=st.tuples(COUNTER, COUNTER, COUNTER), new=st.tuples(COUNTER, COUNTER, COUNTER))
def test_no_two_samples_give_a_negative_rate(
    old: tuple[float | None, ...], new: tuple[float | None, ...]
) -> None:
    def sample(values: tuple[float | None, ...]) -> EngineSample:
        return EngineSample(
            generation_tokens=values[0], prefix_query_tokens=values[1], prefix_hit_tokens=values[2]
        )

    load = measure_window(sample(old), sample(new), seconds=10.0)
    rate, ratio = load.generation_tokens_per_second, load.prefix_hit_ratio
    assert rate is None or rate >= 0
    assert ratio is None or 0 <= ratio <= 1


@given(
    steps=st.lists(st.integers(0, 50), min_size=4, max_size=4),
    ranks=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_quantiles_rise_with_their_rank_and_stay_within_the_bounds(
    steps: list[int], ranks: tuple[float, float]
) -> None:
    counts = [sum(steps[: n + 1]) for n in range(4)]
    low, high = (estimate_quantile(histogram(*counts), rank) for rank in sorted(ranks))
    if sum(steps) == 0:
        assert low is None
        return
    assert low is not None
    assert high is not None
    assert 0 <= low.seconds <= high.seconds <= 0.4
