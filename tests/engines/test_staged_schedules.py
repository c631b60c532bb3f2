"""The random schedules, with the layers split over stages: every token is as of one process."""

from __future__ import annotations

import random

import pytest
import torch

from bench.schedules import (
    LONGEST_ANSWER,
    MOST_BLOCKS,
    Arrival,
    ScheduleError,
    ScheduleRun,
    SubjectModel,
    make_subject,
    run_schedules,
)
from workers.engines.torch_engine.scheduler import SchedulerLimits

SPLITS = (("llama", 2), ("qwen2", 2), ("qwen3", 3))


@pytest.fixture(scope="module", params=SPLITS, ids=lambda split: f"{split[0]} in {split[1]} stages")
def staged(request: pytest.FixtureRequest) -> SubjectModel:
    name, stages = request.param
    return make_subject(name, prompts=10, stages=stages)


def test_stages_make_the_tokens_of_one_process_in_every_schedule(staged: SubjectModel) -> None:
    """Chunked prefill, batches, preemption, prefix hits, evictions and cancellation among them."""
    run_schedules(staged, count=8, seed=5, with_tiers=False)
    tally = staged.tally
    assert min(tally.preemptions, tally.evictions, tally.cached_tokens, tally.cancelled) > 0


@pytest.mark.parametrize("stage", [0, -1])
def test_wrong_content_of_one_stages_blocks_is_seen(staged: SubjectModel, stage: int) -> None:
    """The check itself: what a prefix hit reads has to be right in every stage."""
    numbers = random.Random(stage)  # noqa: S311 - test data
    known = numbers.choice([k for k in staged.known if len(k.prompt) > LONGEST_ANSWER])
    run = ScheduleRun(staged, SchedulerLimits(2, 200), blocks=MOST_BLOCKS)
    again = [Arrival(known, 8, step=0)]
    run.run(again)
    staged.pools[stage].values.add_(torch.ones(()))
    with pytest.raises(ScheduleError, match="transformers says"):
        run.run(again)
