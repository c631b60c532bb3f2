"""Each check of a validation passes a well-behaved engine, and fails the one that has its fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exaserve_ops.validation.domain import catalogue, procedures
from exaserve_ops.validation.domain.asking import Finding, Subject
from exaserve_ops.validation.domain.judging import Level, find_divergences, find_knee, first_difference
from exaserve_ops.validation.domain.lifecycle import FAILED, PASSED, SKIPPED
from exaserve_ops.validation.domain.model_checks import (
    ModelRecord,
    judge_agreement,
    judge_config,
    judge_hashing,
    judge_weights,
)
from exaserve_ops.validation.domain.procedures import PROCEDURES
from exaserve_ops.validation.domain.prompts import draw_tokens, golden_prompts
from tests.fakes.made_up_engine import SUBJECT, MadeUpEngine, with_golden


def subject_for(name: str, engine: MadeUpEngine) -> Subject:
    """What a check is given: with golden answers where it builds on them."""
    if catalogue.GOLDEN not in catalogue.BY_NAME[name].after:
        return SUBJECT
    return with_golden(engine.play(procedures.check_golden(SUBJECT)))


def found(name: str, engine: MadeUpEngine) -> Finding:
    return engine.play(PROCEDURES[name](subject_for(name, engine)))


@pytest.mark.parametrize("name", sorted(PROCEDURES))
def test_well_behaved_engine_passes(name: str) -> None:
    finding = found(name, MadeUpEngine())
    assert finding.outcome == PASSED, finding
    assert finding.why


def test_every_check_of_an_engine_has_a_way_to_go() -> None:
    asked = {check.name for check in catalogue.CATALOGUE if not check.of_model}
    assert asked - set(PROCEDURES) == {catalogue.LAUNCH, catalogue.HASHING}


FAULTS: list[tuple[str, Callable[[], MadeUpEngine], str]] = [
    ("memory", lambda: MadeUpEngine(total_blocks=200), "plan of this model's memory is wrong"),
    ("golden", lambda: MadeUpEngine(differs_each_time=True), "answered in two ways"),
    ("prefix", lambda: MadeUpEngine(caches=False), "computed again"),
    ("chat", lambda: MadeUpEngine(rewrites_turns=True), "written in another way from token 2 on"),
    ("stop", lambda: MadeUpEngine(ignores_stop=True), "should end before"),
    ("context", lambda: MadeUpEngine(most_context=400), "a prompt of 511 tokens is not answered"),
    ("context", lambda: MadeUpEngine(takes_too_long_contexts=True), "should be refused"),
    ("concurrency", lambda: MadeUpEngine(fails_beyond=4), "with 4 at once: request 1 of 4: status 500"),
    ("idle", lambda: MadeUpEngine(slow_after_rest=2.0), "is slow"),
    ("sleep", lambda: MadeUpEngine(sleeps=False), "not put to sleep: the host has no room"),
    ("sleep", lambda: MadeUpEngine(wakes=False), "did not wake: its replica was started anew"),
    ("sleep", lambda: MadeUpEngine(forgets_in_sleep=True, differs_by_launch=True), "in another way"),
    ("blocks", lambda: MadeUpEngine(leaked_ratio=0.02), "held by nobody"),
    ("again", lambda: MadeUpEngine(differs_by_launch=True), "differs from token 1 on after another launch"),
    ("again", lambda: MadeUpEngine(launches_again=False), "did not become ready: CUDA out of memory"),
]


@pytest.mark.parametrize(("name", "make", "why"), FAULTS)
def test_fault_is_found_and_said(name: str, make: Callable[[], MadeUpEngine], why: str) -> None:
    finding = found(name, make())
    assert finding.outcome == FAILED, finding
    assert why in finding.why


@pytest.mark.parametrize(
    "engine",
    [
        MadeUpEngine(is_asleep=True),
        MadeUpEngine(sleeps=False),
        MadeUpEngine(forgets_in_sleep=True, differs_by_launch=True),
        MadeUpEngine(is_asleep=True, fails_beyond=0),
    ],
    ids=["was left asleep", "falls asleep too late", "answers in another way", "answers nothing"],
)
def test_check_of_sleep_leaves_no_sleeper_to_the_checks_that_follow(engine: MadeUpEngine) -> None:
    was_asleep = engine.is_asleep and engine.fails_beyond
    assert found("sleep", engine).outcome == (PASSED if was_asleep else FAILED)
    assert not engine.is_asleep


def test_engine_that_another_controller_left_asleep_and_that_does_not_wake_is_said() -> None:
    finding = found("sleep", MadeUpEngine(is_asleep=True, wakes=False))
    assert (finding.outcome, finding.why) == (FAILED, "it did not wake: its replica was started anew")


@pytest.mark.parametrize("name", sorted(set(PROCEDURES) - {"blocks", "memory", "stop", "tuning"}))
def test_engine_that_answers_nothing_fails(name: str) -> None:
    engine = MadeUpEngine(fails_beyond=0)
    subject = with_golden(MadeUpEngine().play(procedures.check_golden(SUBJECT)))
    finding = engine.play(PROCEDURES[name](subject))
    assert finding.outcome == FAILED
    assert "status 500, out of memory" in finding.why


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("memory", MadeUpEngine(total_blocks=None)),
        ("chat", MadeUpEngine(tells_tokens=False)),
    ],
)
def test_what_an_engine_does_not_tell_is_said_and_is_no_fault(name: str, engine: MadeUpEngine) -> None:
    finding = found(name, engine)
    assert finding.outcome == SKIPPED
    assert "does not" in finding.why


def test_golden_prompts_are_those_of_the_smallest_context_of_the_run() -> None:
    short = replace(SUBJECT, context_tokens=200, shared_context_tokens=200)
    long = replace(SUBJECT, engine="vllm", context_tokens=4096, shared_context_tokens=200)
    asked = [[ask.tokens for ask in procedures.golden_asks(one)] for one in (short, long)]
    assert asked[0] == asked[1]
    lengths = [len(tokens) for tokens in asked[0]]
    assert lengths == sorted(set(lengths)), "they differ in length in a short context, too"
    assert lengths[-1] + 24 < 200
    finding = MadeUpEngine(most_context=200).play(procedures.check_golden(short))
    assert finding.why.startswith(f"prompts of {lengths[0]} to {lengths[-1]} tokens")


def test_engine_that_tells_no_tokens_is_compared_by_its_text() -> None:
    silent = MadeUpEngine(tells_tokens=False)
    assert found("golden", silent).outcome == PASSED
    assert found("golden", MadeUpEngine(tells_tokens=False, differs_each_time=True)).outcome == FAILED
    assert found("again", MadeUpEngine(tells_tokens=False, differs_by_launch=True)).outcome == FAILED


def test_knee_is_where_more_at_once_bring_no_more() -> None:
    finding = found("concurrency", MadeUpEngine())
    assert finding.details["knee"] == 4
    assert [level["at_once"] for level in finding.details["levels"]] == [1, 2, 4, 8]
    assert "more than 4 at once bring hardly more" in finding.why
    short = MadeUpEngine().play(procedures.check_concurrency(replace(SUBJECT, most_at_once=2)))
    assert "the most that was tried" in short.why


def test_memory_that_was_not_planned_is_not_judged() -> None:
    finding = MadeUpEngine().play(procedures.check_memory(replace(SUBJECT, forecast_tokens=None)))
    assert finding.outcome == SKIPPED


@pytest.mark.parametrize(
    ("blocks", "outcome"), [(256, PASSED), (268, PASSED), (270, FAILED), (244, PASSED), (242, FAILED)]
)
def test_memory_may_be_off_by_a_twentieth(blocks: int, outcome: str) -> None:
    assert found("memory", MadeUpEngine(total_blocks=blocks)).outcome == outcome


def test_engine_of_a_pool_may_have_more_than_was_planned_and_not_less() -> None:
    lender = replace(SUBJECT, may_borrow=True)
    assert MadeUpEngine(total_blocks=400).play(procedures.check_memory(lender)).outcome == PASSED
    assert MadeUpEngine(total_blocks=200).play(procedures.check_memory(lender)).outcome == FAILED


def test_prompts_share_no_beginning_and_are_drawn_alike() -> None:
    prompts = golden_prompts(vocabulary=1000, context_tokens=512)
    assert len({prompt[:4] for prompt in prompts}) == len(prompts)
    assert prompts == golden_prompts(vocabulary=1000, context_tokens=512)
    assert prompts != golden_prompts(vocabulary=1000, context_tokens=512, seed=1)
    assert all(250 <= token < 500 for prompt in prompts for token in prompt)


@given(st.integers(1, 300), st.integers(1, 5000))
def test_drawn_tokens_are_of_the_vocabulary(count: int, vocabulary: int) -> None:
    drawn = draw_tokens("x", count, vocabulary=vocabulary)
    assert len(drawn) == count
    assert all(0 <= token < vocabulary for token in drawn)


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_first_difference_is_the_first(one: list[int], other: list[int]) -> None:
    place = first_difference(one, other)
    if place is None:
        assert one == other
    else:
        assert one[:place] == other[:place]
        assert one[place : place + 1] != other[place : place + 1]


RECORD = ModelRecord(
    family="llama",
    layers=4,
    context_tokens=2048,
    vocabulary=1000,
    kv_bytes_per_token=2048,
    kv_refusal="",
    files=(("config.json", 10, "aa"), ("model.safetensors", 100, "bb")),
    manifest_files=(("config.json", 10, "aa"), ("model.safetensors", 100, "bb")),
)


def test_record_that_says_all_passes() -> None:
    assert judge_config(RECORD).outcome == PASSED
    assert judge_weights(RECORD).outcome == PASSED


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kv_refusal": "Unsupported attention layout: made up"}, "Unsupported attention layout"),
        ({"vocabulary": 0}, "does not give a vocabulary"),
        ({"context_tokens": None}, "a context length"),
    ],
)
def test_config_that_says_too_little_fails(change: dict[str, object], why: str) -> None:
    finding = judge_config(replace(RECORD, **change))  # type: ignore[arg-type]  # one field by its name
    assert finding.outcome == FAILED
    assert why in finding.why


@pytest.mark.parametrize(
    ("listed", "why"),
    [
        (None, "no manifest"),
        ((("config.json", 10, "aa"),), "model.safetensors is not the same"),
        ((("config.json", 10, "aa"), ("model.safetensors", 99, "bb")), "model.safetensors is not the same"),
        ((("config.json", 10, "aa"), ("model.safetensors", 100, "cc")), "model.safetensors is not the same"),
    ],
)
def test_manifest_that_lists_other_files_fails(
    listed: tuple[tuple[str, int, str], ...] | None, why: str
) -> None:
    finding = judge_weights(replace(RECORD, manifest_files=listed))
    assert finding.outcome == FAILED
    assert why in finding.why


def test_model_without_weights_fails() -> None:
    files = (("config.json", 10, "aa"),)
    assert judge_weights(replace(RECORD, files=files, manifest_files=files)).outcome == FAILED


def test_hashes_that_differ_by_process_fail() -> None:
    assert judge_hashing("torch", {}).outcome == PASSED
    assert judge_hashing("vllm", {}).outcome == PASSED
    assert judge_hashing("vllm", {"prefix_caching_hash_algo": "builtin"}).outcome == FAILED


def test_engines_that_part_at_a_tie_agree_and_others_do_not() -> None:
    one = {"tokens": [[1, 2, 3], [4, 5, 6]]}
    same = judge_agreement({"torch": one, "vllm": one})
    assert (same.outcome, same.figure) == (PASSED, "2 of 2 the same")
    tie = {"tokens": [[1, 2, 3], [4, 7, 8]], "alternatives": [[], [{}, {"5": -1.00, "7": -0.98}, {}]]}
    assert judge_agreement({"torch": one, "vllm": tie}).outcome == PASSED
    silent = one | {"alternatives": [[], []]}
    assert judge_agreement({"vllm": tie, "torch": silent}).outcome == PASSED, "whoever tells, is believed"
    apart = {"tokens": [[1, 2, 3], [4, 7, 8]], "alternatives": [[], [{}, {"5": -2.0, "7": -0.5}, {}]]}
    finding = judge_agreement({"torch": one, "vllm": apart})
    assert finding.outcome == FAILED
    assert finding.why == "torch and vllm part at token 2 of prompt 2, 1.500 nats apart"
    untold = judge_agreement({"torch": one, "vllm": {"tokens": [[1, 2, 3], [4, 7, 8]]}})
    assert untold.outcome == FAILED
    assert judge_agreement({"torch": one}).outcome == SKIPPED


def test_answer_that_ends_earlier_differs_where_it_ends() -> None:
    [divergence] = find_divergences([[1, 2]], [[1, 2, 3]])
    assert (divergence.place, divergence.tokens, divergence.gap_nats) == (2, (None, 3), None)


@given(st.lists(st.tuples(st.integers(1, 512), st.floats(0.1, 1e6)), min_size=1, max_size=8))
def test_knee_is_nearly_the_best_with_the_fewest(pairs: list[tuple[int, float]]) -> None:
    levels = [Level(at_once, rate, None, None, None) for at_once, rate in pairs]
    knee = find_knee(levels)
    assert knee is not None
    best = max(rate for _, rate in pairs)
    assert knee.tokens_per_second >= 0.95 * best
    assert all(rate < 0.95 * best for at_once, rate in pairs if at_once < knee.at_once)
