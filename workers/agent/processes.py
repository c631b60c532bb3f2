"""Starting attempts, and finding and ending every process that belongs to one.

A process is named by (pid, start time): a pid alone may have been given to somebody else since.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from workers.engines.base import Launch
from workers.protocol import names

_SHIM = Path(__file__).with_name("shim.py")
_PRIVATE_FILE = 0o600
_PRIVATE_FOLDER = 0o700
_CONNECT_SECONDS = 1.0
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process of this boot of the machine; the start time is in clock ticks since boot."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The part of `/proc/<pid>/stat` that says whose a process is. Zombies are left out."""

    id: ProcessId
    parent: int
    session: int


@dataclass(frozen=True, slots=True)
class LaunchLabel:
    """What an agent writes into the environment of all that it launches."""

    node_id: str
    replica_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class ExitRecord:
    """What the shim wrote when the engine's main process ended."""

    code: int | None
    signal: int | None
    duration_seconds: float


class LaunchError(Exception):
    """The attempt could not even be started."""


def machine_boot_id() -> str:
    """Changes with every boot of the machine: pids and monotonic times of another are void."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_attempt(
    launch: Launch, label: LaunchLabel, *, runtime_dir: Path, log_file: Path
) -> subprocess.Popen[bytes]:
    """Start an attempt behind its shim, in a session of its own, with a clean environment.

    `runtime_dir` is made afresh. Raises `LaunchError` with the operating system's reason.
    """
    try:
        runtime_dir.mkdir(mode=_PRIVATE_FOLDER, parents=True)
        log = open_log(log_file)
        try:
            return subprocess.Popen(  # noqa: S603 - an argument vector from an adapter, no shell
                [sys.executable, "-I", "-S", str(_SHIM), str(runtime_dir), *launch.argv],
                env=clean_environment(launch.env, label, runtime_dir),
                cwd=runtime_dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(log)
    except OSError as error:
        raise LaunchError(f"cannot start: {error.strerror} ({error.filename})") from error


def open_log(log_file: Path) -> int:
    """Open a log to append to, closed to others, in a folder that is made if need be."""
    log_file.parent.mkdir(mode=_PRIVATE_FOLDER, parents=True, exist_ok=True)
    # O_APPEND lets the agent cut an overgrown log while the engine goes on writing.
    return os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _PRIVATE_FILE)


def clean_environment(wanted: Mapping[str, str], label: LaunchLabel, runtime_dir: Path) -> dict[str, str]:
    """The engine's whole environment: nothing of the agent's own reaches it but the PATH."""
    return {
        "PATH": os.environ.get("PATH", _DEFAULT_PATH),
        "LANG": "C.UTF-8",
        "HOME": str(runtime_dir),
        "TMPDIR": str(runtime_dir),
        **wanted,
        **shown_label(label),
    }


def shown_label(label: LaunchLabel) -> dict[str, str]:
    """The part of an engine's environment by which its processes are found."""
    return {
        names.ENV_NODE: label.node_id,
        names.ENV_REPLICA: label.replica_id,
        names.ENV_ATTEMPT: str(label.attempt),
    }


def read_exit(runtime_dir: Path) -> ExitRecord | None:
    """Return how the engine ended, or `None` while it runs (or if nobody could write it down)."""
    try:
        facts = json.loads((runtime_dir / "exit.json").read_text())
        return ExitRecord(facts["code"], facts["signal"], float(facts["duration_seconds"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_stat(pid: int) -> ProcessStat | None:
    """Return one process's facts; `None` if there is none, or only a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command's name may hold blanks and brackets, so fields are counted from its end.
    fields = text.rpartition(b")")[2].split()
    if fields[0] in (b"Z", b"X"):
        return None
    return ProcessStat(ProcessId(pid, int(fields[19])), int(fields[1]), int(fields[3]))


def read_label(pid: int) -> LaunchLabel | None:
    """Return the launch label in a process's environment, if it has a whole one."""
    try:
        block = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    if names.ENV_REPLICA.encode() not in block:
        return None
    pairs = (entry.partition(b"=") for entry in block.split(b"\0"))
    values = {key.decode("utf-8", "replace"): value.decode("utf-8", "replace") for key, _, value in pairs}
    attempt = values.get(names.ENV_ATTEMPT, "")
    node_id, replica_id = values.get(names.ENV_NODE, ""), values.get(names.ENV_REPLICA, "")
    if not (node_id and replica_id and attempt.isdigit()):
        return None
    return LaunchLabel(node_id, replica_id, int(attempt))


def is_alive(process: ProcessId) -> bool:
    """True while exactly this process runs."""
    stat = read_stat(process.pid)
    return stat is not None and stat.id == process


def all_stats() -> Iterator[ProcessStat]:
    """Every living process of the machine."""
    with os.scandir("/proc") as entries:
        pids = [int(entry.name) for entry in entries if entry.name.isdigit()]
    for pid in pids:
        stat = read_stat(pid)
        if stat is not None:
            yield stat


def labelled(node_id: str) -> dict[ProcessId, LaunchLabel]:
    """Every living process that carries this node's launch label."""
    found = {}
    for stat in all_stats():
        label = read_label(stat.id.pid)
        if label is not None and label.node_id == node_id:
            found[stat.id] = label
    return found


def members(leader: ProcessId | None, label: LaunchLabel) -> tuple[ProcessId, ...]:
    """Every living process of one attempt: of its session, or carrying its label. Leader first.

    An engine may overwrite its environment block (setproctitle does), another may leave the
    session: each of the two signs finds what the other one misses.
    """
    session = leader.pid if leader is not None and _owns_session(leader) else None
    found = (stat.id for stat in all_stats() if stat.session == session or read_label(stat.id.pid) == label)
    return tuple(sorted(found, key=lambda process: (process != leader, process.pid)))


def _owns_session(leader: ProcessId) -> bool:
    """False if the leader's pid has been given to another process, and with it the session id."""
    stat = read_stat(leader.pid)
    return stat is None or stat.id == leader


def send(process: ProcessId, number: signal.Signals) -> None:
    """Send a signal to exactly this process; one that is gone already is no error."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        # The handle pins the process: checked now, it cannot become another one before the signal.
        if is_alive(process):
            signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)


def kill_group(leader: ProcessId | None, processes: Iterable[ProcessId]) -> None:
    """SIGKILL all but the shim, which then records the exit and ends; alone, the shim as well."""
    processes = tuple(processes)
    rest = tuple(process for process in processes if process != leader)
    for process in rest or processes:
        send(process, signal.SIGKILL)


def is_answered(host: str, port: int) -> bool:
    """True if somebody accepts connections on the port; nothing is sent to whoever does."""
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_SECONDS):
            return True
    except OSError:
        return False


def read_engine_pid(runtime_dir: Path) -> int | None:
    """Pid of the engine's main process, as its shim wrote it down."""
    try:
        return int((runtime_dir / "engine.pid").read_text())
    except (OSError, ValueError):
        return None


def listens(processes: Iterable[ProcessId], port: int) -> bool:
    """True if one of these processes has the TCP port open for connections.

    A port that answers is no proof: somebody else's server may sit on it.
    """
    return any(_listens(process.pid, port) for process in processes)


def _listens(pid: int, port: int) -> bool:
    try:
        connections = psutil.Process(pid).net_connections(kind="tcp")
    except psutil.Error:
        return False  # gone, or a helper of another user: not the one that serves
    return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)
