"""The plan, in a simulated world with a virtual clock: safety apart from liveness."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.node import make_spec
from tests.fakes.planned_replica import STEP, PlannedReplica
from workers.agent.supervisor import (
    AttemptFacts,
    CheckModel,
    Close,
    Ending,
    Launch,
    ModelCheck,
    Policy,
    Probe,
    ReplicaFacts,
    merge_wish,
    plan,
)
from workers.protocol.observed import ObservedState
from workers.protocol.wish import ReplicaSpec, WantedState

POLICY = Policy(crash_limit=4, stop_grace_seconds=3.0, stable_seconds=20.0)
READY_AFTER_SECONDS = 2.0


@dataclass
class World(PlannedReplica):
    """A replica of one node, which opens its port some seconds after its launch."""

    policy: Policy = POLICY
    starts_up: bool = True

    def seen(self, attempt: AttemptFacts) -> dict[str, Any]:
        started = any(self.now - p.launched_at >= READY_AFTER_SECONDS for p in self.live)
        ready = started and self.starts_up
        since = attempt.ready_at_seconds
        return {
            "probe": Probe.READY if ready else Probe.CLOSED,
            "ready_at_seconds": self.now if ready and since is None else since,
        }

    def launch(self, action: Launch, spec: ReplicaSpec) -> ReplicaFacts:  # noqa: ARG002 - the base's signature
        same = self.facts.generation == spec.generation
        return replace(self.facts, crashes=self.facts.crashes if same else 0)


def running(**changes: object) -> World:
    """A world whose replica has become ready."""
    world = World(make_spec("r", **changes))
    assert world.run(5).state is ObservedState.READY
    return world


def test_wanted_replica_is_verified_then_launched_then_ready() -> None:
    world = World(make_spec("r"))
    assert [type(action) for action in world.tick().actions] == [CheckModel]
    assert [type(action) for action in world.tick().actions] == [Launch]
    assert world.run(3).state is ObservedState.READY


def test_bad_model_is_never_launched() -> None:
    world = World(make_spec("r"))
    world.facts = replace(world.facts, model=ModelCheck.BAD, model_reason="a.bin differs")
    decision = world.run(30)
    assert (decision.state, decision.reason) == (ObservedState.FAILED, "a.bin differs")
    assert world.launched_at == []


def test_crashes_are_forgotten_as_soon_as_an_attempt_has_proved_itself_not_at_its_end() -> None:
    world = running()
    world.crash()
    world.run(8)
    assert world.facts.crashes == 1
    world.run(POLICY.stable_seconds)
    assert world.facts.crashes == 0
    assert len(world.launched_at) == 2


def test_crash_after_a_stable_run_is_healed_with_the_shortest_pause() -> None:
    world = running()
    world.run(25)
    world.crash()
    crashed_at = world.now
    assert world.run(6).state is ObservedState.READY
    assert world.launched_at[-1] - crashed_at <= POLICY.backoff_base_seconds + 3 * STEP
    assert world.facts.crashes == 1


def test_crash_loop_ends_in_failed_until_a_new_generation() -> None:
    world = World(make_spec("r"))
    for _ in range(400):
        world.tick()
        world.crash()
    assert world.decision is not None
    assert world.decision.state is ObservedState.FAILED
    assert len(world.launched_at) == POLICY.crash_limit
    gaps = [after - before for before, after in zip(world.launched_at, world.launched_at[1:], strict=False)]
    assert gaps == sorted(gaps)
    world.spec = make_spec("r", generation=2)
    assert world.run(5).state is ObservedState.READY


@given(st.integers(0, 10_000))
def test_back_off_grows_to_its_cap_and_never_past_it(crashes: int) -> None:
    pause = POLICY.backoff_seconds(crashes)
    assert pause <= POLICY.backoff_seconds(crashes + 1) <= POLICY.backoff_cap_seconds


def test_lost_port_is_not_a_crash_but_not_forgiven_for_ever() -> None:
    world = World(make_spec("r"))
    for _ in range(POLICY.port_conflict_limit + 1):
        while world.facts.attempt is None:
            world.tick()
        world.crash()
        world.facts = replace(world.facts, attempt=replace(world.facts.attempt, port_taken=True, pids=()))
        world.tick()
    assert world.endings == [Ending.PORT_TAKEN] * POLICY.port_conflict_limit + [Ending.CRASHED]


def test_start_that_takes_too_long_counts_as_a_crash() -> None:
    world = World(make_spec("r", start_seconds=5.0), starts_up=False)
    world.run(9)
    assert world.endings == [Ending.CRASHED]
    assert world.facts.crashes == 1


def test_drain_waits_for_open_requests_then_stops() -> None:
    world = running(drain_seconds=60.0)
    world.idle = False
    world.spec = make_spec("r", generation=2, wanted=WantedState.DRAIN, drain_seconds=60.0)
    assert world.run(20).state is ObservedState.DRAINING
    assert world.live
    world.idle = True
    assert world.run(3).state is ObservedState.STOPPED
    assert world.endings == [Ending.STOPPED]


def test_drain_ends_at_its_deadline() -> None:
    world = running()
    world.idle = False
    world.spec = make_spec("r", generation=2, wanted=WantedState.DRAIN, drain_seconds=4.0)
    assert world.run(8).state is ObservedState.STOPPED


def test_engine_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    world = running()
    world.live[0].obeys_term = False
    world.spec = make_spec("r", generation=2, wanted=WantedState.STOP)
    assert world.run(POLICY.stop_grace_seconds - 1).state is ObservedState.STOPPING
    assert world.live
    assert world.run(2).state is ObservedState.STOPPED


def test_process_that_cannot_be_killed_is_stopping_for_as_long_as_it_lives() -> None:
    world = running()
    world.obeys_term = world.dies_by_kill = False
    world.live[0].obeys_term = False
    world.spec = None
    decision = world.run(120)
    assert decision.state is ObservedState.STOPPING
    assert "pid" in decision.reason
    assert len(world.launched_at) == 1


def test_nothing_is_stopped_for_its_absence_before_a_wish_is_known() -> None:
    world = running()
    world.spec, world.wish_known = None, False
    assert world.run(60).state is ObservedState.READY
    world.wish_known = True
    assert world.run(3).state is ObservedState.STOPPED


def test_changed_options_drain_then_relaunch() -> None:
    world = running()
    world.spec = make_spec("r", generation=2, engine_options={"chatty": 1})
    assert world.run(8).state is ObservedState.READY
    assert world.endings == [Ending.STOPPED]
    assert len(world.launched_at) == 2


def test_changed_patience_alone_does_not_relaunch() -> None:
    world = running()
    world.spec = make_spec("r", generation=2, drain_seconds=5.0)
    assert world.run(10).state is ObservedState.READY
    assert len(world.launched_at) == 1


def test_nothing_is_launched_beside_a_stray_of_the_same_replica() -> None:
    world = World(make_spec("r"))
    world.facts = replace(world.facts, stray_pids=(4711,))
    decision = world.run(20)
    assert decision.state is ObservedState.WAITING
    assert "4711" in decision.reason
    assert world.launched_at == []


def test_interrupted_launch_is_not_a_crash() -> None:
    facts = ReplicaFacts("r", make_spec("r"), generation=1, last_attempt=1)
    facts = replace(facts, attempt=AttemptFacts(1, "x", 1.0, (), started=False))
    (decision,) = plan([facts], wish_known=True, now=2.0, policy=POLICY)
    (close,) = decision.actions
    assert isinstance(close, Close)
    assert (close.ending, close.crashes) == (Ending.INTERRUPTED, 0)


def test_older_generation_never_replaces_a_newer_one() -> None:
    newer, older = make_spec("r", generation=7), make_spec("r", generation=6)
    assert merge_wish([newer], [older]) == (newer,)
    assert merge_wish([older], [newer]) == (newer,)


FAULTS = st.sampled_from(
    ["none", "none", "crash", "hang", "slow", "unkillable", "stop", "drain", "absent", "run", "change"]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(FAULTS, st.integers(1, 30)), max_size=25))
def test_any_history_is_safe_and_converges_once_faults_stop(history: list[tuple[str, int]]) -> None:
    world = World(make_spec("r"))
    generation = 1
    for fault, ticks in history:
        generation += 1
        world.obeys_term, world.dies_by_kill = fault != "hang", fault != "unkillable"
        world.starts_up, world.idle = fault != "slow", fault != "hang"
        if fault == "crash":
            world.crash()
        elif fault in ("stop", "drain"):
            world.spec = make_spec("r", generation=generation, wanted=WantedState(fault))
        elif fault == "absent":
            world.spec = None
        elif fault in ("run", "change"):
            options = {"chatty": generation} if fault == "change" else {}
            world.spec = make_spec("r", generation=generation, engine_options=options)
        for _ in range(ticks):
            world.tick()
    world.obeys_term = world.dies_by_kill = world.starts_up = world.idle = True
    world.spec = make_spec("r", generation=generation + 1)
    assert world.run(200).state is ObservedState.READY
    world.spec = make_spec("r", generation=generation + 2, wanted=WantedState.DRAIN)
    assert world.run(100).state is ObservedState.STOPPED
    assert not world.live


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), min_size=200, max_size=400))
def test_one_generation_never_crashes_more_often_than_its_limit(crashes: list[bool]) -> None:
    world = World(make_spec("r"), starts_up=False)
    for crash in crashes:
        world.tick()
        if crash:
            world.crash()
    assert world.endings.count(Ending.CRASHED) <= POLICY.crash_limit
