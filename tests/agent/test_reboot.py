"""A machine that restarts under its agent: another boot id, and a monotonic clock that begins anew.

Both are made with namespaces of Linux, so the agent is the real one and reads the real files.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.node import Node, make_home, make_spec, wait_for
from tests.fakes.valkey import Valkey, running_valkey
from workers.agent import processes
from workers.protocol import v1
from workers.protocol.observed import ObservedState, ReplicaObserved

pytestmark = pytest.mark.timeout(90)

UNSHARE = shutil.which("unshare") or "/usr/bin/unshare"
BOOT_ID = "/proc/sys/kernel/random/boot_id"
UPTIME_SECONDS = 5
LOAD_SECONDS = 1.0


def boot(folder: Path, name: str) -> tuple[str, ...]:
    """How to start a program as if the machine had been up for seconds only. Skips where that cannot be."""
    file = folder / f"boot-{name}"
    file.write_text(f"{name}\n")
    back = str(UPTIME_SECONDS - int(time.monotonic()))
    prefix = (
        *(UNSHARE, "--mount", "--time", "--fork", "--kill-child", "--monotonic", back, "--boottime", back),
        *("sh", "-c", f'mount --bind "$0" {BOOT_ID} && exec "$@"', str(file)),
    )
    tried = subprocess.run([*prefix, "cat", BOOT_ID], capture_output=True, text=True, check=False)
    if tried.stdout != f"{name}\n":
        pytest.skip(f"no other boot can be made up here: {tried.stderr.strip()}")
    return prefix


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    with running_valkey(tmp_path) as server:
        yield server


@pytest.fixture
def node(tmp_path: Path, valkey: Valkey) -> Iterator[Node]:
    node = Node(make_home(tmp_path / "home", valkey.url), valkey)
    node.start()
    try:
        yield node
    finally:
        if node.process is not None and node.process.poll() is None:
            node.signal(signal.SIGKILL)  # behind `unshare`, a polite signal would not reach it
        node.close()
        assert not processes.labelled(node.node_id)


def restart(node: Node, prefix: tuple[str, ...] = ()) -> None:
    """SIGKILL for the agent, and another one; with a prefix, in another boot of the machine."""
    node.signal(signal.SIGKILL)
    node.forget_reports()
    node.prefix = prefix
    node.start()


def lose_power(node: Node) -> None:
    """Everything of the node's ends at once, and nobody is left to write down how."""
    node.signal(signal.SIGKILL)
    for process in processes.labelled(node.node_id):
        processes.send(process, signal.SIGKILL)
    wait_for(lambda: not processes.labelled(node.node_id), "all processes to be gone")


def test_crash_loop_goes_on_where_it_was_after_a_restart_of_the_agent_and_of_the_machine(
    node: Node, tmp_path: Path
) -> None:
    other_boot = boot(tmp_path, "second")
    node.wish(make_spec("r1", engine_options={"exit": 2}))
    node.wait_state("r1", ObservedState.BACKING_OFF, attempt=3)
    restart(node)
    seen = first_sight(node, "r1")
    assert seen.attempt in {3, 4}, "a slow machine may have used up the pause"
    assert seen.restarts == seen.attempt - 1
    seen = node.wait_state("r1", ObservedState.BACKING_OFF, attempt=5)
    assert seen.reason.startswith("crash 5 of 6: exit code 2")
    restart(node, other_boot)
    seen = first_sight(node, "r1")
    assert (seen.state, seen.attempt) == (ObservedState.BACKING_OFF, 5)
    assert seen.reason.startswith("crash 5 of 6: exit code 2")
    assert seen.retry_in_seconds is not None
    assert seen.retry_in_seconds <= 8.0, "the pause of the fifth crash, by the clock of this boot"
    failed = node.wait_state("r1", ObservedState.FAILED)
    assert failed.attempt == 6
    assert failed.reason.startswith("ended 6 times in a row, given up")


def test_replica_that_ran_when_the_machine_went_down_is_started_again_and_blamed_for_nothing(
    node: Node, tmp_path: Path
) -> None:
    other_boot = boot(tmp_path, "second")
    node.wish(make_spec("r1"))
    node.wait_state("r1", ObservedState.READY)
    lose_power(node)
    node.forget_reports()
    node.prefix = other_boot
    node.start()
    again = node.wait_state("r1", ObservedState.READY, attempt=2)
    assert again.last_exit is not None
    assert (again.last_exit.code, again.last_exit.signal) == (None, None)
    assert again.last_exit.why == "the machine was restarted"
    assert again.uptime_seconds is not None
    assert again.uptime_seconds < UPTIME_SECONDS + 60
    assert again.pid is not None
    os.kill(again.pid, signal.SIGKILL)
    healed = node.wait_state("r1", ObservedState.READY, attempt=3)
    assert healed.last_exit is not None
    assert healed.last_exit.signal == signal.SIGKILL


def test_replicas_of_a_machine_that_lost_power_come_back_a_few_at_a_time(
    tmp_path: Path, valkey: Valkey
) -> None:
    other_boot = boot(tmp_path, "second")
    keys = [f"r{number}" for number in range(5)]
    limited = {"EXAOPS_AGENT_STARTS_AT_ONCE": "2"}
    node = Node(make_home(tmp_path / "home", valkey.url), valkey, limited)
    node.start()
    try:
        node.wish(*(make_spec(key, engine_options={"load_seconds": f"{LOAD_SECONDS}"}) for key in keys))
        for key in keys:
            node.wait_state(key, ObservedState.READY, seconds=60)
        lose_power(node)
        node.forget_reports()
        node.prefix = other_boot
        node.start()
        for key in keys:
            again = node.wait_state(key, ObservedState.READY, attempt=2, seconds=60)
            assert again.last_exit is not None
            assert again.last_exit.why == "the machine was restarted"
        assert max(map(starting_in, node.all(v1.Heartbeat))) <= 2
        beat = node.heartbeat()
        assert beat is not None
        up = sorted((replica.uptime_seconds for replica in beat.replicas), reverse=True)
        assert up[0] - up[2] >= LOAD_SECONDS, "the third waits until one of the first two is ready"
        assert up[2] - up[4] >= LOAD_SECONDS, "and so does the fifth"
    finally:
        if node.process is not None and node.process.poll() is None:
            node.signal(signal.SIGKILL)
        node.close()


def starting_in(beat: v1.Heartbeat) -> int:
    return sum(r.state in {ObservedState.STARTING, ObservedState.LOADING} for r in beat.replicas)


def first_sight(node: Node, replica_id: str) -> ReplicaObserved:
    return wait_for(lambda: node.replica(replica_id), "the agent's first word of the replica")
