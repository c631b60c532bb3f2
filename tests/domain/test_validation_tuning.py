"""The search for the best settings: few launches, within the limits, and with the memory plan in view."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exaserve_ops.validation.domain.launching import check_tuning, options_of
from exaserve_ops.validation.domain.lifecycle import PASSED, SKIPPED
from exaserve_ops.validation.domain.tuning import (
    Forecast,
    Ladders,
    Limits,
    Measured,
    Setting,
    best_of,
    ladders_of,
    next_setting,
)
from tests.fakes.made_up_engine import SUBJECT, MadeUpEngine

LIMITS = Limits(ttft_seconds=1.0, itl_seconds=0.1)
LADDERS = Ladders((2, 4, 8, 16, 32), (512, 1024, 2048, 4096, 8192))


def search(rate: object, *, budget: int = 24, forbidden: dict[Setting, str] | None = None) -> list[Measured]:
    """Launch what is next until nothing is, with what a function makes of each setting."""
    measured: list[Measured] = []
    while len(measured) < budget:
        setting = next_setting(LADDERS, measured, LIMITS, forbidden or {})
        if setting is None:
            return measured
        measured.append(rate(setting))  # type: ignore[operator]  # a function of a setting
    return measured


def hill(summit: Setting) -> object:
    """One summit, and down from it on all sides."""

    def rate(setting: Setting) -> Measured:
        away = abs(math.log2(setting.sequences / summit.sequences)) + abs(
            math.log2(setting.tokens / summit.tokens)
        )
        return Measured(setting, 1000 * 0.8**away, 0.1, 0.01)

    return rate


@given(st.sampled_from(LADDERS.settings))
def test_the_summit_is_found_wherever_it_is_with_few_launches(summit: Setting) -> None:
    measured = search(hill(summit))
    best = best_of(measured, LIMITS)
    assert best is not None
    assert best.setting == summit
    assert len(measured) <= 15, "of 25"
    assert len({one.setting for one in measured}) == len(measured), "nothing is launched twice"


@given(st.sampled_from(LADDERS.settings), st.integers(1, 24))
def test_it_never_launches_more_than_it_may(summit: Setting, budget: int) -> None:
    assert len(search(hill(summit), budget=budget)) <= budget


def test_the_quickest_is_not_the_best_where_its_answers_come_too_late() -> None:
    def rate(setting: Setting) -> Measured:
        return Measured(setting, 10.0 * setting.sequences, setting.sequences / 10, 0.01)

    best = best_of(search(rate), LIMITS)
    assert best is not None
    assert best.setting.sequences == 8, "16 would be twice as quick, and takes 1.6 s to the first token"


def test_where_none_keeps_the_limits_the_nearest_is_told() -> None:
    def rate(setting: Setting) -> Measured:
        return Measured(setting, 100.0, 2.0 + setting.sequences, 0.01)

    best = best_of(search(rate), LIMITS)
    assert best is not None
    assert (best.setting.sequences, best.excess(LIMITS)) == (2, 4.0)


def test_of_two_that_are_nearly_as_good_the_smaller_is_taken() -> None:
    large, small = Setting(32, 8192), Setting(8, 2048)
    measured = [Measured(large, 102.0, 0.1, 0.01), Measured(small, 100.0, 0.1, 0.01)]
    best = best_of(measured, LIMITS)
    assert best is not None
    assert best.setting == small


def test_what_does_not_start_is_gone_round() -> None:
    def rate(setting: Setting) -> Measured:
        if setting.tokens >= 2048:
            return Measured(setting, why="CUDA out of memory")
        return Measured(setting, float(setting.sequences), 0.1, 0.01)

    best = best_of(search(rate), LIMITS)
    assert best is not None
    assert (best.setting, best.why) == (Setting(32, 512), "")


def test_what_the_memory_plan_forbids_is_not_launched() -> None:
    forbidden = {s: "does not fit" for s in LADDERS.settings if s.sequences >= 8}
    measured = search(hill(Setting(32, 2048)), forbidden=forbidden)
    assert not {one.setting for one in measured} & forbidden.keys()
    best = best_of(measured, LIMITS)
    assert best is not None
    assert best.setting == Setting(4, 2048)


@pytest.mark.parametrize("engine", ["torch", "vllm", "sglang", "simulated"])
@pytest.mark.parametrize(("most", "context"), [(1, 16), (2, 512), (32, 4096), (1024, 1_000_000)])
def test_ladders_hold_only_what_an_engine_can_be_launched_with(engine: str, most: int, context: int) -> None:
    ladders = ladders_of(engine, most_at_once=most, context_tokens=context)
    assert ladders is not None
    assert ladders.settings
    assert max(ladders.sequences) == most
    for setting in ladders.settings:
        assert all(value >= 1 for value in options_of(engine, setting).values())
    assert next_setting(ladders, (), LIMITS, {}) in ladders.settings


def test_settings_of_a_run_are_measured_and_told_with_their_forecast() -> None:
    engine = MadeUpEngine(summit=(4, 2048), refuses_from=4096)
    forecasts = {
        Setting(4, 2048): Forecast("tight", 9_000_000, "1.2% is left over"),
        Setting(8, 2048): Forecast("does not fit", 20_000_000, "it needs 20 MB of 16 MB"),
    }
    subject = replace(SUBJECT, forecasts=forecasts, ttft_limit_seconds=30.0, itl_limit_seconds=5.0)
    finding = engine.play(check_tuning(subject))
    assert finding.outcome == PASSED
    assert "max_num_seqs 4, max_num_batched_tokens 2048" in finding.figure
    assert finding.limit == "TTFT p95 up to 30 s, 5000 ms between tokens"
    assert len(engine.launched) <= subject.most_launches
    assert (8, 2048) not in engine.launched
    rows = finding.details["settings"]
    [best] = [row for row in rows if row["is_best"]]
    assert (best["memory"], best["needed_bytes"]) == ("tight", 9_000_000)
    assert [row["why"] for row in rows if row["tokens"] == 4096] == ["CUDA out of memory"]
    assert finding.details["skipped"] == [{"sequences": 8, "tokens": 2048, "why": "it needs 20 MB of 16 MB"}]
    assert finding.details["best"] == {"max_num_seqs": 4, "max_num_batched_tokens": 2048}


def test_a_search_says_why_it_brought_nothing() -> None:
    none = MadeUpEngine().play(check_tuning(replace(SUBJECT, most_launches=0)))
    assert (none.outcome, none.why) == (SKIPPED, "no launches were asked for")
    dead = MadeUpEngine(refuses_from=0).play(check_tuning(SUBJECT))
    assert (dead.outcome, dead.why) == (SKIPPED, "no setting could be measured: CUDA out of memory")
    slow = MadeUpEngine().play(check_tuning(replace(SUBJECT, ttft_limit_seconds=0.001)))
    assert slow.outcome == PASSED, "it is information"
    assert slow.why.startswith("none keeps within the limits")
    assert slow.details["best"] is None
