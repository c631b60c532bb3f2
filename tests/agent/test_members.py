"""Members of a replica over several nodes: the plan of each, in a simulated world with a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.node import make_spec
from tests.fakes.planned_replica import PlannedReplica
from workers.agent.facts import (
    AttemptFacts,
    BeginDrain,
    CheckModel,
    Close,
    Ending,
    Launch,
    ModelCheck,
    Policy,
    Probe,
    ReplicaFacts,
    Terminate,
)
from workers.agent.supervisor import launch_digest, merge_wish, plan
from workers.protocol.observed import ObservedState
from workers.protocol.wish import GangMember, ReplicaSpec, WantedState

POLICY = Policy(crash_limit=4, stop_grace_seconds=3.0, head_away_seconds=20.0)
HEAD = GangMember(number=0, count=2, epoch=1, hosts=("10.0.0.1", "10.0.0.2"))
FOLLOWER = GangMember(number=1, count=2, epoch=1, hosts=("10.0.0.1", "10.0.0.2"))


def told(epoch: int = 1) -> GangMember:
    """The follower, as soon as its head has said where it is."""
    return msgspec.structs.replace(
        FOLLOWER, epoch=epoch, head_address="10.0.0.1:41000", rendezvous="10.0.0.1:41001"
    )


@dataclass
class MemberWorld(PlannedReplica):
    """One member on its node, and its head or what answers HTTP, which is as `head` says."""

    policy: Policy = POLICY
    facts: ReplicaFacts = field(default_factory=lambda: ReplicaFacts("r", None, model=ModelCheck.GOOD))
    head: Probe = Probe.READY
    still_seconds: float = 0.0
    launched_epochs: list[int] = field(default_factory=list)

    def wish(self, member: GangMember, wanted: WantedState = WantedState.RUN, **changes: object) -> None:
        self.spec = make_spec("r", member=member, wanted=wanted, **changes)

    def seen(self, attempt: AttemptFacts) -> dict[str, Any]:
        ready = self.head is Probe.READY and bool(self.live)
        since = attempt.ready_at_seconds
        return {
            "probe": self.head,
            "probe_reason": "" if self.head is Probe.READY else "health: connection refused",
            "ready_at_seconds": self.now if ready and since is None else since,
            "still_seconds": self.still_seconds,
            "exit_text": "exit code 1 after 2.0 s",
        }

    def launch(self, action: Launch, spec: ReplicaSpec) -> ReplicaFacts:  # noqa: ARG002 - the base's signature
        assert spec.member is not None
        self.launched_epochs.append(spec.member.epoch)
        return replace(self.facts, epoch=spec.member.epoch)


def started(member: GangMember, **changes: object) -> MemberWorld:
    world = MemberWorld(make_spec("r", member=member, **changes))
    assert world.run(2).state is ObservedState.READY
    return world


@pytest.mark.parametrize("member", [HEAD, told()], ids=["head", "follower"])
def test_a_part_that_ended_is_not_launched_again_before_the_whole_is(member: GangMember) -> None:
    world = started(member)
    world.live.clear()
    decision = world.run(300)
    assert decision.state is ObservedState.FAILED
    assert decision.reason == (
        "its part of start 1 ended (exit code 1 after 2.0 s): waits until the whole is started again"
    )
    assert world.launched_epochs == [1]
    world.wish(msgspec.structs.replace(member, epoch=2))
    assert world.run(2).state is ObservedState.READY
    assert world.launched_epochs == [1, 2]


def test_what_a_start_did_does_not_delay_the_next_one() -> None:
    world = started(HEAD)
    for epoch in range(2, 12):
        world.live.clear()
        assert world.run(1).state is ObservedState.FAILED
        world.wish(msgspec.structs.replace(HEAD, epoch=epoch))
        assert world.run(1).state is ObservedState.READY


def test_a_follower_waits_until_it_is_told_where_its_head_is() -> None:
    world = MemberWorld(make_spec("r", member=FOLLOWER))
    world.facts = replace(world.facts, model=ModelCheck.UNKNOWN)
    world.tick()
    assert [type(action) for action in world.actions] == [CheckModel]  # meanwhile its model is made ready
    decision = world.run(60)
    assert (decision.state, decision.reason) == (ObservedState.WAITING, "waits for the head's address")
    world.wish(msgspec.structs.replace(told(), rendezvous=""))
    assert world.run(5).state is ObservedState.WAITING
    assert world.launched_epochs == []
    world.wish(told())
    assert world.run(2).state is ObservedState.READY


def test_a_follower_is_ready_once_its_head_is() -> None:
    world = MemberWorld(make_spec("r", member=told()), head=Probe.CLOSED)
    decision = world.run(5)
    assert (decision.state, decision.reason) == (
        ObservedState.LOADING,
        "waits for its head: health: connection refused",
    )
    world.head = Probe.LOADING
    assert world.run(1).state is ObservedState.LOADING
    world.head = Probe.READY
    assert world.run(1).state is ObservedState.READY


def test_a_follower_ends_when_its_head_is_not_ready_in_time() -> None:
    world = MemberWorld(make_spec("r", member=told(), start_seconds=10.0), head=Probe.LOADING)
    decision = world.run(30)
    assert decision.state is ObservedState.FAILED
    assert "the head was not ready within 10 s" in decision.reason
    assert world.endings == [Ending.CRASHED]


def test_a_follower_ends_when_its_head_is_gone_or_silent_for_too_long_and_not_before() -> None:
    world = started(told())
    world.head = Probe.DEAD
    assert "the head is gone (health: connection refused)" in world.run(2).reason
    assert world.endings == [Ending.CRASHED]
    world = started(told())
    world.still_seconds = POLICY.head_away_seconds - 1
    assert world.run(5).state is ObservedState.READY
    world.still_seconds = POLICY.head_away_seconds + 1
    assert "the head did not answer for 21 s" in world.run(2).reason


@pytest.mark.parametrize("member", [HEAD, told()], ids=["head", "follower"])
def test_an_earlier_start_makes_way_at_once_and_whole_before_the_next_begins(member: GangMember) -> None:
    world = started(member)
    world.obeys_term = False
    world.wish(msgspec.structs.replace(member, epoch=2))
    world.actions.clear()
    world.tick()
    assert [type(action) for action in world.actions] == [Terminate]  # no drain
    world.run(POLICY.stop_grace_seconds - 1.5)
    assert world.launched_epochs == [1]
    assert [process.number for process in world.live] == [1]
    assert world.run(3).state is ObservedState.READY
    assert world.launched_epochs == [1, 2]
    assert world.endings == [Ending.STOPPED]


def test_a_process_that_cannot_be_killed_keeps_the_next_start_out() -> None:
    world = started(told())
    world.obeys_term = world.dies_by_kill = False
    world.wish(told(2))
    decision = world.run(60)
    assert decision.state is ObservedState.STOPPING
    assert decision.held_by_pids == (1,)
    assert world.launched_epochs == [1]


def test_only_the_head_is_drained_and_the_others_run_until_they_are_stopped() -> None:
    follower = started(told())
    follower.wish(told(), WantedState.DRAIN, generation=2)
    decision = follower.run(120)
    assert (decision.state, decision.reason) == (
        ObservedState.DRAINING,
        "runs until its head has drained",
    )
    follower.wish(told(), WantedState.STOP, generation=3)
    assert follower.run(2).state is ObservedState.STOPPED
    head = started(HEAD)
    head.wish(HEAD, WantedState.DRAIN, generation=2)
    assert head.run(5).state is ObservedState.STOPPED
    assert [type(a) for a in head.actions if not isinstance(a, Launch)] == [BeginDrain, Terminate, Close]


def test_a_follower_whose_head_went_while_it_drained_has_not_failed() -> None:
    world = started(told())
    world.wish(told(), WantedState.DRAIN, generation=2)
    world.tick()
    world.head = Probe.DEAD
    assert world.run(3).state is ObservedState.STOPPED
    assert world.endings == [Ending.STOPPED]


def test_other_options_end_the_head_gently_and_wait_for_the_next_start() -> None:
    world = started(HEAD)
    world.wish(HEAD, generation=2, engine_options={"chatty": 1})
    assert world.run(10).state is ObservedState.FAILED
    assert world.launched_epochs == [1]
    world = started(told())
    world.wish(told(), generation=2, engine_options={"chatty": 1})
    assert world.run(10).state is ObservedState.READY  # until its head has drained and is gone


def test_an_older_start_never_replaces_a_newer_one() -> None:
    newer, older = make_spec("r", member=told(3)), make_spec("r", member=told(2))
    assert merge_wish([newer], [older]) == (newer,)
    assert merge_wish([older], [newer]) == (newer,)
    stopped = make_spec("r", member=told(2), generation=2, wanted=WantedState.STOP)
    assert merge_wish([newer], [stopped]) == (stopped,)


def test_followers_wait_for_no_turn_since_each_might_wait_for_anothers() -> None:
    def starting(replica_id: str) -> ReplicaFacts:
        spec = make_spec(replica_id)
        attempt = AttemptFacts(1, launch_digest(spec), 99.0, (7,))
        return ReplicaFacts(replica_id, spec, generation=1, last_attempt=1, attempt=attempt)

    waiting = {
        name: ReplicaFacts(name, make_spec(name, member=member), model=ModelCheck.GOOD)
        for name, member in (("head", HEAD), ("follower", told()))
    }
    decisions = plan(
        [starting("s1"), starting("s2"), *waiting.values()],
        wish_known=True,
        now=100.0,
        policy=Policy(starts_at_once=2),
    )
    states = {decision.replica_id: decision.state for decision in decisions}
    assert states["follower"] is ObservedState.STARTING
    assert states["head"] is ObservedState.WAITING


EVENTS = st.sampled_from(
    [
        "crash",
        "hang",
        "unkillable",
        "head dead",
        "head slow",
        "silent",
        "drain",
        "stop",
        "again",
        "stale",
        "none",
    ]
)


@settings(max_examples=150, deadline=None)
@given(
    number=st.integers(0, 1),
    history=st.lists(st.tuples(EVENTS, st.integers(1, 30)), max_size=25),
)
def test_no_history_launches_a_start_twice_or_two_at_once_and_it_ends_ready(
    number: int, history: list[tuple[str, int]]
) -> None:
    base = told() if number else HEAD
    world = MemberWorld(make_spec("r", member=base))
    epoch, generation = 1, 1
    for event, ticks in history:
        world.obeys_term, world.dies_by_kill = event != "hang", event != "unkillable"
        world.head = {"head dead": Probe.DEAD, "head slow": Probe.LOADING}.get(event, Probe.READY)
        world.still_seconds = 60.0 if event == "silent" else 0.0
        wanted, wish_epoch = WantedState.RUN, epoch
        if event == "crash":
            world.live.clear()
        elif event in ("drain", "stop"):
            generation += 1
            wanted = WantedState(event)
        elif event == "again":
            epoch = wish_epoch = epoch + 1
        elif event == "stale":
            wish_epoch = max(1, epoch - 1)
        world.wish(msgspec.structs.replace(base, epoch=wish_epoch), wanted, generation=generation)
        for _ in range(ticks):
            world.tick()
    world.obeys_term = world.dies_by_kill = True
    world.head, world.still_seconds = Probe.READY, 0.0
    world.wish(msgspec.structs.replace(base, epoch=epoch + 1), generation=generation)
    assert world.run(30).state is ObservedState.READY
    assert world.launched_epochs == sorted(set(world.launched_epochs))
