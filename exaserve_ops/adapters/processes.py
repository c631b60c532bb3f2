"""Processes of this machine: who they are for certain, and which of them carry our label."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

FLEET_VARIABLE = "EXAOPS_FLEET"
"""In the environment of every process that `up` starts: which fleet it belongs to."""
PROGRAM_VARIABLE = "EXAOPS_PROGRAM"
"""Likewise: which program of that fleet it is."""

_NODE_VARIABLE = "EXAOPS_NODE_ID"
_REPLICA_VARIABLE = "EXAOPS_REPLICA_ID"
_POLL_SECONDS = 0.05
_START_TICKS_FIELD = 19
"""Index of the start time in `/proc/<pid>/stat`, counted from behind the name in brackets."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process that cannot be confused with a later one of the same number."""

    pid: int
    start_ticks: int
    boot_id: str


@dataclass(frozen=True, slots=True)
class LabelledProcess:
    """A process of a fleet, by the label in its environment."""

    identity: ProcessIdentity
    program: str
    is_replica: bool
    """An engine, or a part of one: its agent stops it, or adopts it."""


def identify(pid: int) -> ProcessIdentity | None:
    """Return who has this number now; `None` if nobody, or only an unreaped rest."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    if fields[0] in {"Z", "X"}:
        return None
    return ProcessIdentity(pid, int(fields[_START_TICKS_FIELD]), boot_id)


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether this very process still runs."""
    return identify(identity.pid) == identity


def find_labelled(fleet_id: str, node_ids: Collection[str] = ()) -> tuple[LabelledProcess, ...]:
    """Return the processes of a fleet and of the replicas of its nodes, without the caller's own.

    Processes whose environment may not be read are another user's, and not of this fleet.
    """
    found = []
    for pid in _pids():
        environment = read_environment_of(pid)
        if environment.get(FLEET_VARIABLE) == fleet_id or environment.get(_NODE_VARIABLE) in node_ids:
            identity = identify(pid)
            if identity is not None and pid != os.getpid():
                program = environment.get(PROGRAM_VARIABLE, "")
                found.append(LabelledProcess(identity, program, _REPLICA_VARIABLE in environment))
    return tuple(found)


def end_processes(
    identities: Iterable[ProcessIdentity],
    *,
    stop_signal: signal.Signals = signal.SIGTERM,
    patience_seconds: float,
    is_hurried: Callable[[], bool] = bool,
) -> None:
    """Ask processes to end; kill those that have not when patience is over."""
    open_identities = [identity for identity in identities if _send(identity, stop_signal)]
    deadline = time.monotonic() + patience_seconds
    while open_identities and time.monotonic() < deadline and not is_hurried():
        time.sleep(_POLL_SECONDS)
        open_identities = [identity for identity in open_identities if is_alive(identity)]
    for identity in open_identities:
        _send(identity, signal.SIGKILL)


def reap(pid: int) -> None:
    """Let the kernel forget a child of ours that has ended; harmless for any other process."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def read_environment_of(pid: int) -> dict[str, str]:
    """Environment that a process was started with; empty if it is gone or not ours to read."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    entries = (entry.partition("=") for entry in raw.decode(errors="replace").split("\0"))
    return {name: value for name, equals, value in entries if equals}


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _send(identity: ProcessIdentity, which: signal.Signals) -> bool:
    """Signal this very process; whether it was there."""
    if not is_alive(identity):
        return False
    try:
        os.kill(identity.pid, which)
    except (ProcessLookupError, PermissionError):
        return False
    return True
