"""Processes that carry this node's launch label and that no open attempt knows.

They are what a lost journal, a restored backup or a crashed agent leaves behind. They hold memory
that the control plane believes to be free, so they are reported and stopped, by whole attempts.
Processes without our label are never touched.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from workers.agent import processes
from workers.agent.processes import LaunchLabel, ProcessId
from workers.protocol.observed import UnknownProcess

_SCAN_SECONDS = 5.0
_SCAN_SECONDS_WHILE_ANY = 0.5


@dataclass(frozen=True, slots=True)
class StraySignal:
    """A signal for one stray process."""

    process: ProcessId
    number: signal.Signals


def plan_strays(
    found: Mapping[ProcessId, LaunchLabel],
    asked_at_seconds: Mapping[ProcessId, float],
    *,
    now: float,
    grace_seconds: float,
) -> tuple[StraySignal, ...]:
    """SIGTERM for a stray seen for the first time, SIGKILL once its grace is over."""
    signals = []
    for process in sorted(found, key=lambda process: process.pid):
        asked = asked_at_seconds.get(process)
        if asked is None:
            signals.append(StraySignal(process, signal.SIGTERM))
        elif now - asked >= grace_seconds:
            signals.append(StraySignal(process, signal.SIGKILL))
    return tuple(signals)


class StrayWatch:
    """Looks for strays every few seconds, and stops them once a wish is known."""

    def __init__(self, node_id: str, grace_seconds: float) -> None:
        self._node_id = node_id
        self._grace_seconds = grace_seconds
        self._next_scan_at = 0.0
        self._asked_at: dict[ProcessId, float] = {}
        self.found: Mapping[ProcessId, LaunchLabel] = {}

    def look(
        self, open_attempts: Collection[tuple[str, int]], *, may_stop: bool, now: float
    ) -> Mapping[str, tuple[int, ...]]:
        """Scan if it is time to. Returns the pids of strays by replica id."""
        if now >= self._next_scan_at:
            self.found = {
                process: label
                for process, label in processes.labelled(self._node_id).items()
                if (label.replica_id, label.attempt) not in open_attempts
            }
            pause = _SCAN_SECONDS_WHILE_ANY if self.found else _SCAN_SECONDS
            self._next_scan_at = now + pause
            if may_stop:
                self._stop(now)
        by_replica: dict[str, tuple[int, ...]] = {}
        for process, label in self.found.items():
            by_replica[label.replica_id] = (*by_replica.get(label.replica_id, ()), process.pid)
        return by_replica

    def _stop(self, now: float) -> None:
        self._asked_at = {p: at for p, at in self._asked_at.items() if p in self.found}
        planned = plan_strays(self.found, self._asked_at, now=now, grace_seconds=self._grace_seconds)
        for step in planned:
            self._asked_at.setdefault(step.process, now)
            processes.send(step.process, step.number)

    def report(self) -> tuple[UnknownProcess, ...]:
        """Return the strays as the heartbeat carries them."""
        return tuple(
            UnknownProcess(
                pid=process.pid,
                replica_id=label.replica_id,
                start_ticks=process.start_ticks,
                left_over=True,
                origin=f"started for {label.replica_id}, attempt {label.attempt}: its environment has our "
                "launch label; its agent is ending it",
            )
            for process, label in self.found.items()
        )
