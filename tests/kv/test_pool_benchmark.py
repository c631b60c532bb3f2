"""The benchmark's own promise, on a small node: pooled holds more than paged, paged more than reserved."""

from __future__ import annotations

from bench.kv_pool import WAYS, make_sessions, run


def test_same_seed_makes_the_same_mix_within_the_limits() -> None:
    sessions = make_sessions(300, 12, seed=3)
    assert sessions == make_sessions(300, 12, seed=3)
    lengths = [end for session in sessions for _, end in session.turns]
    assert max(lengths) <= 4096
    assert 400 < sum(lengths) / len(lengths) < 640
    for session in sessions:
        for prompt, end in session.turns:
            assert 0 < prompt < end


def test_pooling_holds_more_than_paging_and_paging_more_than_reserving() -> None:
    result = run(4, 512, 7, 40)
    ratios = [result[f"{way}_used_ratio"] for way in WAYS]
    assert ratios == sorted(ratios)
    assert ratios[0] < ratios[2]
    held = result["sessions_held"]
    assert held["static"] < held["paged"] <= held["pooled"]
    assert result["sessions_over_static"] >= 4
