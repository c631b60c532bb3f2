"""The agent as a process, against a real Valkey, a real Celery worker and real engine processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.node import Node, make_home, make_spec, wait_for
from tests.fakes.valkey import Valkey, running_valkey
from workers.agent import processes
from workers.agent.intake_wire import ENV_AGENT_PID, ENV_HOME
from workers.protocol import v1
from workers.protocol.observed import ObservedState


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    with running_valkey(tmp_path) as server:
        yield server


@pytest.fixture
def node(tmp_path: Path, valkey: Valkey) -> Iterator[Node]:
    node = Node(make_home(tmp_path / "home", valkey.url), valkey, {"VLLM_PORT": "1"})
    node.start()
    try:
        yield node
    finally:
        node.close()
        assert not processes.labelled(node.node_id)


def test_killed_engine_is_relaunched_with_exit_signal(node: Node) -> None:
    node.wish(make_spec("r1"))
    before = node.wait_state("r1", ObservedState.READY)
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    after = node.wait_state("r1", ObservedState.READY, attempt=2)
    assert after.last_exit is not None
    assert (after.last_exit.signal, after.last_exit.attempt) == (signal.SIGKILL, 1)
    assert after.restarts == 1
    assert after.pid != before.pid


def test_agent_killed_and_restarted_adopts_the_same_processes(node: Node) -> None:
    node.wish(make_spec("r1"), make_spec("r2"))
    pids = [node.wait_state(name, ObservedState.READY).pid for name in ("r1", "r2")]
    node.signal(signal.SIGKILL)
    node.forget_reports()
    node.start()
    again = [node.wait_state(name, ObservedState.READY) for name in ("r1", "r2")]
    assert [replica.pid for replica in again] == pids
    assert [replica.attempt for replica in again] == [1, 1]
    hello = node.all(v1.Hello)[0]
    assert hello.engines == ("tiny",)
    assert not hello.reconnect


def test_engine_killed_while_the_agent_was_dead_is_known_afterwards(node: Node) -> None:
    node.wish(make_spec("r1"))
    pid = node.wait_state("r1", ObservedState.READY).pid
    assert pid is not None
    node.signal(signal.SIGKILL)
    os.kill(pid, signal.SIGSEGV)
    node.forget_reports()
    node.start()
    after = node.wait_state("r1", ObservedState.READY, attempt=2)
    assert after.last_exit is not None
    assert after.last_exit.signal == signal.SIGSEGV


def test_heartbeats_and_intake_resume_after_redis_was_killed(node: Node, valkey: Valkey) -> None:
    node.wish(make_spec("r1"))
    pid = node.wait_state("r1", ObservedState.READY).pid
    valkey.kill()
    valkey.start()
    node.reports.clear()
    node._last_id = b"0"
    wait_for(lambda: [h for h in node.all(v1.Hello) if h.reconnect], "hello after the reconnect")
    node.wish(make_spec("r1"), make_spec("r2"))
    assert node.wait_state("r2", ObservedState.READY)
    kept = node.wait_state("r1", ObservedState.READY)
    assert (kept.pid, kept.attempt) == (pid, 1)


def test_agent_heals_while_redis_does_not_answer(node: Node, valkey: Valkey) -> None:
    node.wish(make_spec("r1"))
    pid = node.wait_state("r1", ObservedState.READY).pid
    assert pid is not None
    assert valkey.process is not None
    valkey.process.send_signal(signal.SIGSTOP)  # connections stay open and go dead
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: _second_attempt(node), "the engine is relaunched without Redis")
    valkey.process.send_signal(signal.SIGCONT)
    after = node.wait_state("r1", ObservedState.READY, attempt=2)
    assert after.last_exit is not None
    assert after.last_exit.signal == signal.SIGKILL


def _second_attempt(node: Node) -> bool:
    """Whether the second attempt's engine runs, as `status` tells it."""
    done = subprocess.run(
        [sys.executable, "-m", "workers.agent", "status", "--home", str(node.home.root)],
        capture_output=True,
        check=True,
        timeout=30,
    )
    status = json.loads(done.stdout)
    assert node.process is not None
    assert status["agent_pid"] == node.process.pid
    return [(a["attempt"], a["alive"]) for a in status["attempts"]] == [(2, True)]


def test_commands_leave_no_reply_queues_in_redis(node: Node, valkey: Valkey) -> None:
    command = node.wish(make_spec("r1"))
    wait_for(
        lambda: [r for r in node.all(v1.CommandResult) if r.command_id == command.command_id],
        "the command's result",
    )
    with valkey.client() as client:
        keys = client.keys("*")
    assert not [key for key in keys if b"pidbox" in key or b"reply" in key]


def test_hung_consumer_is_replaced_by_the_canary(tmp_path: Path, valkey: Valkey) -> None:
    home = make_home(tmp_path / "home", valkey.url)
    node = Node(home, valkey, {"EXAOPS_AGENT_CANARY_SECONDS": "4"})
    node.start()
    try:
        node.wish()
        wait_for(lambda: node.all(v1.CommandResult), "the first command's result")
        child = wait_for(lambda: _intake_child(node), "the consumer's pid")
        os.kill(child, signal.SIGSTOP)
        node.wish(make_spec("r1"))  # goes to the hung consumer, and is lost with it
        wait_for(lambda: _intake_restarts(node) == 1, "the consumer is replaced")
        node.wish(make_spec("r1"))
        node.wait_state("r1", ObservedState.READY)
    finally:
        node.close()


def _intake_child(node: Node) -> int | None:
    assert node.process is not None
    for stat in processes.all_stats():
        if stat.parent == node.process.pid:
            command = Path(f"/proc/{stat.id.pid}/cmdline").read_bytes()
            if b"celery" in command:
                return stat.id.pid
    return None


def _intake_restarts(node: Node) -> int:
    beat = node.heartbeat()
    return beat.liveness.intake_restarts if beat else 0


def test_consumer_ends_with_a_killed_agent(node: Node) -> None:
    node.wish()
    wait_for(lambda: node.all(v1.CommandResult), "the first command's result")
    child = _intake_child(node)
    assert child is not None
    node.signal(signal.SIGKILL)
    wait_for(lambda: processes.read_stat(child) is None, "the consumer has ended")


def test_consumer_whose_agent_died_before_it_was_up_ends_too(tmp_path: Path) -> None:
    home = make_home(tmp_path / "home")
    home.create()
    died = subprocess.Popen([sys.executable, "-c", ""])
    died.wait()
    consumer = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "workers.agent.celery", "worker", "--pool", "solo"],
        env={"PATH": os.defpath, ENV_HOME: str(home.root), ENV_AGENT_PID: str(died.pid)},
        capture_output=True,
        timeout=50,
        check=False,
    )
    assert consumer.returncode == 1, consumer.stderr


def test_second_agent_on_one_home_names_the_first(node: Node) -> None:
    node.wish()
    wait_for(node.heartbeat, "a heartbeat")
    assert node.process is not None
    second = subprocess.run(
        [sys.executable, "-m", "workers.agent", "run", "--home", str(node.home.root)],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert second.returncode == 1
    assert f"pid {node.process.pid}" in second.stderr
    assert "Traceback" not in second.stderr


def test_suspended_agent_launches_what_was_wanted_meanwhile(node: Node) -> None:
    node.wish()
    wait_for(lambda: node.all(v1.CommandResult), "the first command's result")
    assert node.process is not None
    node.process.send_signal(signal.SIGSTOP)
    node.wish(make_spec("r1"))
    node.process.send_signal(signal.SIGCONT)
    assert node.wait_state("r1", ObservedState.READY).attempt == 1
    beat = node.heartbeat()
    assert beat is not None
    assert beat.liveness.reconcile_restarts == 0


def test_log_lines_arrive_with_the_engine_key_masked(node: Node) -> None:
    node.wish(make_spec("r1", engine_options={"chatty": 5}))
    node.wait_state("r1", ObservedState.READY)
    node.send(
        v1.TailLog(
            command_id=str(uuid.uuid4()),
            lease_epoch=1,
            deadline_seconds=10,
            replica_id="r1",
            seconds=30,
        )
    )
    lines = wait_for(lambda: [line for chunk in node.all(v1.LogChunk) for line in chunk.lines], "log lines")
    assert "line 4" in lines
    assert "key ***" in lines
    assert not [line for line in lines if "xe-" in line]


def test_stop_ends_the_agent_and_leaves_the_replicas(node: Node) -> None:
    node.wish(make_spec("r1"))
    pid = node.wait_state("r1", ObservedState.READY).pid
    assert pid is not None
    node.signal(signal.SIGTERM)
    assert node.process is not None
    assert node.process.returncode == 0
    assert processes.read_stat(pid) is not None
