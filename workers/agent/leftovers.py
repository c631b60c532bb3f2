"""Whose a process on an accelerator is, and ending one that is provably what this agent left behind.

Proof is what only a child of a launch can have: this node's launch label in its environment, or an
attempt's log as its standard output. Whatever cannot be proven is for a person at the machine to end.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import psutil

from workers.agent import processes
from workers.agent.processes import ProcessId
from workers.protocol import v1
from workers.protocol.observed import UnknownProcess

_KILLED_SECONDS = 5.0
_OUTPUTS = (1, 2)

logger = logging.getLogger(__name__)

AttemptKey = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose a process is, and by what that is known."""

    attempt: AttemptKey | None
    """The attempt of this agent that it was started for; `None` where nothing proves one."""
    is_open: bool
    """That attempt goes on: the process is no left-over but a part of a replica."""
    words: str

    @property
    def is_left_over(self) -> bool:
        """Proven to be ours, and of no attempt that goes on."""
        return self.attempt is not None and not self.is_open


class Leftovers:
    """Judges processes, and ends left-overs on demand, each in a thread of its own."""

    def __init__(
        self,
        node_id: str,
        logs: Path,
        open_attempts: Callable[[], Collection[AttemptKey]],
        report: Callable[[v1.Report], None],
        *,
        grace_seconds: float,
    ) -> None:
        self._node_id = node_id
        self._logs = logs
        self._open_attempts = open_attempts
        self._report = report
        self._grace_seconds = grace_seconds

    def judge(self, pid: int) -> Origin:
        """Find out whose a process is. One that is gone is nobody's."""
        label = processes.read_label(pid)
        if label is not None and label.node_id != self._node_id:
            return Origin(None, is_open=False, words=f"it carries the launch label of node {label.node_id}")
        if label is not None:
            return self._ours((label.replica_id, label.attempt), "its environment has our launch label")
        attempt = self._attempt_of_output(pid)
        if attempt is not None:
            return self._ours(attempt, "its output goes to that attempt's log")
        return Origin(
            None,
            is_open=False,
            words="neither our launch label nor one of our logs as its output: somebody else started it",
        )

    def _ours(self, attempt: AttemptKey, proof: str) -> Origin:
        is_open = attempt in self._open_attempts()
        return Origin(attempt, is_open, f"started for {attempt[0]}, attempt {attempt[1]}: {proof}")

    def _attempt_of_output(self, pid: int) -> AttemptKey | None:
        """The attempt whose log is the standard output; readers of logs have it under other numbers."""
        for number in _OUTPUTS:
            try:
                target = Path(f"/proc/{pid}/fd/{number}").readlink()
                folder, name = target.relative_to(self._logs.resolve()).parts
            except (OSError, ValueError):
                continue
            attempt = name.removesuffix(" (deleted)").removesuffix(".log")
            if attempt.isdigit():
                return folder, int(attempt)
        return None

    def describe(self, found: UnknownProcess) -> UnknownProcess | None:
        """Say whose it is; `None` for a part of a replica that goes on."""
        origin = self.judge(found.pid)
        if origin.is_open:
            return None
        stat = processes.read_stat(found.pid)
        return UnknownProcess(
            pid=found.pid,
            replica_id=origin.attempt[0] if origin.attempt is not None else "",
            accelerator_uuid=found.accelerator_uuid,
            memory_bytes=found.memory_bytes,
            command=found.command,
            start_ticks=stat.id.start_ticks if stat is not None else 0,
            user=_user(found.pid),
            left_over=origin.is_left_over,
            origin=origin.words,
        )

    def end(self, command: v1.EndProcess) -> str:
        """Begin to end a process; its end is reported later. Returns why not, or nothing."""
        process = ProcessId(command.pid, command.start_ticks)
        if not processes.is_alive(process):
            return f"process {command.pid} of that start time is gone"
        origin = self.judge(command.pid)
        if origin.is_open:
            return f"process {command.pid} belongs to a replica that goes on"
        if not origin.is_left_over:
            return f"process {command.pid} is not provably ours: {origin.words}"
        logger.warning("event=end_process pid=%d %s", command.pid, origin.words)
        name = f"end-{command.pid}"
        threading.Thread(target=self._finish, args=(command, process), name=name, daemon=True).start()
        return ""

    def _finish(self, command: v1.EndProcess, process: ProcessId) -> None:
        outcome, reason = (
            "failed",
            f"process {process.pid} outlived SIGKILL: only a restart of the machine ends it",
        )
        try:
            outcome, reason = self._terminate(process) or (outcome, reason)
        except OSError as error:
            reason = f"process {process.pid} could not be ended: {error.strerror}"
        self._report(
            v1.CommandResult(
                node_id=self._node_id, command_id=command.command_id, outcome=outcome, reason=reason
            )
        )

    def _terminate(self, process: ProcessId) -> tuple[str, str] | None:
        try:
            handle = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return "done", f"process {process.pid} has ended"
        try:
            for number, seconds in (
                (signal.SIGTERM, self._grace_seconds),
                (signal.SIGKILL, _KILLED_SECONDS),
            ):
                processes.send(process, number)
                if select.select([handle], [], [], seconds)[0] or not processes.is_alive(process):
                    return "done", f"process {process.pid} has ended by {number.name}"
            return None
        finally:
            os.close(handle)


def _user(pid: int) -> str:
    try:
        return psutil.Process(pid).username()[:80]
    except (psutil.Error, KeyError):
        return ""
