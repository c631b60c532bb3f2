"""A simulated node obeys the protocol's rules as a real agent does."""

from __future__ import annotations

import pytest

from tests.fakes.simulation import WALL_OFFSET, Conversation, gaps, spec
from workers.protocol import v1
from workers.protocol.observed import ObservedState
from workers.protocol.wish import WantedState
from workers.simulation import faults

S = ObservedState


@pytest.fixture
def talk() -> Conversation:
    conversation = Conversation()
    conversation.pass_time(2)
    return conversation


def ready(talk: Conversation, *replica_ids: str) -> Conversation:
    """Have replicas run and be seen ready."""
    talk.wish(*(spec(replica_id) for replica_id in replica_ids))
    talk.pass_time(6)
    assert all(talk.replica(key).state is S.READY for key in replica_ids)
    return talk


def test_node_introduces_itself_as_simulated_before_its_first_heartbeat(talk: Conversation) -> None:
    _, first = talk.heard[0]
    assert isinstance(first, v1.Hello)
    assert first.simulated
    assert not first.reconnect
    assert first.labels == {"rack": "rack-1", "supernode": "supernode-1", "simulated": "true"}
    assert first.engines == ("simulated-node",)
    assert len(first.accelerators) == 12
    assert talk.beats()[0][1].boot_id == first.boot_id


def test_heartbeat_leaves_each_second_and_counts_up(talk: Conversation) -> None:
    talk.pass_time(600)
    beats = talk.beats()
    assert len(beats) == pytest.approx(602, abs=2)
    assert max(gaps(beats)) < 1.5
    numbers = [beat.sequence for _, beat in beats]
    assert numbers == list(range(1, len(numbers) + 1))
    at, last = beats[-1]
    assert last.sent_at_seconds == pytest.approx(at + WALL_OFFSET, abs=0.3)


def test_node_without_a_lease_introduces_itself_again_and_again() -> None:
    talk = Conversation()
    talk.pass_time(30)
    assert 8 <= len(talk.hellos()) <= 11
    talk.wish(epoch=1)
    before = len(talk.hellos())
    talk.pass_time(30)
    assert len(talk.hellos()) == before


def test_wanted_replica_goes_through_starting_and_loading_to_ready(talk: Conversation) -> None:
    talk.wish(spec("a"))
    talk.pass_time(8)
    assert talk.states("a") == [S.STARTING, S.LOADING, S.READY]
    seen = talk.replica("a")
    assert (seen.attempt, seen.generation, seen.address) == (1, 1, "127.101.0.1:41000")
    assert seen.start_took_seconds == pytest.approx(3.2)
    assert seen.telemetry is not None
    assert talk.beats()[-1][1].applied_revision == 1


def test_replicas_of_a_node_have_ports_of_their_own(talk: Conversation) -> None:
    ready(talk, "a", "b", "c")
    assert {talk.replica(key).ports for key in "abc"} == {(41000,), (41001,), (41002,)}


def test_draining_replica_finishes_its_requests_then_stops(talk: Conversation) -> None:
    ready(talk, "a")
    talk.pass_time(60)
    talk.wish(spec("a", generation=2, wanted=WantedState.DRAIN), revision=2)
    talk.pass_time(61)
    assert talk.states("a")[-1] is S.STOPPED
    draining = [r for _, b in talk.beats() for r in b.replicas if r.state is S.DRAINING]
    assert all(seen.telemetry is not None for seen in draining)
    assert talk.replica("a").generation == 2


def test_stopped_replica_is_reported_until_it_is_forgotten(talk: Conversation) -> None:
    ready(talk, "a")
    talk.wish(spec("a", generation=2, wanted=WantedState.STOP), revision=2)
    talk.pass_time(5)
    assert talk.replica("a").state is S.STOPPED
    talk.tell(v1.ForgetReplica(**talk.header(), replica_ids=("a",)))
    talk.pass_time(2)
    assert talk.outcomes()[-1][0] == "failed"
    talk.wish(revision=3)
    talk.tell(v1.ForgetReplica(**talk.header(), replica_ids=("a", "never-known")))
    talk.pass_time(2)
    assert talk.outcomes()[-1] == ("done", "")
    assert talk.beats()[-1][1].replicas == ()


def test_replica_that_left_the_wish_is_stopped(talk: Conversation) -> None:
    ready(talk, "a", "b")
    talk.wish(spec("b"), revision=2)
    talk.pass_time(3)
    assert talk.replica("a").state is S.STOPPED
    assert talk.replica("b").state is S.READY


def test_command_of_an_older_epoch_is_refused(talk: Conversation) -> None:
    talk.wish(spec("a"), epoch=5)
    talk.wish(epoch=4, revision=9)
    talk.pass_time(6)
    assert ("refused", "lease epoch 4 is over; now 5") in talk.outcomes()
    assert talk.replica("a").state is S.READY
    assert talk.beats()[-1][1].lease_epoch == 5


def test_older_revision_changes_nothing_but_the_lease(talk: Conversation) -> None:
    talk.wish(spec("a"), revision=7)
    talk.wish(revision=6, epoch=2)
    talk.pass_time(6)
    assert talk.replica("a").state is S.READY
    assert talk.beats()[-1][1].lease_epoch == 2
    assert talk.beats()[-1][1].applied_revision == 7


def test_older_generation_of_a_replica_is_ignored(talk: Conversation) -> None:
    talk.wish(spec("a", generation=3))
    talk.pass_time(6)
    talk.wish(spec("a", generation=2, wanted=WantedState.STOP), revision=2)
    talk.pass_time(3)
    assert talk.replica("a").state is S.READY
    assert talk.replica("a").generation == 3


def test_canary_is_taken_in_silently_and_proves_the_intake(talk: Conversation) -> None:
    ready(talk, "a")
    talk.pass_time(20)
    answers = len(talk.outcomes())
    talk.wish(spec("a"))
    talk.pass_time(1)
    assert len(talk.outcomes()) == answers
    age = talk.beats()[-1][1].liveness.intake_age_seconds
    assert age is not None
    assert age < 2


def test_command_that_comes_twice_is_answered_twice_and_done_once(talk: Conversation) -> None:
    command = talk.wish(spec("a"))
    talk.pass_time(6)
    talk.wish(spec("a", generation=2, wanted=WantedState.STOP), revision=2)
    talk.pass_time(3)
    talk.tell(command)
    talk.pass_time(6)
    assert talk.outcomes() == [("done", "")] * 3
    assert talk.replica("a").state is S.STOPPED


def test_forged_and_misdirected_commands_change_nothing() -> None:
    talk = Conversation(nodes=2)
    command = v1.ApplyDesired(**talk.header(), revision=1, replicas=(spec("a"),))
    talk.tell(command, key=b"x" * 32)
    other = talk.identities[1].node_id
    data = v1.encode_command(command, node_id=other, node_key=talk.key(other))
    talk.fleet.take(talk.identities[0].node_id, data, talk.now)
    talk.pass_time(5)
    assert talk.outcomes() == []
    assert talk.beats()[-1][1].replicas == ()


def test_request_for_a_hello_is_answered_with_the_next_beat(talk: Conversation) -> None:
    talk.wish()
    talk.pass_time(10)
    before = len(talk.hellos())
    talk.tell(v1.RequestHello(**talk.header(0), reason="who are you"))
    talk.pass_time(2)
    assert len(talk.hellos()) == before + 1
    assert talk.hellos()[-1].reconnect


def test_killed_engine_backs_off_and_starts_again_with_its_exit_told() -> None:
    crash = faults.ReplicaCrash(at_seconds=20)
    talk = Conversation(faults=(crash,))
    talk.wish(spec("a"))
    talk.pass_time(40)
    assert talk.states("a") == [S.STARTING, S.LOADING, S.READY, S.BACKING_OFF, S.STARTING, S.LOADING, S.READY]
    seen = talk.replica("a")
    assert (seen.attempt, seen.restarts) == (2, 1)
    assert seen.last_exit is not None
    assert seen.last_exit.signal == 9


def test_crash_loop_ends_in_failed_and_a_new_generation_starts_afresh() -> None:
    crashes = tuple(faults.ReplicaCrash(at_seconds=10.0 + 22 * n) for n in range(6))
    talk = Conversation(faults=crashes)
    talk.wish(spec("a"))
    talk.pass_time(150)
    assert talk.states("a")[-1] is S.FAILED
    talk.wish(spec("a", generation=2), revision=2)
    talk.pass_time(6)
    assert talk.replica("a").state is S.READY
    assert talk.replica("a").attempt == 7


def test_engine_token_changes_with_the_attempt(talk: Conversation) -> None:
    ready(talk, "a")
    node = talk.fleet.node(talk.identities[0].name)
    replica = node.replicas["a"]
    first = node.engine_token(replica)
    replica.crash(talk.now)
    talk.pass_time(10)
    assert node.engine_token(replica) != first
