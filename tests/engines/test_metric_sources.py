"""Several processes behind one port, restarts, and what a window may be measured between."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engines.base import EngineSample, Histogram
from workers.engines.windows import (
    FELL_NOTE,
    INTERLEAVED_NOTE,
    RESTART_NOTE,
    choose_span,
    measure_window,
)
from workers.protocol.observed import ReplicaTelemetry

Samples = list[tuple[float, EngineSample]]


def tokens(*counts: float | None, starts: tuple[float | None, ...] = ()) -> Samples:
    """One sample a second."""
    told = starts or (None,) * len(counts)
    return [
        (float(at), EngineSample(generation_tokens=count, process_start_seconds=start))
        for at, (count, start) in enumerate(zip(counts, told, strict=True))
    ]


def measure(samples: Samples) -> tuple[ReplicaTelemetry, str]:
    span = choose_span(samples)
    return measure_window(span.old, span.new, seconds=span.seconds), span.note


def test_steady_source_is_measured_over_the_whole_window() -> None:
    load, note = measure(tokens(100, 110, 120, 130))
    assert load.generation_tokens_per_second == 10
    assert (load.window_seconds, note) == (3, "")


def test_two_processes_that_answer_in_turn_give_no_giant_rate() -> None:
    told = (1000, 400, 1010, 405, 1020, 410)
    for count in range(1, len(told) + 1):
        load, note = measure(tokens(*told[:count]))
        assert (load.generation_tokens_per_second or 0.0) in (0.0, 2.5, 5.0)
        assert note == ("" if count == 1 else FELL_NOTE if count == 2 else INTERLEAVED_NOTE)


def test_processes_are_told_apart_by_their_start_also_where_counters_do_not_fall() -> None:
    load, note = measure(tokens(10, 500, 12, 504, starts=(1.0, 50.0, 1.0, 50.0)))
    assert load.generation_tokens_per_second == 2
    assert note == INTERLEAVED_NOTE


def test_restart_that_says_when_it_began_counts_from_nothing() -> None:
    load, note = measure(tokens(1.2e6, 1.2e6, 350, starts=(1000.0, 1000.0, 2000.0)))
    assert load.generation_tokens_per_second == 175
    assert RESTART_NOTE in load.notes
    assert note == ""


def test_counters_that_fall_for_no_told_reason_begin_anew() -> None:
    load, note = measure(tokens(1000, 30))
    assert load.generation_tokens_per_second is None
    assert note == FELL_NOTE
    load, note = measure(tokens(1000, 30, 34))
    assert load.generation_tokens_per_second == 4
    assert RESTART_NOTE not in load.notes


def test_quantiles_never_mix_two_sources() -> None:
    def sample(count: float, slow: float) -> EngineSample:
        return EngineSample(
            generation_tokens=count, ttft=Histogram((0.1, 1.0, math.inf), (count - slow, count, count), 0.0)
        )

    load, _ = measure(list(enumerate([sample(100, 100), sample(40, 0), sample(110, 110), sample(44, 0)])))
    assert load.ttft_p50_seconds == pytest.approx(0.05)


def test_a_quantile_beyond_the_last_bucket_says_so_by_name() -> None:
    old = EngineSample(queue_time=Histogram((0.3, math.inf), (0, 0), 0.0))
    new = EngineSample(queue_time=Histogram((0.3, math.inf), (1, 10), 0.0))
    load = measure_window(old, new, seconds=1.0)
    assert (load.queue_p95_seconds, load.lower_bounds) == (0.3, ("queue_p50_seconds", "queue_p95_seconds"))


def test_nothing_to_look_at_is_an_error() -> None:
    with pytest.raises(ValueError, match="no sample"):
        choose_span([])


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40)), min_size=1, max_size=14),
    st.tuples(*[st.integers(0, 10_000)] * 3),
    st.booleans(),
)
def test_rates_of_any_mix_of_sources_are_never_negative_and_never_more_than_what_came(
    steps: list[tuple[int, int]], bases: tuple[int, ...], say_start: bool
) -> None:
    counts = list(bases)
    samples: Samples = []
    for at, (source, step) in enumerate(steps):
        counts[source] += step
        start = 100.0 * source if say_start else None
        samples.append(
            (float(at), EngineSample(generation_tokens=counts[source], process_start_seconds=start))
        )
    load, note = measure(samples)
    rate = load.generation_tokens_per_second
    assert rate is None or rate >= 0
    if say_start and note == INTERLEAVED_NOTE:
        assert rate is None or rate <= 40 * len(steps)
