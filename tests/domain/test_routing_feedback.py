"""Weights of replicas from their reports: late enough not to flap, soon enough to matter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exaserve_ops.routing.domain.feedback import (
    Average,
    FeedbackPolicy,
    Reading,
    Weight,
    fold,
    weigh_group,
)

POLICY = FeedbackPolicy()
OLD = -1000.0
"""First heard of long ago: no slow start."""


def steady(**values: float) -> Average:
    return Average(0.0, Reading(**values), OLD)


def weight_of(average: Average, *peers: Average, now: float = 0.0) -> Weight:
    group = {"it": average} | {f"peer{i}": peer for i, peer in enumerate(peers)}
    return weigh_group(group, now, POLICY)["it"]


def test_nothing_known_is_neutral() -> None:
    assert weight_of(steady()) == Weight(1.0)


@pytest.mark.parametrize(
    ("values", "least", "most", "why"),
    [
        ({"kv_used_ratio": 0.75}, 1.0, 1.0, ""),
        ({"kv_used_ratio": 0.875}, 0.49, 0.51, "KV memory is nearly full"),
        ({"kv_used_ratio": 1.0}, 0.1, 0.1, "KV memory is nearly full"),
        ({"requests_running": 8.0, "requests_waiting": 0.0}, 1.0, 1.0, ""),
        ({"requests_running": 8.0, "requests_waiting": 8.0}, 0.5, 0.5, "requests queue"),
        ({"requests_running": 0.0, "requests_waiting": 99.0}, 0.1, 0.1, "requests queue"),
        (
            {"kv_used_ratio": 0.9, "requests_running": 1.0, "requests_waiting": 3.0},
            0.25,
            0.25,
            "requests queue",
        ),
    ],
)
def test_worst_sign_sets_the_weight_and_is_its_reason(
    values: dict[str, float], least: float, most: float, why: str
) -> None:
    weight = weight_of(steady(**values))
    assert least - 1e-9 <= weight.value <= most + 1e-9
    assert weight.why == why


def test_slow_replica_gets_less_and_a_very_slow_one_nothing() -> None:
    peers = [steady(ttft_p50_seconds=0.2) for _ in range(5)]
    assert weight_of(steady(ttft_p50_seconds=0.24), *peers) == Weight(1.0)
    half = weight_of(steady(ttft_p50_seconds=0.5), *peers)
    assert half == Weight(0.5, "TTFT is above its peers'")
    out = weight_of(steady(ttft_p50_seconds=1.5), *peers)
    assert (out.value, out.why[:7]) == (0.0, "ejected")


def test_few_peers_are_not_compared() -> None:
    assert weight_of(steady(ttft_p50_seconds=9.0), steady(ttft_p50_seconds=0.1)) == Weight(1.0)


def test_new_replica_starts_slowly() -> None:
    fresh = Average(0.0, Reading(), first_seconds=0.0)
    assert weight_of(fresh, now=0.0) == Weight(0.1, "started a moment ago")
    assert weight_of(fresh, now=10.0).value == pytest.approx(0.5)
    assert weight_of(fresh, now=20.0) == Weight(1.0)


def test_one_long_prompt_does_not_flap_and_nine_seconds_of_trouble_are_seen() -> None:
    calm, busy = Reading(0.2, 4.0, 0.0, 0.2), Reading(0.99, 4.0, 12.0, 0.2)
    average = fold(None, calm, OLD, POLICY)
    for second in range(1, 5):
        average = fold(average, calm, float(second), POLICY)
    spike = fold(average, busy, 5.0, POLICY)
    assert weight_of(spike, now=5.0).value > 0.5
    for second in range(6, 15):
        spike = fold(spike, busy, float(second), POLICY)
    assert weight_of(spike, now=14.0).value < 0.3
    for second in range(15, 25):
        spike = fold(spike, calm, float(second), POLICY)
    assert weight_of(spike, now=24.0).value > 0.85, "and it is forgiven"


readings = st.builds(
    Reading,
    st.none() | st.floats(0.0, 1.0),
    st.none() | st.floats(0.0, 500.0),
    st.none() | st.floats(0.0, 500.0),
    st.none() | st.floats(0.0, 60.0),
)


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.lists(readings, min_size=1, max_size=6)))
def test_never_all_are_ejected_and_no_weight_is_out_of_range(reports: dict[str, list[Reading]]) -> None:
    averages: dict[str, Average] = {}
    for name, given_readings in reports.items():
        for second, reading in enumerate(given_readings):
            averages[name] = fold(averages.get(name), reading, float(second), POLICY)
    weights = weigh_group(averages, 30.0, POLICY)
    assert weights.keys() == reports.keys()
    out = [w for w in weights.values() if w.value == 0.0]
    assert len(out) <= len(weights) * POLICY.eject_share
    assert all(w.value == 0.0 or POLICY.least_weight <= w.value <= 1.0 for w in weights.values())
    assert all(w.why for w in weights.values() if w.value < 1.0)


@given(readings, readings, st.floats(0.0, 100.0))
def test_average_lies_between_what_it_is_made_of(old: Reading, new: Reading, later: float) -> None:
    folded = fold(fold(None, old, 0.0, POLICY), new, later, POLICY)
    for was, came, now in zip(old, new, folded.value, strict=True):
        if was is None or came is None:
            assert now == (came if was is None else was)
        else:
            assert now is not None
            assert min(was, came) - 1e-9 <= now <= max(was, came) + 1e-9
