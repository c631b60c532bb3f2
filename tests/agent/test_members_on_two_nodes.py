"""Both members of a replica over two nodes, with real processes; the agents' loops run in the test."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.gang import REPLICA
from tests.fakes.gang_nodes import GangNodes
from tests.fakes.local_node import LocalNode
from workers.agent import processes
from workers.agent.journal import AttemptRow
from workers.agent.processes import LaunchLabel, ProcessId
from workers.engines.simulated import SimulatedAdapter
from workers.protocol.observed import ObservedState
from workers.protocol.wish import WantedState

READY, FAILED, STOPPED = ObservedState.READY, ObservedState.FAILED, ObservedState.STOPPED


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[GangNodes]:
    gang = GangNodes(tmp_path)
    yield gang
    gang.close()


def stubborn(tmp_path: Path) -> GangNodes:
    """Its engines neither end by themselves nor by SIGTERM."""
    return GangNodes(tmp_path, engine_options={"stays": 1, "ignore_term": 1, "children": 1})


def attempt_of(node: LocalNode) -> AttemptRow:
    (row,) = node.journal.attempts()
    return row


def living(node: LocalNode) -> set[ProcessId]:
    return set(processes.labelled(node.node_id))


def kill_engine(gang: GangNodes, number: int) -> None:
    pid = gang.seen(number).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_members_meet_where_the_head_has_leased_a_port_and_are_ready_together(gang: GangNodes) -> None:
    gang.tells_head = False
    gang.begin_start()
    gang.wait_states(ObservedState.LOADING, ObservedState.WAITING)
    assert gang.seen(1).reason == "waits for the head's address"
    head = gang.seen(0)
    host, _, port = head.rendezvous.rpartition(":")
    assert (host, int(port)) == ("127.0.0.1", head.ports[-1])
    assert int(port) in gang.nodes[0].journal.leased_ports()
    gang.tells_head = True
    gang.wait_states(READY, READY)
    head, other = gang.seen(0), gang.seen(1)
    assert (head.member_number, other.member_number) == (0, 1)
    assert (other.address, other.rendezvous) == ("", "")
    gang.wait(lambda: gang.seen(0).telemetry, "the head's load is read")
    assert gang.seen(1).telemetry is None


@pytest.mark.parametrize("number", [0, 1], ids=["head", "follower"])
def test_death_of_one_engine_ends_both_and_the_next_start_brings_both_back(
    gang: GangNodes, number: int
) -> None:
    gang.begin_start()
    gang.wait_states(READY, READY)
    before = living(gang.nodes[0]) | living(gang.nodes[1])
    kill_engine(gang, number)
    gang.wait_states(FAILED, FAILED)
    assert "killed by SIGKILL" in gang.seen(number).reason
    for _ in range(5):
        gang.round()
    assert gang.states == (FAILED, FAILED)
    assert not [process for process in before if processes.is_alive(process)]
    gang.begin_start()
    gang.wait_states(READY, READY)
    assert [attempt_of(node).attempt for node in gang.nodes] == [2, 2]


def test_agent_ends_a_follower_that_outlives_its_head(tmp_path: Path) -> None:
    gang = stubborn(tmp_path)
    try:
        gang.begin_start()
        gang.wait_states(READY, READY)
        kill_engine(gang, 0)
        gang.wait_states(FAILED, FAILED)
        assert "the head is gone" in gang.seen(1).reason
        assert living(gang.nodes[1]) == set()
    finally:
        gang.close()


def test_next_start_begins_only_when_nothing_of_the_earlier_one_is_left(tmp_path: Path) -> None:
    gang = stubborn(tmp_path)
    try:
        gang.begin_start()
        gang.wait_states(READY, READY)
        earlier = [living(node) for node in gang.nodes]
        assert all(len(group) >= 3 for group in earlier)
        gang.begin_start()
        began: set[int] = set()

        def all_begun() -> bool:
            for number in (0, 1):
                if number not in began and gang.seen(number).attempt == 2:
                    began.add(number)
                    assert not [process for process in earlier[number] if processes.is_alive(process)]
            return len(began) == 2

        gang.wait(all_begun, "both have begun the next start")
        gang.wait_states(READY, READY)
    finally:
        gang.close()


def test_agents_that_start_anew_keep_what_runs_and_what_they_may_not_launch_again(gang: GangNodes) -> None:
    gang.begin_start()
    gang.wait_states(READY, READY)
    before = [living(node) for node in gang.nodes]
    restart(gang)
    gang.wait_states(READY, READY)
    assert [living(node) for node in gang.nodes] == before
    kill_engine(gang, 1)
    gang.wait_states(FAILED, FAILED)
    restart(gang)
    gang.wait_states(FAILED, FAILED)
    assert [living(node) for node in gang.nodes] == [set(), set()]
    gang.begin_start()
    gang.wait_states(READY, READY)


def test_restart_of_a_machine_is_the_end_of_its_part_and_begins_nothing(gang: GangNodes) -> None:
    node = gang.nodes[1]
    node.journal.note_boot("one boot", now=time.monotonic())
    gang.begin_start()
    gang.wait_states(READY, READY)
    for process in living(node):
        processes.send(process, signal.SIGKILL)
    restart(gang, lambda: node.journal.note_boot("another boot", now=time.monotonic()))
    gang.wait_states(FAILED, FAILED)
    assert "the machine was restarted" in gang.seen(1).reason
    assert [attempt.attempt for each in gang.nodes for attempt in each.journal.attempts()] == []
    gang.begin_start()
    gang.wait_states(READY, READY)


def restart(gang: GangNodes, at_begin: Callable[[], object] = lambda: None) -> None:
    """Agents end and begin anew; `at_begin`: what the first of them does once it has its journal."""
    for node in gang.nodes:
        node.scraper.stop()
        node.journal.close()
        node.begin()
    at_begin()


def test_start_that_an_agent_wrote_down_and_did_not_begin_is_over(gang: GangNodes) -> None:
    node = gang.nodes[0]
    now = time.monotonic()
    node.journal.open_attempt(
        AttemptRow(
            replica_id=REPLICA,
            attempt=1,
            generation=1,
            launch_digest="d",
            engine="tiny",
            ports=(),
            host="127.0.0.1",
            runtime_dir=str(node.home.run / "r1.1"),
            log_file=str(node.home.logs / REPLICA / "1.log"),
            launched_at=now,
            epoch=1,
        )
    )
    gang.begin_start()
    gang.wait(lambda: gang.seen(0).state is FAILED, "the head's part of start 1 is over")
    assert not processes.members(None, LaunchLabel(node.node_id, REPLICA, 1))
    gang.begin_start()
    gang.wait_states(READY, READY)


def test_only_the_head_drains_then_the_other_is_stopped(gang: GangNodes) -> None:
    gang.begin_start()
    gang.wait_states(READY, READY)
    gang.ask(WantedState.DRAIN, WantedState.DRAIN)
    gang.wait(lambda: gang.seen(0).state is STOPPED, "the head has drained")
    gang.ask(WantedState.STOP, WantedState.STOP)
    gang.wait_states(STOPPED, STOPPED)
    assert [living(node) for node in gang.nodes] == [set(), set()]


def test_simulated_members_meet_serve_and_end_together(tmp_path: Path) -> None:
    gang = GangNodes(tmp_path, SimulatedAdapter, engine="simulated", engine_options={"load_seconds": 0.1})
    try:
        gang.begin_start()
        gang.wait_states(READY, READY)
        kill_engine(gang, 1)
        gang.wait_states(FAILED, FAILED)
        assert "exit code 1" in gang.seen(0).reason
        gang.begin_start()
        gang.wait_states(READY, READY)
        kill_engine(gang, 0)
        gang.wait_states(FAILED, FAILED)
        last = gang.seen(1).last_exit
        assert last is not None
        assert "the head is gone" in " ".join((last.why, *last.log_tail))
    finally:
        gang.close()
