"""Schedules whose blocks leave for host memory and disk: not a token changes, whatever fails there."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.schedules import (
    FEWEST_BLOCKS,
    LONGEST_ANSWER,
    Arrival,
    ScheduleError,
    ScheduleRun,
    SubjectModel,
    make_subject,
    run_schedules,
)
from bench.tier_rig import TierPlan
from workers.engines.torch_engine.scheduler import SchedulerLimits
from workers.kv.tiers.heat import EVICTIONS

PROMPTS = 12
ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, PROMPTS - 1),
        st.tuples(st.integers(1, LONGEST_ANSWER), st.integers(0, 20), st.none() | st.integers(0, 40)),
    ),
    min_size=1,
    max_size=7,
)
PLANS = st.builds(
    TierPlan,
    host_blocks=st.sampled_from([0, 1, 5, 40]),
    disk_blocks=st.sampled_from([0, 2, 20, 100]),
    eviction=st.sampled_from(EVICTIONS),
    write_places=st.integers(1, 8),
    disk_pace=st.sampled_from([0.3, 1.0, 6.0]),
    damage_ratio=st.sampled_from([0.0, 0.3]),
    dies_at=st.none() | st.integers(1, 100),
    host_ends_at=st.none() | st.integers(1, 100),
)


@pytest.fixture(scope="module")
def subject() -> SubjectModel:
    return make_subject("qwen3", prompts=PROMPTS)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    schedules=st.lists(ARRIVALS, min_size=2, max_size=3),
    plan=PLANS,
    sequences=st.integers(1, 6),
    spare_blocks=st.integers(0, 4),
)
def test_no_schedule_over_tiers_makes_a_wrong_token_or_loses_a_block(
    subject: SubjectModel,
    schedules: list[list[tuple[int, tuple[int, int, int | None]]]],
    plan: TierPlan,
    sequences: int,
    spare_blocks: int,
) -> None:
    limits = SchedulerLimits(sequences, sequences + 60)
    with tempfile.TemporaryDirectory() as folder:
        run = ScheduleRun(
            subject, limits, blocks=FEWEST_BLOCKS + spare_blocks, tiers=plan, folder=Path(folder)
        )
        for drawn in schedules:
            run.run([Arrival(subject.known[n % len(subject.known)], *rest) for n, rest in drawn])
        run.close()
        assert list(Path(folder).glob("*.slots")) == []


def test_drawn_schedules_use_every_tier_and_meet_every_fault(subject: SubjectModel) -> None:
    run_schedules(subject, count=48, seed=4)
    tally = subject.tally
    moved = (tally.host_blocks_in, tally.host_blocks_out, tally.disk_blocks_in, tally.disk_blocks_out)
    assert min(moved) > 0
    assert min(tally.damaged_blocks, tally.preemptions_swapped, tally.tiers_failed) > 0


def test_wrong_content_in_host_memory_would_be_seen(subject: SubjectModel, tmp_path: Path) -> None:
    """The check itself: scribble over what lies in host memory, and it must complain."""
    plan = TierPlan(host_blocks=40, disk_blocks=0)
    run = ScheduleRun(subject, SchedulerLimits(2, 200), blocks=FEWEST_BLOCKS, tiers=plan, folder=tmp_path)
    longest = sorted(subject.known, key=lambda known: -len(known.prompt))[:4]
    again = [Arrival(known, 20, step=60 * number) for number, known in enumerate(longest)]
    run.run(again)
    rig = run._rig
    assert rig is not None
    rig._mover.fill_host(range(40), 0x3F)
    with pytest.raises(ScheduleError, match="transformers says"):
        run.run(again)
    rig.store.close()
