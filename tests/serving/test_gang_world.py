"""Whatever is lost, late or killed: no two starts of one replica meet, and it ends whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.gang_rules import GangPolicy
from tests.fakes.gang_world import COUNT, START_SECONDS, GangWorld

_numbers = st.integers(0, COUNT - 1)
_actions = st.one_of(
    st.tuples(st.sampled_from(("told", "act", "hear", "die", "exchange")), _numbers),
    st.tuples(st.sampled_from(("tell", "crash_node", "cut_off", "bring_back", "exchange", "lead")), _numbers),
    st.tuples(st.just("arrive"), st.integers(0, 9)),
    st.tuples(st.just("lead_later"), st.sampled_from((2, 2, 40, 100))),
    st.tuples(st.just("calm"), st.integers(1, 6)),
)


def exchange(world: GangWorld, number: int) -> None:
    """A node hears its newest wish, does its part, and is heard."""
    told(world, number)
    world.act(number)
    world.hear(number)


def told(world: GangWorld, number: int) -> None:
    world.tell(number)
    world.arrive(-1)


def lead_later(world: GangWorld, seconds: int) -> None:
    world.now += timedelta(seconds=seconds)
    world.lead()


def calm(world: GangWorld, rounds: int) -> None:
    for _ in range(rounds):
        world.calm_round()
        assert len(world.running_epochs) <= 1


HAPPENS: dict[str, Callable[[GangWorld, int], object]] = {
    "told": told,
    "tell": GangWorld.tell,
    "act": GangWorld.act,
    "hear": GangWorld.hear,
    "exchange": exchange,
    "arrive": GangWorld.arrive,
    "die": lambda world, number: world.agents[number].die(),
    "crash_node": lambda world, number: world.lose(number, with_processes=True),
    "cut_off": lambda world, number: world.lose(number, with_processes=False),
    "bring_back": GangWorld.bring_back,
    "lead": lambda world, _: world.lead(),
    "lead_later": lead_later,
    "calm": calm,
}


@settings(max_examples=200)
@given(st.integers(0, 8), st.lists(_actions, min_size=30, max_size=80))
def test_no_two_starts_ever_meet_and_calm_makes_it_whole(rounds: int, course: list[tuple[str, int]]) -> None:
    world = GangWorld()
    for _ in range(rounds):
        world.calm_round()
    for what, value in course:
        HAPPENS[what](world, value)
        assert len(world.running_epochs) <= 1, f"ranks of two starts after {what} {value}"
    for number in range(COUNT):
        world.bring_back(number)
    world.settle()
    assert [agent.state for agent in world.agents] == [states.READY] * COUNT
    assert world.running_epochs == {world.replica.gang_epoch}
    assert all(len(agent.launched) == agent.attempt for agent in world.agents), "one launch for each start"


@settings(max_examples=60)
@given(st.lists(_actions, min_size=10, max_size=40), st.sampled_from(("stop", "drain")))
def test_what_is_let_go_ends_whole_and_stays_ended(course: list[tuple[str, int]], wanted: str) -> None:
    world = GangWorld()
    world.settle()
    for what, value in course:
        HAPPENS[what](world, value)
    for number in range(COUNT):
        world.bring_back(number)
    if wanted == "drain" and world.replica.status != states.READY:
        wanted = "stop"
    world.replica.wanted = wanted
    world.replica.generation += 1
    world.replica.status = states.DRAINING if wanted == "drain" else states.STOPPING
    for _ in range(40):
        world.calm_round()
    assert world.replica.status == states.STOPPED
    assert not world.running_epochs


def test_next_start_waits_for_a_node_that_has_not_said_that_the_last_one_is_gone() -> None:
    world = GangWorld()
    world.settle()
    world.agents[0].die()
    world.hear(0)
    world.lead()
    for _ in range(5):  # all but the last node get through
        world.now += timedelta(seconds=60)
        for number in range(COUNT - 1):
            told(world, number)
            world.act(number)
            world.hear(number)
        world.lead()
    assert world.replica.gang_epoch == 1
    assert world.replica.reason == "start 1 must be gone first: node n2, member 2 of 3: ready"
    assert world.running_epochs == {1}
    world.settle()
    assert world.replica.gang_epoch == 2


def test_half_a_start_is_gone_once_its_time_is_up() -> None:
    world = GangWorld()
    world.agents[2].is_stuck = True
    limit = START_SECONDS + int(GangPolicy().grace_seconds)
    epochs = set()
    for _ in range(3 * limit):
        world.calm_round()
        epochs.add(world.replica.gang_epoch)
        began = world.replica.gang_began_at
        assert began is None or world.now - began <= timedelta(seconds=limit + 1)
        assert world.replica.status != states.READY
    assert len(epochs) >= 3, "each start was ended at its time, and another one followed"
    assert "node n2, member 2 of 3" in world.replica.reason
    world.agents[2].is_stuck = False
    world.settle()


def test_it_is_given_up_after_as_many_crashes_as_a_single_one_and_nothing_is_left_of_it() -> None:
    world = GangWorld()
    for _ in range(600):
        world.calm_round()
        world.agents[1].die()
        if world.replica.status == states.FAILED:
            break
    assert world.replica.gang_epoch == GangPolicy().crash_limit
    assert "node n1, member 1 of 3: killed by signal 9 after 5.0 s" in world.replica.reason
    assert world.replica.reason.startswith("ended 6 times in a row, given up: start 6: ")
    for _ in range(5):
        world.calm_round()
    assert not world.running_epochs
    assert world.replica.status == states.FAILED, "it is left to healing, or to a person"


def test_crashes_far_apart_are_never_given_up() -> None:
    world = GangWorld()
    for _ in range(2 * GangPolicy().crash_limit):
        world.settle()
        world.now += timedelta(seconds=GangPolicy().stable_seconds)
        world.agents[0].die()
        world.calm_round()
        assert world.replica.status == states.BACKING_OFF
        assert world.replica.gang_crashes == 1


def test_while_the_head_ends_its_requests_the_others_run_and_then_they_stop() -> None:
    world = GangWorld()
    world.settle()
    world.replica.wanted, world.replica.status = "drain", states.DRAINING
    world.replica.generation += 1
    world.calm_round()
    assert world.agents[0].state == states.STOPPING
    assert [agent.state for agent in world.agents[1:]] == [states.READY] * (COUNT - 1)
    for _ in range(6):
        world.calm_round()
    assert world.replica.status == states.STOPPED


def test_a_member_that_dies_while_it_drains_stops_the_rest() -> None:
    world = GangWorld()
    world.settle()
    world.replica.wanted, world.replica.status = "drain", states.DRAINING
    world.replica.generation += 1
    for number in range(COUNT):
        world.tell(number)
        world.arrive(0)
    world.agents[1].die()
    world.hear(1)
    world.lead()
    assert (world.replica.wanted, world.replica.status) == ("stop", states.STOPPING)
    assert "node n1, member 1 of 3" in world.replica.reason
