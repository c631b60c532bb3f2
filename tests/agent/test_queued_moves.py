"""A move that waits for its turn on a node is for an engine that may have ended by then."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.local_node import LocalNode
from tests.fakes.node import make_spec, wait_for
from workers.agent.session_moves import ENGINE_UNREACHABLE, MOVES_AT_ONCE, SessionMoves
from workers.protocol import v1
from workers.protocol.observed import ObservedState

WAIT_SECONDS = 60.0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LocalNode]:
    node = LocalNode(tmp_path / "home")
    try:
        yield node
    finally:
        node.close()


def test_queued_move_gives_no_key_to_a_stranger_that_took_the_port(node: LocalNode) -> None:
    node.wish(make_spec("r1"))
    replica = node.wait_state("r1", ObservedState.READY)
    reports: list[v1.SessionSent] = []
    moves = SessionMoves(node.node_id, node.journal.attempts, node.runner.api_key, reports.append)
    go_on = threading.Event()
    try:
        for number in range(MOVES_AT_ONCE):
            assert moves._submit(f"before-{number}", lambda: go_on.wait() and None) == ""
        order = v1.MoveSession(
            command_id="queued",
            lease_epoch=1,
            deadline_seconds=30.0,
            replica_id="r1",
            attempt=replica.attempt,
            session_id="talk",
            transfer_id="00" * 16,
            transfer_key="00" * 32,
            target="http://127.0.0.1:1",
        )
        assert moves.begin(order) == "", "the engine runs"
        assert replica.pid is not None
        os.kill(replica.pid, signal.SIGKILL)
        host, _, port = replica.address.rpartition(":")
        stranger = wait_for(lambda: listener(host, int(port)), "the port is free", seconds=WAIT_SECONDS)
        with stranger:
            go_on.set()
            wait_for(lambda: reports, "the move is answered", seconds=WAIT_SECONDS)
            stranger.settimeout(0)
            with pytest.raises(BlockingIOError):
                stranger.accept()
        assert [report.code for report in reports] == [ENGINE_UNREACHABLE]
        assert "does not listen" in reports[0].reason
    finally:
        go_on.set()
        moves.stop()


def listener(host: str, port: int) -> socket.socket | None:
    try:
        return socket.create_server((host, port))
    except OSError:
        return None
