"""A node starts few engines at a time, whoever else is there; none waits for ever, none is blamed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.local_node import LocalNode
from tests.fakes.node import make_spec
from workers.agent.config import AgentConfig, ConfigError, load_config
from workers.agent.supervisor import (
    AttemptFacts,
    Close,
    Launch,
    ModelCheck,
    Policy,
    Probe,
    ReplicaFacts,
    Terminate,
    launch_digest,
    plan,
)
from workers.protocol.observed import ObservedState

STEP = 1.0
START_SECONDS = 60.0
NEVER = 1e9


@dataclass
class World:
    """A dozen replicas on a node after a power cut; each takes its own time, and some never get ready."""

    takes: dict[str, float]
    policy: Policy
    now: float = 100.0
    facts: dict[str, ReplicaFacts] = field(default_factory=dict)
    most: int = 0
    reasons: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for key in self.takes:
            spec = make_spec(key, start_seconds=START_SECONDS)
            self.facts[key] = ReplicaFacts(key, spec, generation=1, model=ModelCheck.GOOD)

    def tick(self) -> None:
        self.now += STEP
        for key, facts in self.facts.items():
            self.facts[key] = self._grown(facts)
        decisions = plan(self.facts.values(), wish_known=True, now=self.now, policy=self.policy)
        for decision in decisions:
            if decision.state is ObservedState.WAITING:
                self.reasons.add(decision.reason)
            for action in decision.actions:
                self._carry_out(action)
        self.most = max(self.most, len(self.starting()))

    def starting(self) -> list[str]:
        return [k for k, f in self.facts.items() if f.attempt and f.attempt.ready_at_seconds is None]

    def ready(self) -> set[str]:
        return {k for k, f in self.facts.items() if f.attempt and f.attempt.ready_at_seconds is not None}

    def _grown(self, facts: ReplicaFacts) -> ReplicaFacts:
        attempt = facts.attempt
        if attempt is None or attempt.ready_at_seconds is not None:
            return facts
        if attempt.term_sent_at_seconds is not None:
            return replace(facts, attempt=replace(attempt, pids=()))
        if self.now - attempt.launched_at_seconds < self.takes[facts.replica_id]:
            return facts
        return replace(facts, attempt=replace(attempt, probe=Probe.READY, ready_at_seconds=self.now))

    def _carry_out(self, action: object) -> None:
        match action:
            case Launch():
                facts = self.facts[action.replica_id]
                assert facts.spec is not None
                attempt = AttemptFacts(action.attempt, launch_digest(facts.spec), self.now, pids=(1,))
                self.facts[action.replica_id] = replace(facts, attempt=attempt, last_attempt=action.attempt)
            case Terminate():
                facts = self.facts[action.replica_id]
                assert facts.attempt is not None
                ended = replace(
                    facts.attempt, term_sent_at_seconds=self.now, stop_blames_engine=action.blames_engine
                )
                self.facts[action.replica_id] = replace(facts, attempt=ended)
            case Close():
                facts = self.facts[action.replica_id]
                self.facts[action.replica_id] = replace(
                    facts, attempt=None, crashes=action.crashes, last_ended_at_seconds=self.now
                )


@given(
    takes=st.lists(st.floats(1, 50) | st.just(NEVER), min_size=1, max_size=14),
    at_once=st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_limit_holds_and_all_that_can_get_ready_do_beside_those_that_never_do(
    takes: list[float], at_once: int
) -> None:
    world = World({f"r{i:02}": t for i, t in enumerate(takes)}, Policy(starts_at_once=at_once))
    able = {key for key, seconds in world.takes.items() if seconds != NEVER}
    crashes = sum(t == NEVER for t in takes) * world.policy.crash_limit
    for _ in range(int((len(takes) + crashes) * (START_SECONDS + 65) / STEP)):
        world.tick()
        if world.ready() == able:
            break
    assert world.ready() == able
    assert world.most <= at_once
    assert world.most == min(at_once, len(takes)), "no place is left empty while somebody waits"
    assert all(world.facts[key].crashes == 0 for key in able), "waiting is no failed attempt"


def test_first_ones_start_at_once_and_the_others_say_whom_they_wait_for() -> None:
    world = World({f"r{i:02}": 10.0 for i in range(12)}, Policy(starts_at_once=4))
    world.tick()
    assert world.starting() == ["r00", "r01", "r02", "r03"]
    assert world.reasons == {"waits its turn: 4 of 4 start on this node"}


def test_replica_that_never_gets_ready_comes_after_those_that_have_not_tried() -> None:
    world = World({"a": NEVER, "b": 30.0, "c": 5.0}, Policy(starts_at_once=1))
    order: list[str] = []
    for _ in range(400):
        world.tick()
        order += [key for key in world.starting() if not order or order[-1] != key]
    assert order[:3] == ["a", "b", "c"]


def test_crash_on_a_quiet_node_is_healed_without_waiting_for_anybody() -> None:
    world = World({f"r{i:02}": 5.0 for i in range(12)}, Policy(starts_at_once=1))
    for _ in range(80):
        world.tick()
    assert len(world.ready()) == 12
    fallen = world.facts["r03"]
    world.facts["r03"] = replace(fallen, attempt=None, crashes=1, last_ended_at_seconds=world.now - 10)
    world.tick()
    assert world.starting() == ["r03"]


def test_no_limit_means_none() -> None:
    world = World({f"r{i:02}": 10.0 for i in range(12)}, Policy(starts_at_once=0))
    world.tick()
    assert len(world.starting()) == 12


def test_setting_is_read_and_a_negative_one_refused() -> None:
    assert load_config(None, {"EXAOPS_AGENT_STARTS_AT_ONCE": "2"}).starts_at_once == 2
    with pytest.raises(ConfigError, match="give 0 for any number"):
        AgentConfig(starts_at_once=-1).checked()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LocalNode]:
    node = LocalNode(tmp_path / "home", policy=Policy(starts_at_once=2))
    yield node
    node.close()


def test_engines_of_a_node_start_two_at_a_time_and_all_get_ready_at_their_first_attempt(
    node: LocalNode,
) -> None:
    keys = [f"r{i}" for i in range(5)]
    node.wish(*(make_spec(key, engine_options={"load_seconds": "0.3"}) for key in keys))
    most, waited = 0, set()

    def all_ready() -> bool:
        nonlocal most
        seen = {replica.replica_id: replica for replica in node.reconciler.replicas}
        on_their_way = (ObservedState.STARTING, ObservedState.LOADING)
        most = max(most, sum(one.state in on_their_way for one in seen.values()))
        waited.update(k for k, one in seen.items() if one.reason.startswith("waits its turn: 2 of 2 start"))
        return len(seen) == 5 and all(one.state is ObservedState.READY for one in seen.values())

    node.wait(all_ready, "five engines are ready", seconds=60)
    assert most <= 2
    assert waited
    assert all(one.attempt == 1 and one.restarts == 0 for one in node.reconciler.replicas)
