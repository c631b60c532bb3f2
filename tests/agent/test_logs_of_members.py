"""The agent of each member of a replica over several nodes sends what its own part writes."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.gang import REPLICA
from tests.fakes.gang_nodes import GangNodes
from tests.fakes.local_node import LocalNode
from tests.fakes.node import wait_for
from workers.agent.tail import LogTailer
from workers.protocol.observed import ObservedState
from workers.protocol.v1 import LogChunk, TailLog


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[GangNodes]:
    gang = GangNodes(tmp_path, engine_options={"chatty": 2})
    yield gang
    gang.close()


def read_log(node: LocalNode) -> list[LogChunk]:
    """All that its agent sends at first when somebody asks for the log."""
    sent: list[LogChunk] = []
    tailer = LogTailer(node.node_id, node.home.logs, node.journal, node.runner.api_key, sent.append)
    command = TailLog(
        command_id=str(uuid.uuid4()), lease_epoch=1, deadline_seconds=30.0, replica_id=REPLICA, seconds=30.0
    )
    tailer.start()
    try:
        tailer.follow(command)
        wait_for(lambda: any(chunk.lines for chunk in sent), "lines")
    finally:
        tailer.stop()
    return sent


def test_member_that_is_not_the_head_sends_its_own_log_and_last_lines_with_its_key_masked(
    gang: GangNodes,
) -> None:
    gang.begin_start()
    gang.wait_states(ObservedState.READY, ObservedState.READY)
    for node in gang.nodes:
        (row,) = node.journal.attempts()
        with Path(row.log_file).open("a") as log:
            log.write(f"of {node.node_id}\n")
        chunks = read_log(node)
        lines = [line for chunk in chunks for line in chunk.lines]
        assert {chunk.node_id for chunk in chunks} == {node.node_id}
        assert [line for line in lines if line.startswith("of ")] == [f"of {node.node_id}"]
        assert {"line 1", "key ***"} <= set(lines)
        assert {chunk.attempt for chunk in chunks} == {1}
        assert chunks[0].is_backlog, "some of it may have been sent to others before"
    pid = gang.seen(1).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    gang.wait_states(ObservedState.FAILED, ObservedState.FAILED)
    ended = gang.seen(1).last_exit
    assert ended is not None
    assert f"of {gang.nodes[1].node_id}" in ended.log_tail
