"""The process manager of the all-in-one fleet: supervisord, its configuration, its control."""

from __future__ import annotations

import enum
import http.client
import shlex
import subprocess
import sys
import xmlrpc.client
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from supervisor.xmlrpc import Faults, SupervisorTransport

from exaserve_ops.adapters.fleet_files import FleetFiles, write_private

_ENDLESS_RETRIES = 1_000_000_000
_LOG_BYTES = 10 * 1024 * 1024
_LOG_BACKUPS = 3
_AT_ONCE = False
"""Supervisor's `wait` argument: ask, and do not wait for the outcome."""


class SupervisionError(Exception):
    """The process manager cannot be used; the message says why."""


class ProgramState(enum.Enum):
    """Supervisor's own states, by its own names."""

    STOPPED = "STOPPED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    BACKOFF = "BACKOFF"
    STOPPING = "STOPPING"
    EXITED = "EXITED"
    FATAL = "FATAL"
    UNKNOWN = "UNKNOWN"

    @property
    def is_down(self) -> bool:
        """No process, and none is about to be started; what has exited is about to be."""
        return self in {ProgramState.STOPPED, ProgramState.FATAL, ProgramState.UNKNOWN}


@dataclass(frozen=True, slots=True)
class Program:
    """One program of the fleet. It sees `environment` and nothing secret beyond it."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    stop_signal: str = "TERM"
    stop_seconds: int = 10
    """How long it may take to end before its process group is killed."""
    start_seconds: int = 1
    """It must stay up so long to count as started; ending sooner makes the next try wait."""
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class ProgramStatus:
    """What the process manager says of a program; `pid` is 0 if it has no process."""

    name: str
    state: ProgramState
    pid: int
    description: str


@dataclass(frozen=True, slots=True)
class ControlSocket:
    """Where supervisord listens for us, and the password that it asks for."""

    path: Path
    password: str


def control_socket(files: FleetFiles) -> ControlSocket:
    """Return the remote control of this fleet's process manager."""
    return ControlSocket(files.runtime / "supervisor.sock", files.secret("supervisor_password"))


def render_config(
    programs: Sequence[Program], files: FleetFiles, control: ControlSocket, *, as_root: bool
) -> str:
    """Return supervisord's configuration. Raises `SupervisionError` for values it cannot hold.

    Nothing starts by itself: the stages of the start are ours. What has started is restarted for
    ever, at once when it had been up, after a growing wait while it does not come up.
    """
    sections = [
        "[unix_http_server]",
        f"file = {_literal(control.path)}",
        "chmod = 0600",
        "username = exaops",
        f"password = {control.password}",
        "",
        "[supervisord]",
        f"logfile = {_literal(files.logs / 'supervisord.log')}",
        f"logfile_maxbytes = {_LOG_BYTES}",
        f"logfile_backups = {_LOG_BACKUPS}",
        f"pidfile = {_literal(files.var / 'supervisord.pid')}",
        "nodaemon = true",
        "silent = true",
        *(["user = root"] if as_root else []),
        "",
        "[rpcinterface:supervisor]",
        "supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface",
    ]
    for program in programs:
        sections += ["", *_program_section(program, files)]
    return "\n".join(sections) + "\n"


def start_supervisord(config: Path, environment: Mapping[str, str]) -> int:
    """Start the process manager in a session of its own, out of reach of the terminal's Ctrl-C.

    Returns its process number. It may outlive us, so whoever ends it finds it by its identity.
    """
    process = subprocess.Popen(  # noqa: S603 - our own interpreter and configuration
        [sys.executable, "-m", "supervisor.supervisord", "-c", str(config)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=dict(environment),
        start_new_session=True,
    )
    process.returncode = 0  # nobody waits by this object: see `processes.reap`
    return process.pid


def write_config(files: FleetFiles, text: str) -> Path:
    """Keep the configuration, which holds secrets, in a private file."""
    path = files.var / "supervisor.conf"
    write_private(path, text)
    return path


class Supervisor:
    """Remote control of a running supervisord. Every call returns at once."""

    def __init__(self, control: ControlSocket) -> None:
        self._control = control

    def is_answering(self) -> bool:
        """Whether there is a process manager to talk to."""
        try:
            self._call("getState")
        except SupervisionError:
            return False
        return True

    def statuses(self) -> dict[str, ProgramStatus]:
        """Return the status of every program, by name."""
        answer = self._call("getAllProcessInfo")
        if not isinstance(answer, list):
            raise SupervisionError(f"unexpected answer from supervisord: {answer!r}")
        found = (
            ProgramStatus(
                name=str(entry["name"]),
                state=ProgramState(entry["statename"]),
                pid=int(entry["pid"]),
                description=str(entry["spawnerr"] or entry["description"]),
            )
            for entry in answer
        )
        return {status.name: status for status in found}

    def start(self, name: str) -> None:
        """Ask for a program to be started; harmless if it runs."""
        self._call("startProcess", name, _AT_ONCE, tolerate=(Faults.ALREADY_STARTED,))

    def stop(self, name: str) -> None:
        """Ask for a program to be stopped; harmless if it does not run."""
        self._call("stopProcess", name, _AT_ONCE, tolerate=(Faults.NOT_RUNNING, Faults.BAD_NAME))

    def signal(self, name: str, signal_name: str) -> None:
        """Send a signal to a program's own process; harmless if it does not run."""
        self._call("signalProcess", name, signal_name, tolerate=(Faults.NOT_RUNNING,))

    def shut_down(self) -> None:
        """Ask the process manager to stop what still runs, and to end."""
        self._call("shutdown")

    def _call(self, method: str, *arguments: object, tolerate: tuple[int, ...] = ()) -> object:
        transport = SupervisorTransport("exaops", self._control.password, f"unix://{self._control.path}")
        try:
            with xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport) as proxy:
                return getattr(proxy.supervisor, method)(*arguments)
        except xmlrpc.client.Fault as fault:
            if fault.faultCode in tolerate:
                return None
            raise SupervisionError(f"{method}{arguments}: {fault.faultString}") from fault
        except (OSError, http.client.HTTPException, xmlrpc.client.ProtocolError) as error:
            raise SupervisionError(f"supervisord does not answer: {error}") from error
        finally:
            transport.close()


def _program_section(program: Program, files: FleetFiles) -> list[str]:
    environment = ",".join(
        f"{name}={_environment_value(name, value)}" for name, value in program.environment.items()
    )
    return [
        f"[program:{program.name}]",
        f"command = {_literal(shlex.join(program.command))}",
        f"environment = {environment}",
        f"directory = {_literal(program.folder or files.var)}",
        "autostart = false",
        "autorestart = true",
        f"startretries = {_ENDLESS_RETRIES}",
        f"startsecs = {program.start_seconds}",
        f"stopsignal = {program.stop_signal}",
        f"stopwaitsecs = {program.stop_seconds}",
        "killasgroup = true",
        "redirect_stderr = true",
        # Supervisor expands this one value twice, so it is made literal twice.
        f"stdout_logfile = {_literal(_literal(files.logs / program.name))}.log",
        f"stdout_logfile_maxbytes = {_LOG_BYTES}",
        f"stdout_logfile_backups = {_LOG_BACKUPS}",
    ]


def _literal(value: object) -> str:
    """Text as supervisord's configuration means it: `%` doubled, no comment sign, one line."""
    text = str(value)
    if any(sign in text for sign in ("\n", "\r", " ;", " #")):
        raise SupervisionError(f"supervisord cannot hold a line break, ' ;' or ' #': {text!r}")
    return text.replace("%", "%%")


def _environment_value(name: str, value: str) -> str:
    # Supervisor strips quotes off both ends and knows no escapes; the value may be a secret, so
    # only its name is told.
    if '"' in value or "'" in value or any(sign in value for sign in ("\n", "\r", " ;", " #")):
        raise SupervisionError(
            f"{name} holds a quote, a line break or a comment sign, which supervisord cannot pass."
            " In an address, write it percent-encoded (a double quote is %22)."
        )
    return '"' + value.replace("%", "%%") + '"'
