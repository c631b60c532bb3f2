"""Processes on accelerators: a provable left-over is ended when asked, anything else never."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.node import wait_for
from workers.agent import processes
from workers.agent.leftovers import Leftovers
from workers.agent.processes import LaunchLabel, clean_environment
from workers.protocol import v1
from workers.protocol.observed import UnknownProcess

NODE = "11111111-2222-4333-8444-555555555555"
SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
DEAF = [
    sys.executable,
    "-c",
    "import signal as s, time; s.signal(s.SIGTERM, s.SIG_IGN); print('up', flush=True); time.sleep(600)",
]


class Desk:
    """Left-overs of one agent, and what they reported."""

    def __init__(self, folder: Path) -> None:
        self.logs = folder / "logs"
        self.open: set[tuple[str, int]] = set()
        self.reports: list[v1.Report] = []
        self.reported = threading.Event()
        self.leftovers = Leftovers(NODE, self.logs, lambda: self.open, self.take, grace_seconds=0.3)
        self.children: list[subprocess.Popen[bytes]] = []

    def take(self, report: v1.Report) -> None:
        self.reports.append(report)
        self.reported.set()

    def start(self, argv: list[str], *, env: dict[str, str], log: Path) -> int:
        """Start a process in a session of its own; returns once it runs."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            child = subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        self.children.append(child)
        wait_for(lambda: "up" in log.read_text(), "the process")
        return child.pid

    def ask(self, pid: int, start_ticks: int | None = None) -> str:
        stat = processes.read_stat(pid)
        ticks = start_ticks if start_ticks is not None else stat.id.start_ticks if stat else 0
        command = v1.EndProcess(
            command_id="c", lease_epoch=1, deadline_seconds=60.0, pid=pid, start_ticks=ticks
        )
        return self.leftovers.end(command)

    def result(self) -> v1.CommandResult:
        assert self.reported.wait(10)
        [report] = self.reports
        assert isinstance(report, v1.CommandResult)
        return report


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    for child in made.children:
        child.kill()
        child.wait(10)


def ours(folder: Path, node: str = NODE) -> dict[str, str]:
    return clean_environment({}, LaunchLabel(node, "r-1", 3), folder)


def test_labelled_left_over_is_ended_when_asked(desk: Desk, tmp_path: Path) -> None:
    pid = desk.start(SLEEP, env=ours(tmp_path), log=tmp_path / "elsewhere.log")
    origin = desk.leftovers.judge(pid)
    assert origin.is_left_over
    assert origin.attempt == ("r-1", 3)
    assert desk.ask(pid) == ""
    assert (desk.result().outcome, "SIGTERM" in desk.result().reason) == ("done", True)
    assert desk.children[0].wait(10) == -signal.SIGTERM


def test_left_over_that_lost_its_label_is_known_by_its_log_and_killed_if_deaf(
    desk: Desk,
) -> None:
    log = desk.logs / "r-1" / "4.log"
    pid = desk.start(DEAF, env={"PATH": os.environ["PATH"]}, log=log)
    assert desk.leftovers.judge(pid).attempt == ("r-1", 4)
    log.unlink()
    assert desk.leftovers.judge(pid).attempt == ("r-1", 4), "the log may have been pruned since"
    assert desk.ask(pid) == ""
    assert "SIGKILL" in desk.result().reason
    assert desk.children[0].wait(10) == -signal.SIGKILL


def test_stranger_is_told_apart_and_never_ended(desk: Desk, tmp_path: Path) -> None:
    pid = desk.start(SLEEP, env={"PATH": os.environ["PATH"]}, log=tmp_path / "own.log")
    assert "not provably ours" in desk.ask(pid)
    told = desk.leftovers.describe(UnknownProcess(pid=pid, accelerator_uuid="GPU-1", memory_bytes=5))
    assert told is not None
    assert (told.left_over, told.memory_bytes, told.accelerator_uuid) == (False, 5, "GPU-1")
    assert "somebody else started it" in told.origin
    assert told.user
    assert desk.children[0].poll() is None


def test_another_agents_process_is_not_ours(desk: Desk, tmp_path: Path) -> None:
    pid = desk.start(SLEEP, env=ours(tmp_path, "another-node"), log=tmp_path / "own.log")
    assert "launch label of node another-node" in desk.ask(pid)
    assert desk.children[0].poll() is None


def test_reader_of_a_log_is_no_left_over(desk: Desk, tmp_path: Path) -> None:
    log = desk.logs / "r-1" / "5.log"
    log.parent.mkdir(parents=True)
    log.write_text("hello\n")
    argv = [
        sys.executable,
        "-c",
        f"f=open({str(log)!r}); import time; print('up', flush=True); time.sleep(600)",
    ]
    pid = desk.start(argv, env={"PATH": os.environ["PATH"]}, log=tmp_path / "own.log")
    assert not desk.leftovers.judge(pid).is_left_over


def test_part_of_a_replica_that_goes_on_is_neither_shown_nor_ended(desk: Desk, tmp_path: Path) -> None:
    pid = desk.start(SLEEP, env=ours(tmp_path), log=tmp_path / "own.log")
    desk.open = {("r-1", 3)}
    assert "belongs to a replica that goes on" in desk.ask(pid)
    assert desk.leftovers.describe(UnknownProcess(pid=pid)) is None
    assert desk.children[0].poll() is None


def test_pid_that_was_given_to_another_process_is_refused(desk: Desk, tmp_path: Path) -> None:
    pid = desk.start(SLEEP, env=ours(tmp_path), log=tmp_path / "own.log")
    assert "is gone" in desk.ask(pid, start_ticks=1)
    assert desk.children[0].poll() is None
