"""Schedules that Hypothesis drives, over pools that keep what earlier ones left in them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.schedules import (
    FEWEST_BLOCKS,
    LONGEST_ANSWER,
    MODELS,
    MOST_BLOCKS,
    Arrival,
    ScheduleError,
    ScheduleRun,
    SubjectModel,
    make_subject,
    run_schedules,
)
from workers.engines.torch_engine.scheduler import SchedulerLimits

PROMPTS = 16

Drawn = tuple[int, int, int, int | None]
ARRIVAL = st.tuples(
    st.integers(0, PROMPTS - 1),
    st.integers(1, LONGEST_ANSWER),
    st.integers(0, 20),
    st.none() | st.integers(0, 40),
)
SCHEDULES = st.lists(st.lists(ARRIVAL, min_size=1, max_size=7), min_size=1, max_size=3)


@pytest.fixture(scope="module", params=MODELS)
def subject(request: pytest.FixtureRequest) -> SubjectModel:
    return make_subject(request.param, prompts=PROMPTS)


def arrivals_of(subject: SubjectModel, drawn: list[Drawn]) -> list[Arrival]:
    return [
        Arrival(subject.known[number % len(subject.known)], length, step, cancelled)
        for number, length, step, cancelled in drawn
    ]


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    schedules=SCHEDULES,
    sequences=st.integers(1, 6),
    spare_tokens=st.integers(0, 60),
    blocks=st.integers(FEWEST_BLOCKS, MOST_BLOCKS),
)
def test_no_schedule_makes_a_wrong_token_or_loses_a_block(
    subject: SubjectModel, schedules: list[list[Drawn]], sequences: int, spare_tokens: int, blocks: int
) -> None:
    limits = SchedulerLimits(sequences, sequences + spare_tokens)
    run = ScheduleRun(subject, limits, blocks=blocks)
    for drawn in schedules:
        run.run(arrivals_of(subject, drawn))


def test_drawn_schedules_meet_preemption_eviction_and_hits(subject: SubjectModel) -> None:
    run_schedules(subject, count=24, seed=3)
    tally = subject.tally
    assert min(tally.preemptions, tally.evictions, tally.cached_tokens, tally.cancelled) > 0


def test_wrong_content_of_one_cached_block_is_seen(subject: SubjectModel) -> None:
    """The check itself: scribble over what a prefix hit will read, and it must complain."""
    known = max(subject.known, key=lambda known: len(known.prompt))
    run = ScheduleRun(subject, SchedulerLimits(2, 200), blocks=MOST_BLOCKS)
    again = [Arrival(known, 8, step=0)]
    run.run(again)
    subject.pools[-1].values.add_(torch.ones(()))
    with pytest.raises(ScheduleError, match="transformers says"):
        run.run(again)
