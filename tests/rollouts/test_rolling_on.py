"""Good releases go through over real engines under many-turn load: no request fails, no answer changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rollouts.rolling_fleet import PATIENT, Json, RollingFleet, told
from tests.rollouts.talking import Load, otherwise_answered

pytestmark = [pytest.mark.rollouts, pytest.mark.timeout(900)]

LONG = {"turns": 40, "words": 8}
"""Conversations that outlast a wave, so that some are moved between their turns."""


def assert_went_through(rollout: Json) -> None:
    assert rollout["status"] == "done", told(rollout)
    assert {wave["status"] for wave in rollout["waves"]} == {"passed"}


def assert_conversations_were_moved_and_none_failed(load: Load, rollout: Json, fleet: RollingFleet) -> None:
    assert load.failed == []
    numbers = fleet.release_numbers()
    by_session: dict[str, set[int]] = {}
    for one in load.answered:
        by_session.setdefault(one.session, set()).add(numbers[one.replica_id])
    both = {rollout["from_number"], rollout["to_number"]}
    assert any(seen == both for seen in by_session.values()), "some conversation went from old to new"
    backwards = [
        (one, later)
        for one in load.answered
        for later in load.answered
        if (one.session, one.turn + 1) == (later.session, later.turn)
        and numbers[one.replica_id] > numbers[later.replica_id]
    ]
    assert backwards == [], "none went from the new release back to the old one"


def test_every_answer_is_that_of_a_twin_which_nobody_moved(fleet: RollingFleet, tmp_path: Path) -> None:
    """Options that change no token: what a conversation is told is the same before, during and after."""
    with fleet.load(**LONG) as load:
        rollout = fleet.end_of(fleet.by_rest(PATIENT, max_num_seqs=16))
    assert_went_through(rollout)
    assert_conversations_were_moved_and_none_failed(load, rollout, fleet)
    models = {"demo-llama": fleet.run.var / "models" / "demo-llama"}
    assert otherwise_answered(load.answered, models, fleet.models_by_replica(), tmp_path) == []


def test_with_other_weights_every_answer_is_that_of_the_release_that_gave_it(
    fleet: RollingFleet, other_weights: Path, tmp_path: Path
) -> None:
    model = fleet.register("demo-other", other_weights)
    with fleet.load(**LONG) as load:
        rollout = fleet.end_of(fleet.by_page(PATIENT, model=model["id"]))
    assert_went_through(rollout)
    assert_conversations_were_moved_and_none_failed(load, rollout, fleet)
    models = {"demo-llama": fleet.run.var / "models" / "demo-llama", "demo-other": other_weights}
    by_replica = fleet.models_by_replica()
    assert {by_replica[one.replica_id] for one in load.answered} == set(models)
    assert otherwise_answered(load.answered, models, by_replica, tmp_path) == []
