"""The search for the best settings: few launches, no advice out of noise, and the memory plan in view."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exaserve_ops.validation.domain.asking import (
    Answer,
    AskAll,
    Launched,
    LaunchWith,
    Load,
    Need,
    Slept,
)
from exaserve_ops.validation.domain.launching import check_tuning, options_of
from exaserve_ops.validation.domain.lifecycle import PASSED, SKIPPED
from exaserve_ops.validation.domain.procedures import check_concurrency
from exaserve_ops.validation.domain.tuning import (
    Forecast,
    Ladders,
    Limits,
    Measured,
    Round,
    Setting,
    joined,
    ladders_of,
    next_setting,
    standing_of,
)
from tests.fakes.made_up_engine import SUBJECT, MadeUpEngine

LIMITS = Limits(ttft_seconds=1.0, itl_seconds=0.1)
LADDERS = Ladders((2, 4, 8, 16, 32), (512, 1024, 2048, 4096, 8192), own=Setting(8, 2048))
Rate = Callable[[Setting], Measured]
own_settings = st.sampled_from(LADDERS.settings)


def search(
    rate: Rate,
    *,
    budget: int = 48,
    ladders: Ladders = LADDERS,
    forbidden: dict[Setting, str] | None = None,
    limits: Limits = LIMITS,
) -> list[Measured]:
    """Launch what is next until nothing is, with what a function makes of each setting."""
    launched: list[Measured] = []
    while len(launched) < budget:
        setting = next_setting(ladders, launched, limits, forbidden or {})
        if setting is None:
            return launched
        launched.append(rate(setting))
    return launched


def best_of(launched: Sequence[Measured], limits: Limits = LIMITS) -> Measured:
    standing = standing_of(launched, limits)
    assert standing is not None
    return standing.best


def steady(setting: Setting, rate: float, ttft: float = 0.1) -> Measured:
    """Three rounds that differ by a hundredth."""
    return Measured(setting, tuple(Round(rate * factor, ttft, 0.01) for factor in (0.995, 1.0, 1.005)))


def hill(summit: Setting) -> Rate:
    """One summit, and down from it on all sides."""

    def rate(setting: Setting) -> Measured:
        away = abs(math.log2(setting.sequences / summit.sequences)) + abs(
            math.log2(setting.tokens / summit.tokens)
        )
        return steady(setting, 1000 * 0.8**away)

    return rate


@given(own_settings, own_settings)
def test_the_summit_is_found_from_wherever_the_run_is(summit: Setting, own: Setting) -> None:
    launched = search(hill(summit), ladders=replace(LADDERS, own=own))
    assert launched[0].setting == own, "the run's own settings are always among them"
    assert best_of(launched).setting == summit
    settings = [one.setting for one in launched]
    assert len(set(settings)) <= 23, "of 25"
    again = [one for number, one in enumerate(settings) if one in settings[:number]]
    led = {best_of(launched[:number]).setting for number in range(1, len(launched) + 1)}
    assert set(again) == (led if len(led) > 1 else set()), "what led on the way, and nothing else"


@given(own_settings, own_settings, st.integers(1, 24))
def test_it_never_launches_more_than_it_may(summit: Setting, own: Setting, budget: int) -> None:
    assert len(search(hill(summit), ladders=replace(LADDERS, own=own), budget=budget)) <= budget


rounds = st.lists(
    st.builds(Round, st.floats(1, 1000), st.floats(0.01, 3), st.floats(0.001, 0.3)), min_size=3, max_size=3
)
outcomes = st.lists(st.one_of(rounds, st.just([])), min_size=1, max_size=30)


@given(outcomes, own_settings)
def test_whatever_is_measured_the_best_changes_only_after_both_were_measured_again(
    told: list[list[Round]], own: Setting
) -> None:
    results = iter(told)

    def rate(setting: Setting) -> Measured:
        found = tuple(next(results))
        return Measured(setting, found, "" if found else "out of memory")

    launched = search(rate, ladders=replace(LADDERS, own=own), budget=len(told))
    for number in range(1, len(launched)):
        before, after = best_of(launched[:number]), best_of(launched[: number + 1])
        if before.setting == after.setting or before.why:
            continue
        beside = [one.setting for one in launched[number - 2 : number + 1]]
        assert beside == [after.setting, before.setting, after.setting], "in turn, so that nothing drifted"
        assert after.launches == 2
        assert after.is_clearly_better(before, LIMITS)
        if after.keeps(LIMITS) and before.keeps(LIMITS):
            assert min(one.tokens_per_second for one in after.rounds) > max(
                one.tokens_per_second for one in before.rounds
            )


@given(outcomes)
def test_of_two_only_one_is_clearly_better(told: list[list[Round]]) -> None:
    found = [Measured(Setting(2, 512), tuple(one), "" if one else "died") for one in told]
    for one in found:
        for other in found:
            if one.rounds or other.rounds:
                assert not (one.is_clearly_better(other, LIMITS) and other.is_clearly_better(one, LIMITS))
            assert not one.is_clearly_better(one, LIMITS) or one.why == ""


def test_noise_alone_is_hardly_ever_advice() -> None:
    wrong = 0
    for seed in range(300):
        noise = random.Random(seed)  # noqa: S311 - the same noise in each run of the tests

        def rate(setting: Setting, noise: random.Random = noise) -> Measured:
            level = noise.gauss(1.0, 0.1)  # of this launch, on top of that of its rounds
            return Measured(
                setting, tuple(Round(600 * level * noise.gauss(1.0, 0.1), 0.1, 0.01) for _ in range(3))
            )

        wrong += best_of(search(rate, budget=7)).setting != LADDERS.own
    assert wrong <= 15, f"{wrong} of 300: launches that differ by a tenth lead one run in twenty astray"


@pytest.mark.parametrize("drift", [0.7, 0.9, 1.1, 1.4, 2.0])
def test_a_machine_that_becomes_quicker_or_slower_meanwhile_advises_nothing(drift: float) -> None:
    launches = 0

    def rate(setting: Setting) -> Measured:
        nonlocal launches
        launches += 1
        return steady(setting, 100 * (drift if launches > 1 else 1.0))

    assert best_of(search(rate)).setting == LADDERS.own


def test_the_quickest_is_not_the_best_where_its_answers_come_too_late() -> None:
    def rate(setting: Setting) -> Measured:
        return steady(setting, 10.0 * setting.sequences, ttft=setting.sequences / 10)

    best = best_of(search(rate))
    assert best.setting.sequences == 8, "16 would be twice as quick, and takes 1.6 s to the first token"


def test_settings_that_keep_the_limits_take_the_place_of_those_that_do_not() -> None:
    def rate(setting: Setting) -> Measured:
        return steady(setting, 100.0, ttft=setting.sequences / 6)

    best = best_of(search(rate))
    assert (best.setting.sequences, best.keeps(LIMITS)) == (4, True)


def test_where_none_keeps_the_limits_the_nearest_is_told() -> None:
    def rate(setting: Setting) -> Measured:
        return steady(setting, 100.0, ttft=2.0 + setting.sequences)

    best = best_of(search(rate))
    assert (best.setting.sequences, best.ttft_p95_seconds, best.keeps(LIMITS)) == (2, 4.0, False)


def test_a_clear_gain_that_is_small_is_no_reason_to_change() -> None:
    def rate(setting: Setting) -> Measured:
        return steady(setting, 100.0 if setting == LADDERS.own else 102.0)

    assert best_of(search(rate)).setting == LADDERS.own


def test_what_does_not_start_is_gone_round() -> None:
    def rate(setting: Setting) -> Measured:
        if setting.tokens >= 4096:
            return Measured(setting, why="CUDA out of memory")
        return steady(setting, float(setting.sequences))

    best = best_of(search(rate))
    assert (best.setting, best.why) == (Setting(32, 2048), "")


def test_own_settings_that_do_not_start_are_gone_round_too() -> None:
    def rate(setting: Setting) -> Measured:
        if setting == LADDERS.own:
            return Measured(setting, why="its replica is gone")
        return hill(Setting(4, 1024))(setting)

    assert best_of(search(rate)).setting == Setting(4, 1024)


def test_what_the_memory_plan_forbids_is_not_launched_but_for_what_runs() -> None:
    forbidden = {s: "does not fit" for s in LADDERS.settings if s.sequences >= 8}
    launched = search(hill(Setting(32, 2048)), forbidden=forbidden)
    assert {one.setting for one in launched} & forbidden.keys() == {LADDERS.own}


def test_rounds_of_all_launches_of_a_setting_are_told_as_one() -> None:
    a, b = Setting(2, 512), Setting(4, 512)
    [one, other] = joined([steady(a, 100), steady(b, 50), steady(a, 200), Measured(a, why="it died")])
    assert (one.setting, one.launches, len(one.rounds), one.why) == (a, 3, 6, "")
    assert one.tokens_per_second == pytest.approx(149.75)
    assert one.spread_ratio == pytest.approx((201 - 99.5) / 2 / 149.75)
    assert (other.setting, other.launches) == (b, 1)


@pytest.mark.parametrize("engine", ["torch", "vllm", "sglang", "simulated"])
@pytest.mark.parametrize(("most", "context"), [(1, 16), (2, 512), (32, 4096), (1024, 1_000_000)])
@pytest.mark.parametrize("told", [0, 1, 6, 64, 5000])
def test_ladders_hold_only_what_an_engine_can_be_launched_with(
    engine: str, most: int, context: int, told: int
) -> None:
    options = dict.fromkeys(options_of(engine, Setting(told, told)), told)
    ladders = ladders_of(engine, options, most_at_once=most, context_tokens=context)
    assert ladders is not None
    assert ladders.own in ladders.settings
    assert options_of(engine, ladders.own) == options, "the run's own is launched as it was asked for"
    assert len(set(ladders.sequences)) == len(ladders.sequences)
    assert len(set(ladders.tokens)) == len(ladders.tokens)
    others = [one for one in ladders.settings if one != ladders.own]
    for setting in others:
        assert setting.sequences <= max(most, told)
        assert all(value >= 1 for value in options_of(engine, setting).values())
    assert next_setting(ladders, (), LIMITS, {}) == ladders.own


@pytest.mark.parametrize(
    ("engine", "options", "sequences", "own"),
    [
        ("torch", {}, (2, 4, 8, 16, 0), Setting(0, 0)),
        ("torch", {"max_num_seqs": 256}, (2, 4, 8, 16, 256), Setting(256, 0)),
        ("vllm", {"max_num_seqs": 8}, (2, 4, 8, 16, 32), Setting(8, 0)),
        ("vllm", {"max_num_seqs": 6}, (2, 4, 6, 8, 16, 32), Setting(6, 0)),
        ("sglang", {"chunked_prefill_size": -1}, (2, 4, 8, 16, 0), Setting(0, 0)),
    ],
)
def test_more_requests_than_are_sent_at_once_are_one_rung(
    engine: str, options: dict[str, int], sequences: tuple[int, ...], own: Setting
) -> None:
    ladders = ladders_of(engine, options, most_at_once=32, context_tokens=4096)
    assert ladders is not None
    assert (ladders.sequences, ladders.own) == (sequences, own)
    assert ladders.tokens == (
        (512, 1024, 2048, 4096, 8192, 0) if engine == "sglang" else (512, 1024, 0, 2048, 4096, 8192)
    ), "no step has more tokens than all prompts together, 8,192"


def test_the_search_asks_what_the_ramp_asks_and_only_what_is_warm_is_counted() -> None:
    asked: dict[str, list[AskAll]] = {"ramp": [], "search": []}

    class Listening(MadeUpEngine):
        def give(self, need: Need) -> list[Answer] | Load | Launched | Slept | None:
            if isinstance(need, AskAll):
                asked[where].append(need)
            return super().give(need)

    quick = {"ttft_limit_seconds": 30.0, "itl_limit_seconds": 5.0}
    subject = replace(SUBJECT, most_launches=1, **quick)  # type: ignore[arg-type]  # two of its numbers
    where = "ramp"
    ramp = Listening().play(check_concurrency(subject))
    where = "search"
    cold = Listening(usual_setting=(4, 2048), cold_asks=8).play(check_tuning(subject))
    ramps = [(len(n.asks), len(n.asks[0].tokens), n.asks[0].max_tokens) for n in asked["ramp"][-4:]]
    searched = [(len(n.asks), len(n.asks[0].tokens), n.asks[0].max_tokens) for n in asked["search"][:4]]
    assert ramps == searched == [(8, 128, 32), *[(16, 128, 32)] * 3]
    prompts = [ask.tokens for need in asked["search"] for ask in need.asks]
    assert len(set(prompts)) == len(prompts), "nothing is found in a cache"
    at_most = ramp.details["levels"][-1]
    own = cold.details["settings"][0]
    assert own["tokens_per_second"] == pytest.approx(at_most["tokens_per_second"]), "one load, one measure"
    assert own["ttft_p95_seconds"] == pytest.approx(at_most["ttft_p95_seconds"]), "what was cold is not told"


QUICK = replace(SUBJECT, ttft_limit_seconds=30.0, itl_limit_seconds=5.0)


def test_settings_of_a_run_are_measured_and_told_with_their_forecast() -> None:
    engine = MadeUpEngine(summit=(2, 512), refuses_from=2048)
    forecasts = {
        Setting(4, 512): Forecast("tight", 9_000_000, "1.2% is left over"),
        Setting(8, 512): Forecast("does not fit", 20_000_000, "it needs 20 MB of 16 MB"),
    }
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 1024}
    subject = replace(QUICK, forecasts=forecasts, options=options, most_launches=12)
    finding = engine.play(check_tuning(subject))
    assert finding.outcome == PASSED
    assert "tokens/s ± 0% with max_num_seqs 2, max_num_batched_tokens 512" in finding.figure
    assert "both measured twice" in finding.why
    assert finding.limit == "TTFT p95 up to 30 s, 5000 ms between tokens"
    assert engine.launched[0] == (4, 1024), "what runs is measured first, and is no launch"
    assert len(engine.launched) <= subject.most_launches + 1
    assert (8, 512) not in engine.launched
    rows = finding.details["settings"]
    assert len(rows) == len({(row["sequences"], row["tokens"]) for row in rows}) < len(engine.launched)
    [best] = [row for row in rows if row["is_best"]]
    assert (best["sequences"], best["tokens"]) == (2, 512)
    [own] = [row for row in rows if row["is_own"]]
    assert (own["launches"], len(own["rounds"])) == (2, 6), "measured again beside what is better"
    assert best["launches"] == 2
    [tight] = [row for row in rows if row["memory"]]
    assert (tight["memory"], tight["needed_bytes"]) == ("tight", 9_000_000)
    assert {row["why"] for row in rows if row["tokens"] >= 2048} <= {"CUDA out of memory"}
    assert finding.details["skipped"] == [{"sequences": 8, "tokens": 512, "why": "it needs 20 MB of 16 MB"}]
    assert finding.details["best"] == {"max_num_seqs": 2, "max_num_batched_tokens": 512}


def test_where_nothing_is_clearly_better_nothing_is_advised() -> None:
    engine = MadeUpEngine(summit=(8, 1024))
    finding = engine.play(check_tuning(replace(QUICK, options={"max_num_seqs": 8})))
    assert finding.outcome == PASSED
    assert finding.figure.endswith("tokens/s ± 0% as it was asked for")
    assert "no other settings are advised" in finding.why
    assert finding.details["best"] is None
    assert [row["is_own"] for row in finding.details["settings"] if row["is_best"]] == [True]


def test_what_looked_better_and_could_not_be_measured_again_is_no_advice() -> None:
    engine = MadeUpEngine(summit=(1, 512))
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
    forbidden = Forecast("does not fit", why="it does not fit")
    forecasts = {Setting(8, 1024): forbidden}
    subject = replace(QUICK, options=options, most_launches=1, forecasts=forecasts)
    finding = engine.play(check_tuning(subject))
    assert finding.figure.endswith("as it was asked for")
    assert "max_num_seqs 4, max_num_batched_tokens 512 looked better" in finding.why
    assert "no launch was left" in finding.why
    assert finding.details["best"] is None


def test_a_search_says_why_it_brought_nothing() -> None:
    none = MadeUpEngine().play(check_tuning(replace(SUBJECT, most_launches=0)))
    assert (none.outcome, none.why) == (SKIPPED, "no launches were asked for")
    dead = MadeUpEngine(refuses_from=0).play(check_tuning(SUBJECT))
    assert (dead.outcome, dead.why) == (SKIPPED, "no setting could be measured: CUDA out of memory")
    slow = MadeUpEngine().play(check_tuning(replace(SUBJECT, ttft_limit_seconds=0.001)))
    assert slow.outcome == PASSED, "it is information"
    assert slow.why.startswith("none keeps within the limits")
    assert slow.details["best"] is None
    assert [row["is_nearest"] for row in slow.details["settings"]].count(True) == 1


def test_a_launch_that_is_never_done_is_told_beside_what_was_measured() -> None:
    procedure = check_tuning(replace(QUICK, most_launches=1))
    engine = MadeUpEngine(summit=(8, 1024))
    reply = engine.give(next(procedure))
    try:
        while True:
            need = procedure.send(reply)
            is_other = isinstance(need, LaunchWith) and len(engine.launched) == 1
            reply = Launched(done=False, why="no room") if is_other else engine.give(need)
    except StopIteration as ended:
        finding = ended.value
    assert [row["why"] for row in finding.details["settings"]] == ["", "no room"]
    assert finding.outcome == PASSED
