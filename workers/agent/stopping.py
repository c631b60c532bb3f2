"""Ending every replica of a node while no agent runs: what `stop-replicas` does."""

from __future__ import annotations

import logging
import shutil
import signal
import time
from pathlib import Path

from workers.agent import processes
from workers.agent.journal import AttemptRow, Journal, ReplicaRow
from workers.agent.processes import LaunchLabel, ProcessId
from workers.agent.supervisor import Close, Ending

_POLL_SECONDS = 0.05
_KILL_EVERY_SECONDS = 1.0
_KILL_FOR_SECONDS = 15.0
_WHY = "stopped together with its node"

logger = logging.getLogger(__name__)


def stop_replicas(node_id: str, journal: Journal, *, grace_seconds: float) -> tuple[int, ...]:
    """SIGTERM, wait, SIGKILL. Returns the pids that are still there, normally none.

    Ends every process of the journal's open attempts, and every other one on this machine that
    carries this node's launch label.
    """
    attempts = journal.attempts()
    for row in attempts:
        journal.change_attempt(row.key, term_sent_at=time.monotonic(), stop_reason=_WHY)
    for process in _to_terminate(node_id, attempts):
        processes.send(process, signal.SIGTERM)
    left = _wait_until_gone(node_id, attempts, grace_seconds)
    deadline = time.monotonic() + _KILL_FOR_SECONDS
    while left and time.monotonic() < deadline:
        for process in left:
            processes.send(process, signal.SIGKILL)
        left = _wait_until_gone(node_id, attempts, _KILL_EVERY_SECONDS)
    for row in attempts:
        if not processes.members(row.leader, _label(node_id, row)):
            _close(row, journal)
    return tuple(process.pid for process in left)


def _to_terminate(node_id: str, attempts: tuple[AttemptRow, ...]) -> set[ProcessId]:
    """The shims, which pass the signal on; and whatever runs without one."""
    shims = {row.leader for row in attempts if row.leader and processes.is_alive(row.leader)}
    guarded = {shim.pid for shim in shims}
    rest = set()
    for process in _living(node_id, attempts):
        stat = processes.read_stat(process.pid)
        if stat is not None and stat.session not in guarded:
            rest.add(process)
    return shims | rest


def _living(node_id: str, attempts: tuple[AttemptRow, ...]) -> set[ProcessId]:
    found = set(processes.labelled(node_id))
    for row in attempts:
        found.update(processes.members(row.leader, _label(node_id, row)))
    return found


def _wait_until_gone(node_id: str, attempts: tuple[AttemptRow, ...], seconds: float) -> set[ProcessId]:
    deadline = time.monotonic() + seconds
    while True:
        left = _living(node_id, attempts)
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(_POLL_SECONDS)


def _close(row: AttemptRow, journal: Journal) -> None:
    replica = journal.find_replica(row.replica_id) or ReplicaRow(replica_id=row.replica_id)
    close = Close(
        row.replica_id,
        row.attempt,
        Ending.STOPPED,
        replica.crashes,
        replica.port_conflicts,
        _WHY,
    )
    runtime_dir = Path(row.runtime_dir)
    journal.close_attempt(
        close,
        exit_record=processes.read_exit(runtime_dir),
        log_tail=(),
        now=time.monotonic(),
    )
    shutil.rmtree(runtime_dir, ignore_errors=True)


def _label(node_id: str, row: AttemptRow) -> LaunchLabel:
    return LaunchLabel(node_id, row.replica_id, row.attempt)
