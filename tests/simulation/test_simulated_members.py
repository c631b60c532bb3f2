"""A simulated node's part of a replica over several nodes obeys the same rules as a real agent's."""

from __future__ import annotations

import msgspec
import pytest

from tests.fakes.simulation import Conversation, spec
from workers.protocol.observed import ObservedState
from workers.protocol.wish import GangMember, WantedState

S = ObservedState
HEAD = GangMember(number=0, count=2, epoch=1)
FOLLOWER = GangMember(number=1, count=2, epoch=1, head_address="10.0.0.1:41000", rendezvous="10.0.0.1:51000")


@pytest.fixture
def talk() -> Conversation:
    conversation = Conversation()
    conversation.pass_time(2)
    return conversation


def start(talk: Conversation, member: GangMember, seconds: float = 6, **changes: object) -> None:
    talk.wish(msgspec.structs.replace(spec("r"), member=member, **changes))
    talk.pass_time(seconds)


def test_head_tells_where_members_meet_and_the_others_answer_nowhere(talk: Conversation) -> None:
    start(talk, HEAD)
    head = talk.replica("r")
    assert (head.state, head.member_number, head.epoch) == (S.READY, 0, 1)
    assert head.rendezvous
    assert head.rendezvous != head.address
    other = Conversation()
    other.pass_time(2)
    start(other, msgspec.structs.replace(FOLLOWER, rendezvous=""))
    assert (other.replica("r").state, other.replica("r").attempt) == (S.WAITING, 0)
    start(other, FOLLOWER)
    seen = other.replica("r")
    assert (seen.state, seen.member_number, seen.epoch) == (S.READY, 1, 1)
    assert (seen.address, seen.rendezvous, seen.telemetry) == ("", "", None)


def test_each_start_is_begun_once_and_the_one_before_is_gone_then(talk: Conversation) -> None:
    start(talk, HEAD)
    talk.fleet.nodes[0].crash_replicas(1, talk.now)
    talk.pass_time(120)
    seen = talk.replica("r")
    assert (seen.state, seen.attempt, seen.epoch) == (S.FAILED, 1, 1)
    assert "waits until the whole is started again" in seen.reason
    start(talk, HEAD, generation=2)
    assert talk.replica("r").state is S.FAILED
    start(talk, msgspec.structs.replace(HEAD, epoch=2), generation=2)
    assert (talk.replica("r").state, talk.replica("r").attempt) == (S.READY, 2)
    talk.wish(msgspec.structs.replace(spec("r"), member=msgspec.structs.replace(HEAD, epoch=3), generation=3))
    talk.pass_time(1)
    assert talk.replica("r").epoch in (2, 3)
    talk.pass_time(6)
    assert (talk.replica("r").state, talk.replica("r").attempt, talk.replica("r").epoch) == (S.READY, 3, 3)


@pytest.mark.parametrize(("wanted", "after"), [(WantedState.RUN, S.FAILED), (WantedState.DRAIN, S.STOPPED)])
def test_restart_of_the_machine_ends_its_part(talk: Conversation, wanted: WantedState, after: S) -> None:
    start(talk, FOLLOWER)
    start(talk, FOLLOWER, generation=2, wanted=wanted)
    assert talk.replica("r").state is S.READY  # only the head drains
    talk.fleet.nodes[0].power_off(talk.now)
    talk.fleet.nodes[0].power_on(talk.now)
    talk.pass_time(10)
    assert (talk.replica("r").state, talk.replica("r").attempt) == (after, 1)
    start(talk, FOLLOWER, generation=3, wanted=WantedState.STOP)
    assert talk.replica("r").state is S.STOPPED
