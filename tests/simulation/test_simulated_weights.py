"""Simulated nodes keep weights: same words as real ones, bytes by arithmetic, with faults."""

from __future__ import annotations

import msgspec
import pytest

from tests.fakes.simulation import Conversation, spec
from workers.protocol import v1
from workers.protocol.observed import ObservedState
from workers.protocol.weights import (
    SwarmOrder,
    SwarmParent,
    WeightsHeld,
    WeightsReport,
    WeightsSource,
    WeightsState,
    WeightsWanted,
)
from workers.protocol.wish import ModelRef
from workers.simulation import faults
from workers.simulation.node import NodeShape
from workers.simulation.weights import StoreShape
from workers.weights.planning import StorePolicy

GB = 10**9
REVISION = "sha256:" + "a" * 64
SHAPE = StoreShape(
    policy=StorePolicy(margin_bytes=GB),
    disk_bytes=100 * GB,
    write_bytes_per_second=2 * GB,
    link_bytes_per_second=GB,
    origin_bytes_per_second=GB,
)


def wanted(revision: str = REVISION, gigabytes: int = 20, **changes: object) -> WeightsWanted:
    one = WeightsWanted(
        revision=revision,
        manifest_digest=f"manifest of {revision}",
        total_bytes=gigabytes * GB,
        sources=(WeightsSource(kind="http", location="https://store"),),
    )
    return msgspec.structs.replace(one, **changes)


class Talk(Conversation):
    """A conversation about weights."""

    def want(self, *weights: WeightsWanted, revision: int = 1, number: int = 0) -> None:
        command = v1.ApplyWeights(**self.header(), revision=revision, weights=weights)
        self.tell(command, number)

    def chain(self, count: int) -> None:
        """Each node pulls from the one before; the first from the origin."""
        for number in range(count):
            parent = "origin" if number == 0 else self.identities[number - 1].node_id
            stripes = ((SwarmParent(node_id=parent),),) * 2
            order = SwarmOrder(epoch=1, key="ab", valid_seconds=60.0, stripes=stripes)
            self.want(wanted(swarm=order), number=number)

    def report(self, number: int = 0) -> WeightsReport:
        report = self.beats(number)[-1][1].weights
        assert report is not None
        return report

    def held(self, number: int = 0, revision: str = REVISION) -> WeightsHeld:
        return next(one for one in self.report(number).held if one.revision == revision)


def talk(nodes: int = 1, *script: faults.Fault) -> Talk:
    return Talk(nodes=nodes, faults=script, shape=NodeShape(slots=2, store=SHAPE))


def test_fetch_takes_as_long_as_the_link_needs_and_says_that_it_is_simulated() -> None:
    world = talk()
    world.want(wanted())
    world.pass_time(10)
    held = world.held()
    assert held.state is WeightsState.FETCHING
    assert held.have_bytes == pytest.approx(10 * GB, rel=0.15)
    assert held.bytes_per_second == pytest.approx(GB)
    assert "(simulated)" in held.reason
    world.pass_time(12)
    held = world.held()
    assert (held.state, held.have_bytes) == (WeightsState.READY, 20 * GB)
    assert [(s.kind, s.name) for s in held.sources] == [("http", "simulated origin")]
    assert world.report().disk_free_bytes == 80 * GB
    assert world.report().revision == 1


def test_swarm_brings_one_copy_from_the_origin_to_all_in_little_more_than_the_time_for_one() -> None:
    world = talk(8)
    world.chain(8)
    world.pass_time(26)
    assert {world.held(n).state for n in range(8)} == {WeightsState.READY}
    origin = sum(s.bytes for n in range(8) for s in world.held(n).sources if s.kind != "peer")
    assert origin == pytest.approx(20 * GB, rel=0.01)
    assert {s.name for s in world.held(5).sources} == {world.identities[4].node_id}


def test_swarm_shows_its_pulls_and_streams() -> None:
    world = talk(2)
    world.chain(2)
    world.pass_time(6)
    seen = world.held(1).swarm
    assert seen is not None
    assert [(pull.stage, pull.parent) for pull in seen.pulls] == [
        ("flowing", world.identities[0].node_id)
    ] * 2
    giver = world.held(0).swarm
    assert giver is not None
    assert [stream.child for stream in giver.streams] == [world.identities[1].node_id]
    assert 0 < seen.have_pieces < seen.pieces
    assert world.report(1).piece_port


def test_who_has_no_parent_yet_waits_and_asks_nobody() -> None:
    world = talk()
    world.want(wanted(swarm=SwarmOrder(epoch=1, key="ab", valid_seconds=60.0)))
    world.pass_time(10)
    assert world.held().have_bytes == 0


def test_parent_that_is_off_is_complained_about_and_the_next_one_asked() -> None:
    world = talk(3, faults.NodeDeath(at_seconds=0.1, nodes=("sim-r02-n001",)))
    first, second = world.identities[0].node_id, world.identities[1].node_id
    world.want(wanted(), number=0)
    world.pass_time(22)
    stripes = ((SwarmParent(node_id=second), SwarmParent(node_id=first)),)
    order = SwarmOrder(epoch=1, key="ab", valid_seconds=60.0, stripes=stripes)
    world.want(wanted(swarm=order), number=2)
    world.pass_time(5)
    seen = world.held(2).swarm
    assert seen is not None
    assert [(c.parent, c.unreachable) for c in seen.complaints] == [(second, True)]
    assert seen.pulls[0].parent == first
    assert world.held(2).have_bytes


def test_what_does_not_fit_is_refused_with_figures_and_what_nobody_wants_makes_room() -> None:
    world = talk()
    world.want(wanted(gigabytes=200))
    world.pass_time(2)
    assert world.held().state is WeightsState.FAILED
    assert "insufficient space" in world.held().reason
    world.want(wanted("sha256:b", 60), revision=2)
    world.pass_time(70)
    assert world.held(revision="sha256:b").state is WeightsState.READY
    world.want(wanted("sha256:c", 60), revision=3)
    world.pass_time(2)
    assert [one.revision for one in world.report().held] == ["sha256:c"]


def test_paused_and_older_wishes_change_nothing_on_the_disk() -> None:
    world = talk()
    world.want(wanted(), revision=5)
    world.pass_time(5)
    world.want(wanted(paused=True), revision=6)
    world.pass_time(2)
    have = world.held().have_bytes
    world.pass_time(5)
    assert (world.held().state, world.held().have_bytes) == (WeightsState.PAUSED, have)
    world.want(revision=4)
    world.pass_time(2)
    assert world.held().have_bytes == have


def test_replica_waits_for_its_weights_and_starts_from_them() -> None:
    world = talk()
    model = ModelRef(name="m", digest=REVISION, source="file:///m", manifest_digest="manifest")
    world.wish(spec("r", model=model))
    world.pass_time(3)
    assert world.replica("r").state is ObservedState.WAITING
    assert "not wanted on this node yet" in world.replica("r").reason
    world.want(wanted())
    world.pass_time(10)
    assert "its weights are fetching" in world.replica("r").reason
    assert world.replica("r").attempt == 0
    world.pass_time(20)
    assert world.replica("r").state is ObservedState.READY
    assert world.held().in_use
    world.want(revision=2)  # nobody claims it any more, but a replica runs from it
    world.want(wanted("sha256:b", 90), revision=3)
    world.pass_time(3)
    assert world.held().state is WeightsState.READY
    assert "insufficient space" in world.held(revision="sha256:b").reason


# -- faults ----------------------------------------------------------------------------------------------
def test_full_disk_stops_fetching_keeps_what_is_ready_and_goes_on_afterwards() -> None:
    world = talk(1, faults.DiskFull(at_seconds=5, for_seconds=10))
    world.want(wanted())
    world.pass_time(9)
    assert world.report().problem == "no space left on device (simulated)"
    assert world.held().state is WeightsState.FAILED
    world.pass_time(25)
    assert world.report().problem == ""
    assert world.held().state is WeightsState.READY


def test_slow_link_slows_and_recovers() -> None:
    world = talk(1, faults.SlowLink(at_seconds=0.1, for_seconds=10, factor=10))
    world.want(wanted())
    world.pass_time(9)
    assert world.held().have_bytes < 2 * GB
    world.pass_time(22)
    assert world.held().state is WeightsState.READY


def test_bit_rot_is_found_and_mended_and_running_replicas_are_left_alone() -> None:
    world = talk(1, faults.CorruptWeights(at_seconds=30, pieces=500))
    world.want(wanted())
    world.pass_time(31)
    assert (world.held().state, world.held().damaged_pieces) == (WeightsState.FETCHING, 500)
    world.pass_time(5)
    assert (world.held().state, world.held().have_bytes) == (WeightsState.READY, 20 * GB)


def test_damaged_pieces_from_a_peer_are_counted_against_it_and_not_kept() -> None:
    world = talk(2, faults.CorruptWeights(at_seconds=0.1, where="given", nodes=("sim-r01-n000",)))
    world.chain(2)
    world.pass_time(6)
    held = world.held(1)
    assert held.swarm is not None
    assert held.have_bytes == 0
    (complaint,) = held.swarm.complaints
    assert complaint.parent == world.identities[0].node_id
    assert complaint.bad_pieces >= 3
    assert held.damaged_pieces == complaint.bad_pieces


@pytest.mark.parametrize(
    "word", ["disk-full@5s+10s", "corrupt-weights@5s:where=given", "slow-link@5s:factor=4"]
)
def test_faults_of_weights_are_said_in_a_word(word: str) -> None:
    assert faults.kind_of(faults.parse_fault(word)) == word.partition("@")[0]


@pytest.mark.parametrize(
    "word", ["corrupt-weights@5s:where=air", "slow-link@5s:factor=0.5", "corrupt-weights@1s:pieces=0"]
)
def test_faults_of_weights_that_make_no_sense_are_refused(word: str) -> None:
    with pytest.raises(faults.FaultScriptError):
        faults.parse_fault(word)
