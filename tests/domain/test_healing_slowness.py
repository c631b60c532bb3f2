"""Slow among peers: an outlier for a while, never a burst, never without peers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from exaserve_ops.serving.domain.slowness import (
    PeerSample,
    SlownessPolicy,
    Streak,
    find_outliers,
    follow,
)

POLICY = SlownessPolicy()


def peers(*ttft: float | None, itl: float = 0.01) -> list[PeerSample]:
    return [PeerSample(f"r{i}", value, itl, 5.0) for i, value in enumerate(ttft)]


def test_outlier_is_named_with_its_figure_and_that_of_its_peers() -> None:
    found = find_outliers(peers(0.2, 0.21, 0.19, 0.2, 2.1), POLICY)
    assert found == {"r4": "time to first token 2.1 s, 0.2 s among its 4 peers"}


def test_late_tokens_are_slow_too() -> None:
    samples = [PeerSample(f"r{i}", 0.2, 0.2 if i == 2 else 0.01, 5.0) for i in range(5)]
    assert find_outliers(samples, POLICY) == {"r2": "inter-token latency 0.2 s, 0.01 s among its 4 peers"}


@given(st.lists(st.floats(0.001, 100), max_size=3))
def test_too_few_peers_are_never_compared(ttft: list[float]) -> None:
    assert find_outliers(peers(*ttft), POLICY) == {}


@given(st.floats(0.001, 10), st.lists(st.floats(0.0, 0.09), min_size=4, max_size=40))
def test_differences_below_the_floor_are_nobodys_concern(base: float, extra: list[float]) -> None:
    assert find_outliers(peers(*[base + e for e in extra]), POLICY) == {}


@given(st.lists(st.floats(0.001, 100), min_size=4, max_size=60))
def test_never_half_of_the_replicas_are_outliers(ttft: list[float]) -> None:
    assert len(find_outliers(peers(*ttft), POLICY)) < len(ttft) / 2


@given(st.floats(0.05, 1.0), st.integers(4, 40))
def test_one_that_is_ten_times_slower_is_found_among_any_number(base: float, count: int) -> None:
    jitter = [base * (1 + 0.02 * (i % 5)) for i in range(count)]
    assert set(find_outliers(peers(*jitter, 10 * base), POLICY)) == {f"r{count}"}


def test_replicas_that_finished_next_to_nothing_are_left_out() -> None:
    samples = [PeerSample(f"r{i}", 5.0 if i == 4 else 0.2, 0.01, 0.01 if i == 4 else 5.0) for i in range(5)]
    assert find_outliers(samples, POLICY) == {}


def run(looks: list[bool], streaks: dict[str, Streak] | None = None) -> list[bool]:
    """Verdicts on the last of five replicas, by whether each look shows it slow."""
    streaks, verdicts = streaks or {}, []
    for slow in looks:
        streaks = follow(streaks, peers(0.2, 0.2, 0.2, 0.2, 3.0 if slow else 0.2), POLICY)
        verdicts.append(streaks["r4"].slow)
    return verdicts


def test_verdict_needs_looks_in_a_row_and_so_does_its_end() -> None:
    flagged = run([True] * 6)
    assert flagged == [False] * 5 + [True]
    assert run([True] * 6 + [False] * 6)[5:] == [True] * 6 + [False]


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=5), max_size=20))
def test_bursts_shorter_than_the_bound_never_flag(bursts: list[list[bool]]) -> None:
    looks = [look for burst in bursts for look in ([True] * len(burst) + [False])]
    assert True not in run(looks)


def test_one_that_is_gone_is_forgotten() -> None:
    streaks = follow({"gone": Streak(slow=True)}, peers(0.1, 0.1, 0.1, 0.1), POLICY)
    assert set(streaks) == {"r0", "r1", "r2", "r3"}


def test_verdict_keeps_the_figures_that_it_was_made_with() -> None:
    streaks: dict[str, Streak] = {}
    for value in (3.0,) * 6 + (4.0,) * 3:
        streaks = follow(streaks, peers(0.2, 0.2, 0.2, 0.2, value), POLICY)
    assert streaks["r4"].reason == "time to first token 3 s, 0.2 s among its 4 peers"
