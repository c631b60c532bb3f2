"""What dies in the middle of a wave changes nothing of how it ends: leader, agent, Valkey."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from tests.rollouts.rolling_fleet import DOES_NOT_START, PATIENT, QUICK, Json, RollingFleet, told

pytestmark = [pytest.mark.rollouts, pytest.mark.timeout(900)]

_BAD_NEWS = ("failed", "gave_up", "lost", "wave_fail", "halt", "roll_back")
"""Events that must not be told of a rollout that goes through."""


@dataclass
class Watch:
    """What is remembered of a fleet from before something dies."""

    fleet: RollingFleet
    last_event: int
    finished: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    """Attempt and pid of replicas whose wave had passed by then."""

    def note_finished(self, rollout: Json) -> None:
        """Remember who runs the new release when its wave has passed."""
        for row in self.fleet.replicas():
            if row["release_number"] == rollout["to_number"] and row["status"] == "ready":
                self.finished[row["id"]] = (row["attempt"], row["pid"])

    def assert_finished_are_untouched(self) -> None:
        """They run on as they did: nothing was done twice."""
        now = {row["id"]: (row["attempt"], row["pid"]) for row in self.fleet.replicas()}
        assert self.finished
        assert {key: now.get(key) for key in self.finished} == self.finished

    def assert_no_bad_news(self) -> None:
        """Nobody was told of a failure that was none."""
        told_of = [
            f"{event['event']} {event['subject_name']}: {event['reason']}"
            for name in _BAD_NEWS
            for event in self.fleet.events(event=name)
            if event["id"] > self.last_event
        ]
        assert told_of == []


def watch(fleet: RollingFleet) -> Watch:
    return Watch(fleet, max(event["id"] for event in fleet.events()))


def in_wave(number: int, status: str) -> Callable[[Json], bool]:
    return lambda rollout: any(
        (wave["number"], wave["status"]) == (number, status) for wave in rollout["waves"]
    )


def assert_went_through(fleet: RollingFleet, rollout: Json) -> None:
    assert rollout["status"] == "done", told(rollout)
    assert {wave["status"] for wave in rollout["waves"]} == {"passed"}
    fleet.until_whole()
    assert {row["release_number"] for row in fleet.replicas()} == {rollout["to_number"]}
    assert fleet.deployment()["release_number"] == rollout["to_number"]


@contextmanager
def spared(fleet: RollingFleet) -> Iterator[None]:
    """With controllers that take over beside the fleet's own."""
    with fleet.spare_controllers() as spare:
        yield
        assert spare.poll() is None, "the spare lives on"


def test_leader_that_is_killed_in_the_middle_of_a_wave(fleet: RollingFleet) -> None:
    before = watch(fleet)
    with spared(fleet), fleet.load() as load:
        key = fleet.by_rest(PATIENT, max_num_seqs=17)
        before.note_finished(fleet.wait_for(key, in_wave(2, "moving"), "wave 2 moves"))
        fleet.kill("controllers")
        rollout = fleet.end_of(key)
        before.assert_finished_are_untouched()
    assert_went_through(fleet, rollout)
    before.assert_no_bad_news()
    assert load.failed == []


def test_agent_that_is_killed_in_the_middle_of_its_wave(fleet: RollingFleet) -> None:
    before = watch(fleet)
    with fleet.load() as load:
        key = fleet.by_rest(PATIENT, max_num_seqs=18)
        moving = fleet.wait_for(key, in_wave(2, "moving"), "wave 2 moves")
        before.note_finished(moving)
        node = moving["waves"][1]["domain"].removeprefix("node ")
        fleet.kill(node.replace("node-", "agent-"))
        rollout = fleet.end_of(key)
        before.assert_finished_are_untouched()
    assert_went_through(fleet, rollout)
    before.assert_no_bad_news()
    assert load.failed == []


def test_valkey_that_is_killed_in_the_middle_of_a_wave(fleet: RollingFleet) -> None:
    before = watch(fleet)
    with fleet.load() as load:
        key = fleet.by_rest(PATIENT, max_num_seqs=19)
        before.note_finished(fleet.wait_for(key, in_wave(2, "moving"), "wave 2 moves"))
        fleet.kill("valkey")
        rollout = fleet.end_of(key)
        before.assert_finished_are_untouched()
    assert_went_through(fleet, rollout)
    before.assert_no_bad_news()
    assert load.failed == []


def test_leader_that_is_killed_while_a_bad_release_goes_back(fleet: RollingFleet) -> None:
    before = {row["release_number"] for row in fleet.replicas()}
    with spared(fleet), fleet.load() as load:
        key = fleet.by_rest(QUICK, **DOES_NOT_START)
        fleet.wait_for(key, lambda one: one["status"] == "rolling_back", "it goes back")
        fleet.kill("controllers")
        rollout = fleet.end_of(key)
    assert rollout["status"] == "rolled_back", told(rollout)
    assert any(reason in rollout["why"] for reason in ("given up", "was restarted")), told(rollout)
    fleet.until_whole()
    assert {row["release_number"] for row in fleet.replicas()} == before
    assert load.failed == []
