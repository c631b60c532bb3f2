"""Plans carried out in a simulated world lead to what is wanted, and rest there."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.lifecycle import REPLICA
from exaserve_ops.serving.domain.placement import AcceleratorRoom, NodeRoom, PlacementRequest
from exaserve_ops.serving.domain.reconcile import (
    Create,
    DeploymentSnapshot,
    FinishDeletion,
    Hold,
    LetGo,
    Place,
    Replace,
    ReplicaFacts,
    Step,
    Wait,
    plan_deployment,
)

START = datetime(2026, 1, 1, tzinfo=UTC)
SIGHTINGS = ("seen_starting", "seen_loading", "seen_ready", "seen_backing_off", "seen_failed", "node_lost")
WANTED_AFTER = {"drain": "drain", "stop": "stop", "cancel": "stop"}


@dataclass
class World:
    """One deployment on a few nodes with room for `slots` replicas each; agents do as they are told."""

    wanted: int
    nodes: int = 3
    slots: int = 4
    deleting: bool = False
    made: int = 0
    replicas: dict[str, ReplicaFacts] = field(default_factory=dict)
    node_of: dict[str, str] = field(default_factory=dict)

    def snapshot(self) -> DeploymentSnapshot:
        holding = [r for r in self.replicas.values() if r.id in self.node_of and r.status != states.STOPPED]
        rooms, accepts = [], True
        for index in range(self.nodes):
            here = [r for r in holding if self.node_of[r.id] == f"id-{index}"]
            same = sum(r.wanted == "run" for r in here)
            device = AcceleratorRoom(f"a{index}", "cuda", self.slots, len(here))
            rooms.append(
                NodeRoom(
                    f"id-{index}",
                    f"n{index}",
                    accepts,
                    "",
                    frozenset({"torch"}),
                    "",
                    (device,),
                    same,
                    len(here),
                )
            )
        live = tuple(r for r in self.replicas.values() if r.status != states.STOPPED)
        request = PlacementRequest("torch", 1)
        return DeploymentSnapshot("d", "d", self.deleting, self.wanted, request, live, tuple(rooms))

    def reconcile(self) -> tuple[Step, ...]:
        steps = plan_deployment(self.snapshot(), now=START)
        for step in steps:
            self._take(step)
        return steps

    def see(self, replica_id: str, event: str) -> None:
        facts = self.replicas[replica_id]
        if REPLICA.allows(facts.status, event):
            self._put(facts, status=REPLICA.next(facts.status, event))

    def obey(self) -> None:
        """Agents launch what is placed and end what was let go."""
        for replica in list(self.replicas.values()):
            self.see(replica.id, "seen_ready" if replica.wanted == "run" else "seen_stopped")

    def kept(self) -> list[ReplicaFacts]:
        return [r for r in self.replicas.values() if r.wanted == "run" and r.status != states.STOPPED]

    def settle(self) -> int:
        """Reconcile and obey until nothing is left to do; returns the number of rounds."""
        for rounds in range(1, 20):
            steps, before = self.reconcile(), dict(self.replicas)
            self.obey()
            if not steps and self.replicas == before:
                return rounds
        raise AssertionError(f"no rest after 19 rounds: {plan_deployment(self.snapshot(), now=START)}")

    def _take(self, step: Step) -> None:  # noqa: C901 - one case a step
        match step:
            case Create(count=count):
                for _ in range(count):
                    self._make()
            case Place(replica_id=replica_id, placement=to):
                self.node_of[replica_id] = to.node_id
                self.see(replica_id, "place")
            case Replace(replica_id=replica_id, placement=to):
                self._make(replaces=replica_id)
                self.node_of[self._newest()] = to.node_id
                self.see(self._newest(), "place")
            case Hold(replica_id=replica_id, why=why):
                self._put(self.replicas[replica_id], healing_note=why)
            case Wait(replica_id=replica_id, why=why):
                self._put(self.replicas[replica_id], reason=why)
            case LetGo(replica_id=replica_id, event=event):
                facts = self.replicas[replica_id]
                self._put(facts, wanted=WANTED_AFTER[event], status=REPLICA.next(facts.status, event))
            case FinishDeletion():
                assert all(r.status == states.STOPPED for r in self.replicas.values())

    def _newest(self) -> str:
        return max(self.replicas)

    def _make(self, **changes: str) -> None:
        self.made += 1
        born = START + timedelta(seconds=self.made)
        facts = ReplicaFacts(
            f"r{self.made:03}", f"d-{self.made}", states.PENDING, "run", "", 0, born, **changes
        )  # type: ignore[arg-type]  # text fields only
        self.replicas[facts.id] = facts

    def _put(self, facts: ReplicaFacts, **changes: str) -> None:
        self.replicas[facts.id] = replace(facts, **changes)  # type: ignore[arg-type]  # text fields only


wishes = st.lists(st.integers(0, 10), min_size=1, max_size=6)


@given(wishes)
def test_any_course_of_wishes_ends_at_the_last_one(course: list[int]) -> None:
    world = World(wanted=0)
    for wanted in course:
        world.wanted = wanted
        world.reconcile()
    world.settle()
    assert len(world.kept()) == course[-1]
    assert {r.status for r in world.kept()} <= {states.READY}
    assert all(r.status == states.STOPPED for r in world.replicas.values() if r.wanted != "run")


@given(wishes, st.data())
def test_whatever_agents_report_meanwhile_the_count_comes_right(
    course: list[int], data: st.DataObject
) -> None:
    world = World(wanted=0)
    for wanted in course:
        world.wanted = wanted
        world.reconcile()
        for replica_id in list(world.replicas):
            world.see(replica_id, data.draw(st.sampled_from(SIGHTINGS)))
    world.settle()
    assert len(world.kept()) == course[-1]


@given(wishes)
def test_a_plan_never_makes_and_lets_go_at_once_and_never_twice(course: list[int]) -> None:
    world = World(wanted=0)
    for wanted in course:
        world.wanted = wanted
        steps = world.reconcile()
        kinds = {type(step) for step in steps}
        assert not {Create, LetGo} <= kinds
        again = plan_deployment(world.snapshot(), now=START)
        assert not any(isinstance(step, Create | LetGo) for step in again), "the same wish was acted on twice"


@given(st.integers(0, 10))
def test_rest_is_rest(wanted: int) -> None:
    world = World(wanted=wanted)
    world.settle()
    before = dict(world.replicas)
    for _ in range(3):
        assert world.reconcile() == ()
        world.obey()
    assert world.replicas == before


@given(st.integers(13, 40))
def test_more_than_fits_waits_with_a_reason_and_is_not_made_again(wanted: int) -> None:
    world = World(wanted=wanted)
    world.settle()
    waiting = [r for r in world.kept() if r.status == states.PENDING]
    assert len(waiting) == wanted - world.nodes * world.slots
    assert all("is free" in r.reason for r in waiting)
    assert world.made == wanted


def test_three_to_one_keeps_the_healthy_one() -> None:
    for healthy in ("r001", "r002", "r003"):
        world = World(wanted=3)
        world.settle()
        for replica_id in set(world.replicas) - {healthy}:
            world.see(replica_id, "seen_backing_off")
        world.wanted = 1
        world.settle()
        assert [r.id for r in world.kept()] == [healthy]


def test_among_ready_ones_the_idlest_goes_then_the_newest() -> None:
    world = World(wanted=3)
    world.settle()
    busy = {"r001": 0, "r002": 5, "r003": 0}
    for replica_id, sessions in busy.items():
        world.replicas[replica_id] = replace(world.replicas[replica_id], active_sessions=sessions)
    world.wanted = 2
    [step] = world.reconcile()
    assert (step.replica_id, step.event) == ("r003", "drain")  # type: ignore[union-attr]  # a LetGo
    assert "fewest active sessions (0)" in step.why


def test_one_to_none_to_two_in_quick_succession_ends_with_exactly_two_new() -> None:
    world = World(wanted=1)
    world.settle()
    world.wanted = 0
    world.reconcile()
    world.wanted = 2
    world.reconcile()
    world.settle()
    assert [r.id for r in world.kept()] == ["r002", "r003"]
    assert world.replicas["r001"].status == states.STOPPED
    assert world.made == 3


def finishes(steps: tuple[Step, ...]) -> int:
    return sum(isinstance(step, FinishDeletion) for step in steps)


@pytest.mark.parametrize("status", ["pending", "placed", "loading", "ready", "failed", "unreachable"])
def test_deleted_deployment_is_finished_only_when_every_replica_is_gone(status: str) -> None:
    world = World(wanted=2)
    world.reconcile()
    for replica_id in list(world.replicas):
        world.replicas[replica_id] = replace(world.replicas[replica_id], status=status)
    world.deleting = True
    steps = world.reconcile()
    assert all(isinstance(step, LetGo) for step in steps)
    assert finishes(steps) == 0
    for _ in range(2):
        world.obey()  # draining ends, then stopping
    assert finishes(world.reconcile()) == 1
    assert {r.status for r in world.replicas.values()} == {states.STOPPED}


@given(wishes)
def test_every_step_says_why(course: list[int]) -> None:
    world = World(wanted=0)
    for wanted in course:
        world.wanted = wanted
        assert all(step.why for step in world.reconcile())
