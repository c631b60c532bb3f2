"""Figures over sliding windows, their history, and minutes out of samples."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from exaserve_ops.telemetry.domain.rollups import LoadSample, MinuteSamples
from exaserve_ops.telemetry.domain.windows import FinishedRequest, History, RequestWindow, quantile


def test_an_empty_window_has_no_quantiles_and_a_rate_of_zero() -> None:
    figures = RequestWindow(seconds=60).figures(1000.0)
    assert figures.requests_per_second == 0.0
    assert figures.ttft_p95_seconds is None


def test_requests_leave_the_window_with_its_start() -> None:
    window = RequestWindow(seconds=60)
    window.add(FinishedRequest(ended_at_seconds=100.0, ttft_seconds=9.0, tokens=600))
    window.add(FinishedRequest(ended_at_seconds=150.0, ttft_seconds=0.5, tokens=60))
    assert window.figures(155.0).tokens_per_second == 11.0
    later = window.figures(170.0)
    assert later.tokens_per_second == 1.0
    assert later.ttft_p99_seconds == 0.5


def test_sessions_that_changed_their_replica_are_counted_while_in_the_window() -> None:
    window = RequestWindow(seconds=10)
    window.add(FinishedRequest(ended_at_seconds=1.0, ttft_seconds=0.1, tokens=1, repinned=True))
    window.add(FinishedRequest(ended_at_seconds=2.0, ttft_seconds=0.1, tokens=1))
    assert window.figures(2.0).repinned == 1
    assert window.figures(11.5).repinned == 0


def test_a_request_without_a_first_token_counts_as_a_request_only() -> None:
    window = RequestWindow(seconds=10)
    window.add(FinishedRequest(ended_at_seconds=1.0, ttft_seconds=None, tokens=0))
    figures = window.figures(1.0)
    assert figures.requests_per_second == 0.1
    assert figures.ttft_p50_seconds is None


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_a_quantile_is_a_value_with_the_right_share_at_or_below_it(values: list[float], share: float) -> None:
    ordered = sorted(values)
    found = quantile(ordered, share)
    assert found in ordered
    assert sum(v <= found for v in ordered) >= share * len(ordered) - 1e-9


def test_history_keeps_its_step_its_length_and_its_gaps() -> None:
    history = History(every_seconds=5.0, points=3)
    for second in range(31):
        history.add(float(second), {"ttft": None if second == 25 else float(second)})
    assert history.as_dict() == {"at": [20.0, 25.0, 30.0], "ttft": [20.0, None, 30.0]}


def test_a_minute_takes_peaks_of_what_hurts_and_means_of_the_rest() -> None:
    minute = MinuteSamples(
        [
            LoadSample(kv_used_ratio=0.2, requests_running=1, ttft_p95_seconds=0.3),
            LoadSample(kv_used_ratio=0.9, requests_running=3),
        ]
    ).summarise()
    assert (minute.kv_used_ratio_max, minute.requests_running_mean, minute.ttft_p95_seconds_max) == (
        0.9,
        2,
        0.3,
    )
    assert minute.prefix_hit_ratio_mean is None
