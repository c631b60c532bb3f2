"""Plan and hands together on real processes, without Redis."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import socket
import stat
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.fakes.local_node import LocalNode
from tests.fakes.node import make_spec, wait_for
from tests.fakes.tiny_adapter import TinyAdapter
from workers.agent import processes
from workers.agent.config import AgentConfig
from workers.agent.journal import Journal
from workers.agent.processes import LaunchLabel
from workers.agent.reconcile import ReconcileLoop
from workers.engines.base import EngineOptions, Launch, LaunchContext
from workers.protocol import names
from workers.protocol.observed import ObservedState, ReplicaObserved
from workers.protocol.wish import ModelFile, ModelRef, WantedState


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LocalNode]:
    node = LocalNode(tmp_path / "home")
    yield node
    node.close()


def environment_of(replica: ReplicaObserved) -> dict[str, str]:
    with urllib.request.urlopen(f"http://{replica.address}/environ", timeout=5) as answer:
        return dict(json.load(answer))


def test_engine_sees_nothing_of_the_agents_environment(
    node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PORT", "1")
    monkeypatch.setenv("EXAOPS_FLEET_SECRET", "f" * 64)
    node.wish(make_spec("r1"))
    seen = environment_of(node.wait_state("r1", ObservedState.READY))
    assert seen.keys() - {"LC_CTYPE"} == {
        "PATH",
        "LANG",
        "HOME",
        "TMPDIR",
        "TINY_MODEL",
        "TINY_RUNTIME",
        names.ENV_NODE,
        names.ENV_REPLICA,
        names.ENV_ATTEMPT,
        names.ENV_ENGINE_API_KEY,
        "CUDA_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
    }


def test_no_secret_stands_in_any_command_line(node: LocalNode) -> None:
    node.wish(make_spec("r1"))
    node.wait_state("r1", ObservedState.READY)
    key = node.runner.api_key("r1", 1).encode()
    for process in processes.labelled(node.node_id):
        assert key not in Path(f"/proc/{process.pid}/cmdline").read_bytes()


def test_bogus_flag_shows_exit_code_and_last_lines_then_backs_off_then_fails(node: LocalNode) -> None:
    node.wish(make_spec("r1", engine_options={"exit": 2}))
    replica = node.wait_backing_off("r1")
    assert replica.last_exit is not None
    assert (replica.last_exit.code, replica.last_exit.signal) == (2, None)
    assert "error: unrecognized arguments: --quantization nope" in replica.last_exit.log_tail
    assert "key ***" in replica.last_exit.log_tail
    assert replica.retry_in_seconds is not None
    failed = node.wait_state("r1", ObservedState.FAILED)
    assert failed.attempt == 3
    assert "exit code 2" in failed.reason
    assert (node.home.logs / "r1" / "3.log").exists()


def test_engine_that_ignores_sigterm_is_killed_with_all_its_children(node: LocalNode) -> None:
    spec = make_spec("r1", engine_options={"ignore_term": 1, "children": 3})
    node.wish(spec)
    node.wait_state("r1", ObservedState.READY)
    group = processes.members(None, LaunchLabel(node.node_id, "r1", 1))
    assert len(group) == 5
    node.wish(msgspec.structs.replace(spec, generation=2, wanted=WantedState.STOP))
    node.wait_state("r1", ObservedState.STOPPED)
    assert not [process for process in group if processes.is_alive(process)]
    assert not list(node.home.run.glob("r1.*"))


def test_children_of_a_killed_engine_die_before_the_relaunch(node: LocalNode) -> None:
    node.wish(make_spec("r1", engine_options={"children": 3}))
    pid = node.wait_state("r1", ObservedState.READY).pid
    group = processes.members(None, LaunchLabel(node.node_id, "r1", 1))
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    node.wait_state("r1", ObservedState.READY, attempt=2)
    assert not [process for process in group if processes.is_alive(process)]


def test_engine_whose_shim_was_killed_is_cleaned_up_and_relaunched(node: LocalNode) -> None:
    node.wish(make_spec("r1"))
    engine = node.wait_state("r1", ObservedState.READY).pid
    (row,) = node.journal.attempts()
    assert row.pid is not None
    assert engine is not None
    os.kill(row.pid, signal.SIGKILL)
    node.wait_state("r1", ObservedState.READY, attempt=2)
    assert processes.read_stat(engine) is None


class PortThief(TinyAdapter):
    """Takes the leased port away between the lease and the engine's bind, the first two times."""

    def __init__(self) -> None:
        self.stolen: list[socket.socket] = []

    def build_launch(self, options: EngineOptions, context: LaunchContext) -> Launch:
        if len(self.stolen) < 2:
            thief = socket.create_server((context.host, context.ports[0]))
            self.stolen.append(thief)
        return super().build_launch(options, context)


def test_ten_replicas_get_distinct_ports_although_some_are_stolen(tmp_path: Path) -> None:
    thief = PortThief()
    node = LocalNode(tmp_path / "home", adapter=thief)
    try:
        node.wish(*(make_spec(f"r{number}") for number in range(10)))
        node.wait(
            lambda: [r.state for r in node.reconciler.replicas] == [ObservedState.READY] * 10,
            "all ten are ready",
            seconds=60,
        )
        ports = [port for replica in node.reconciler.replicas for port in replica.ports]
        assert len(set(ports)) == 20
        stolen = {taken.getsockname()[1] for taken in thief.stolen}
        assert not stolen & set(ports)
        assert [row.crashes for row in node.journal.replicas()] == [0] * 10
        assert sum(replica.restarts for replica in node.reconciler.replicas) == 2
    finally:
        for taken in thief.stolen:
            taken.close()
        node.close()


def test_strangers_server_on_the_port_is_not_taken_for_the_engine(node: LocalNode) -> None:
    """An engine that never binds, while somebody else's server answers on its port."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        spec = make_spec("r1", engine_options={"port": 0})
        node.config = AgentConfig(address="127.0.0.1", port_min=2000, port_max=2000)
        node.wish(spec)
        node.wait(lambda: node.replica("r1").pid, "the engine runs")
        (row,) = node.journal.attempts()
        node.journal.change_attempt(row.key, ports=(other.getsockname()[1],))
        node.scraper.watch(())
        node.wait(lambda: "not this replica's" in node.replica("r1").reason, "the stranger is seen")
        assert node.replica("r1").state is ObservedState.STARTING


def test_agent_restart_between_lease_and_start_leaves_no_process_and_no_lease(node: LocalNode) -> None:
    node.wish(make_spec("r1"))
    node.wait_state("r1", ObservedState.READY)
    (row,) = node.journal.attempts()
    half = msgspec.structs.replace(row, replica_id="r2", ports=(47_001,), pid=None, start_ticks=None)
    node.journal.open_attempt(half)
    node.wish(make_spec("r1"), make_spec("r2"))
    replica = node.wait_state("r2", ObservedState.READY)
    assert replica.attempt == 2
    assert 47_001 not in node.journal.leased_ports()
    assert node.journal.find_replica("r2").crashes == 0  # type: ignore[union-attr]  # it is there


def test_launch_whose_pid_was_not_written_down_is_adopted(node: LocalNode) -> None:
    node.wish(make_spec("r1"))
    pid = node.wait_state("r1", ObservedState.READY).pid
    node.journal.change_attempt(("r1", 1), pid=None, start_ticks=None, ready_at=None)
    assert node.wait_state("r1", ObservedState.READY, attempt=1).pid == pid


def test_process_that_the_journal_lost_is_reported_stopped_and_only_then_replaced(
    node: LocalNode,
) -> None:
    node.wish(make_spec("r1"))
    old = node.wait_state("r1", ObservedState.READY).pid
    assert old is not None
    node.scraper.stop()
    node.journal.close()
    for file in node.home.root.glob("journal.sqlite3*"):
        file.unlink()
    node.begin()
    node.reconciler.tick()
    assert processes.read_stat(old) is not None, "nothing is stopped before a wish is known"
    assert [process.replica_id for process in node.reconciler.unknown] == ["r1", "r1"]
    node.wish(make_spec("r1"))
    new = node.wait_state("r1", ObservedState.READY)
    assert processes.read_stat(old) is None
    assert new.pid != old
    assert node.reconciler.unknown == ()


@pytest.mark.parametrize("wrong", ["size", "digest", "missing", "outside"])
def test_model_files_that_differ_are_never_launched_from(node: LocalNode, tmp_path: Path, wrong: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a.bin").write_bytes(b"weights")
    good = ModelFile(path="a.bin", size_bytes=7, sha256=hashlib.sha256(b"weights").hexdigest())
    bad = {
        "size": msgspec.structs.replace(good, size_bytes=8),
        "digest": msgspec.structs.replace(good, sha256="0" * 64),
        "missing": msgspec.structs.replace(good, path="b.bin"),
        "outside": msgspec.structs.replace(good, path="../a.bin"),
    }[wrong]
    model = ModelRef(name="m", digest="d", source=folder.as_uri(), files=(bad,))
    node.wish(make_spec("r1", model=model))
    replica = node.wait_state("r1", ObservedState.FAILED)
    assert bad.path in replica.reason
    assert replica.attempt == 0
    mended = msgspec.structs.replace(model, files=(good,))
    node.wish(make_spec("r1", generation=2, model=mended))
    assert node.wait_state("r1", ObservedState.READY).attempt == 1


def test_unusable_options_fail_at_once_with_the_reason(node: LocalNode) -> None:
    node.wish(make_spec("r1", engine_options={"unknown": 1}), make_spec("r2", engine="nope"))
    assert "no such option" in node.wait_state("r1", ObservedState.FAILED).reason
    assert "'nope' is not known" in node.wait_state("r2", ObservedState.FAILED).reason


def test_drain_lets_open_requests_end(node: LocalNode, tmp_path: Path) -> None:
    running = tmp_path / "running"
    running.write_text("2")
    spec = make_spec("r1", engine_options={"running_file": str(running)})
    node.wish(spec)
    node.wait(lambda: node.replica("r1").active_requests == 2, "two requests are seen")
    node.wish(msgspec.structs.replace(spec, generation=2, wanted=WantedState.DRAIN))
    pid = node.wait_state("r1", ObservedState.DRAINING).pid
    assert pid is not None
    running.write_text("0")
    node.wait_state("r1", ObservedState.STOPPED)
    assert processes.read_stat(pid) is None


class MissingProgram(TinyAdapter):
    """An engine that is not installed."""

    def build_launch(self, options: EngineOptions, context: LaunchContext) -> Launch:
        launch = super().build_launch(options, context)
        return dataclasses.replace(launch, argv=("/no/such/engine", *launch.argv))


def test_engine_that_is_not_installed_is_a_crash_with_the_reason(tmp_path: Path) -> None:
    node = LocalNode(tmp_path / "home", adapter=MissingProgram())
    try:
        node.wish(make_spec("r1"))
        last = node.wait_state("r1", ObservedState.FAILED).last_exit
        assert last is not None
        assert last.code == 127
        assert last.log_tail == ("cannot start /no/such/engine: No such file or directory",)
    finally:
        node.close()


class AttentiveAdapter(TinyAdapter):
    """Remembers what it was told of each launch."""

    def __init__(self) -> None:
        self.told: list[LaunchContext] = []

    def build_launch(self, options: EngineOptions, context: LaunchContext) -> Launch:
        self.told.append(context)
        return super().build_launch(options, context)


def test_an_engine_is_told_how_long_its_start_may_take(tmp_path: Path) -> None:
    adapter = AttentiveAdapter()
    node = LocalNode(tmp_path / "home", adapter=adapter)
    try:
        node.wish(make_spec("r1", start_seconds=7200.0))
        node.wait_state("r1", ObservedState.READY)
        assert [context.start_seconds for context in adapter.told] == [7200.0]
    finally:
        node.close()


class BadAdapter(TinyAdapter):
    """Breaks on one replica in a way that no adapter should."""

    def build_launch(self, options: EngineOptions, context: LaunchContext) -> Launch:
        if context.replica_id == "r1":
            raise LookupError("a bug in the adapter")
        return super().build_launch(options, context)


def test_one_broken_replica_does_not_hold_up_the_others(tmp_path: Path) -> None:
    node = LocalNode(tmp_path / "home", adapter=BadAdapter())
    try:
        node.wish(make_spec("r1"), make_spec("r2"))
        node.wait_state("r2", ObservedState.READY)
        assert "a bug in the adapter" in node.reconciler.last_error
    finally:
        node.close()


class HangingAdapter(TinyAdapter):
    """Blocks its first launch until it is let go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.let_go = threading.Event()

    def build_launch(self, options: EngineOptions, context: LaunchContext) -> Launch:
        if not self.entered.is_set():
            self.entered.set()
            self.let_go.wait(60)
        return super().build_launch(options, context)


def _threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def test_hung_loop_is_replaced_and_launches_once(tmp_path: Path) -> None:
    adapter = HangingAdapter()
    node = LocalNode(tmp_path / "home", adapter=adapter)
    loop = ReconcileLoop(node.reconciler, stall_seconds=0.5)
    try:
        node.wish(make_spec("r1"))
        loop.start()
        assert adapter.entered.wait(10)
        wait_for(loop.check, "the hung loop is replaced")
        assert loop.restarts == 1
        wait_for(lambda: node.replica("r1").state is ObservedState.READY, "the replica is ready")
        pid = node.replica("r1").pid
        adapter.let_go.set()
        wait_for(lambda: _threads("reconcile") == 1, "the hung thread has ended")
        assert node.replica("r1").pid == pid
        assert len(processes.labelled(node.node_id)) == 2, "the shim and its engine, and no others"
    finally:
        adapter.let_go.set()
        loop.stop()
        node.close()


def test_loop_that_raises_says_so_and_goes_on(node: LocalNode) -> None:
    loop = ReconcileLoop(node.reconciler)
    node.journal.close()
    loop.start()
    try:
        wait_for(lambda: "ProgrammingError" in loop.error, "the error is told")
        assert not loop.check()
    finally:
        loop.stop()
        node.journal = Journal(node.home.journal_file)


def test_files_of_a_node_are_closed_to_others(node: LocalNode) -> None:
    node.wish(make_spec("r1"))
    node.wait_state("r1", ObservedState.READY)
    (row,) = node.journal.attempts()
    paths = (node.home.identity_file, Path(row.log_file), Path(row.runtime_dir))
    assert [stat.S_IMODE(path.stat().st_mode) & 0o077 for path in paths] == [0, 0, 0]
