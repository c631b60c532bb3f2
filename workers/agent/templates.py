"""The agent's side of template processes: one for each set of imports that launches share, and model."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from workers.agent import processes
from workers.agent.processes import LaunchError, LaunchLabel, clean_environment, open_log, shown_label
from workers.agent.template_process import (
    LARGEST_MESSAGE_BYTES,
    ROOM_BYTES,
    ROOM_VARIABLE,
    BranchRequest,
    ForkAnswer,
    ForkRequest,
)
from workers.engines.base import Launch

_READY_SECONDS = 30.0
"""Imports that take longer are no gain; launches go without."""
_ANSWER_SECONDS = 5.0
_RETRY_SECONDS = 60.0
_IDLE_SECONDS = 600.0
_STOP_SECONDS = 2.0
_STOP_POLL_SECONDS = 0.01

_COMMON_ENVIRONMENT = (
    *("PATH", "LANG", "PYTHONUNBUFFERED", "PYTHONPATH"),
    # Read by libraries when they are loaded, which is before there is a replica.
    *("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"),
)
_Key = tuple[tuple[str, ...], ...]
"""What a template has imported, and for one of a model the call that it has made."""

logger = logging.getLogger(__name__)


class Templates:
    """Template processes by what they have imported and read. Not safe for use by several threads at once."""

    def __init__(self, log_file: Path, *, enabled: bool = True) -> None:
        self._log_file = log_file
        self._enabled = enabled
        self._running: dict[_Key, Template] = {}
        self._not_before: dict[_Key, float] = {}

    def find(self, launch: Launch, *, engine: str, model: str, now: float) -> Template | None:
        """Return the template to fork a launch off, started if need be; `None`: launch the program.

        It may not be ready yet. `engine` and `model` are what `rest` knows its users by.
        """
        if not (self._enabled and launch.module):
            return None
        trunk = self._find((launch.preload,), lambda: TrunkTemplate(launch, self._log_file), engine, now)
        if trunk is None or not launch.prepare or not trunk.is_ready:
            return trunk
        key = (launch.preload, launch.prepare)
        return self._find(key, lambda: BranchTemplate(trunk, launch.prepare), model, now) or trunk

    def _find(self, key: _Key, start: Callable[[], Template], user: str, now: float) -> Template | None:
        """Return a template that has not failed, started if need be, unless it failed a moment ago."""
        if now < self._not_before.get(key, now):
            return None
        template = self._running.get(key)
        if template is None:
            try:
                template = self._running[key] = start()
            except OSError as error:
                logger.warning("no template process: %s", error)
                self._not_before[key] = now + _RETRY_SECONDS
                return None
        elif template.has_failed(now=now):
            self._give_up(key, template, now)
            return None
        template.users.add(user)
        return template

    def _give_up(self, key: _Key, template: Template, now: float) -> None:
        """Take a template that failed out of use; for a while launches go without."""
        logger.warning("template process of %s failed; launches go without it", ", ".join(key[-1]))
        template.stop()
        self._running.pop(key)
        self._not_before[key] = now + _RETRY_SECONDS

    @property
    def pids(self) -> list[int]:
        """Processes that run, or are about to."""
        return [template.pid for template in self._running.values()]

    def rest(self, needed: Iterable[str], *, now: float) -> None:
        """Stop the templates whose engine or model has not been wanted for a while."""
        names = set(needed)
        for key, template in tuple(self._running.items()):
            if template.users & names:
                template.last_wanted_at = now
            elif now - template.last_wanted_at > _IDLE_SECONDS:
                template.stop()
                del self._running[key]

    def stop(self) -> None:
        """End all of them; what they forked goes on."""
        for template in self._running.values():
            template.stop()
        self._running.clear()


class Template(ABC):
    """One process to fork launches off, or one that is about to be."""

    def __init__(self, channel: socket.socket) -> None:
        self.users: set[str] = set()
        """Names of the engines, or digests of the models, that are launched from it."""
        self.last_wanted_at = self._started_at = time.monotonic()
        self._ready = False
        self._channel = channel

    @property
    @abstractmethod
    def pid(self) -> int:
        """Process id."""

    @property
    def is_ready(self) -> bool:
        """Whether it could fork when it was last looked at."""
        return self._ready

    def has_failed(self, *, now: float) -> bool:
        """Look at it: whether it ended, or takes too long to become ready."""
        if not self._is_alive():
            return True
        if not self._ready:
            self._channel.settimeout(0.0)
            # A channel that was closed says nothing either, and its process is about to have ended.
            with contextlib.suppress(OSError):
                self._ready = bool(self._channel.recv(LARGEST_MESSAGE_BYTES))
        return not self._ready and now - self._started_at > _READY_SECONDS

    def start_attempt(self, launch: Launch, label: LaunchLabel, *, runtime_dir: Path, log_file: Path) -> int:
        """Fork an attempt off; return the pid of its shim. Raises `LaunchError`."""
        try:
            runtime_dir.mkdir(mode=0o700, parents=True)
            log = open_log(log_file)
        except OSError as error:
            raise LaunchError(f"cannot start: {error.strerror} ({error.filename})") from error
        try:
            answer = self._ask(_request(launch, label, runtime_dir), log)
        except OSError as error:
            # The answer may still be under way: whatever it forks carries the label and is found by it.
            self.stop()
            raise LaunchError(f"the template process does not answer: {error}") from error
        finally:
            os.close(log)
        if not answer.pid:
            raise LaunchError(f"cannot start: {answer.error}")
        return answer.pid

    def start_branch(self, call: tuple[str, ...]) -> tuple[int, socket.socket]:
        """Fork a process off that makes a call; return its pid and our end of its channel.

        Raises `OSError`.
        """
        ours, theirs = _channel_pair()
        try:
            with theirs:
                return self._ask(BranchRequest(call), theirs.fileno()).pid, ours
        except OSError:
            ours.close()
            raise

    def _ask(self, request: ForkRequest | BranchRequest, descriptor: int) -> ForkAnswer:
        self._channel.settimeout(_ANSWER_SECONDS)
        socket.send_fds(self._channel, [msgspec.json.encode(request)], [descriptor])
        message = self._channel.recv(LARGEST_MESSAGE_BYTES)
        if not message:
            raise ConnectionResetError("it ended")
        return msgspec.json.decode(message, type=ForkAnswer)

    @abstractmethod
    def _is_alive(self) -> bool:
        """Whether the process runs."""

    @abstractmethod
    def stop(self) -> None:
        """End it; what it forked goes on."""


class TrunkTemplate(Template):
    """A process that has imported what an engine needs, started as a program."""

    def __init__(self, launch: Launch, log_file: Path) -> None:
        """Start it. Raises `OSError`."""
        ours, theirs = _channel_pair()
        super().__init__(ours)
        with theirs:
            log = open_log(log_file)
            try:
                self._process = subprocess.Popen(  # noqa: S603 - our own module, no shell
                    [
                        *(sys.executable, "-P", "-m", "workers.agent.template_process"),
                        *(str(theirs.fileno()), *launch.preload, "-" * ROOM_BYTES),
                    ],
                    env=_template_environment(launch.env),
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            finally:
                os.close(log)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def _is_alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """End it; what it forked goes on."""
        self._channel.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class BranchTemplate(Template):
    """A process forked off a template that has read, too, what all replicas of one model share."""

    def __init__(self, trunk: Template, call: tuple[str, ...]) -> None:
        """Start it. Raises `OSError`."""
        pid, channel = trunk.start_branch(call)
        super().__init__(channel)
        stat = processes.read_stat(pid)
        if stat is None:
            channel.close()
            raise ChildProcessError(f"the template process for {call[0]} ended at once")
        self._id = stat.id

    @property
    def pid(self) -> int:
        """Process id."""
        return self._id.pid

    def _is_alive(self) -> bool:
        return processes.is_alive(self._id)

    def stop(self) -> None:
        """End it; what it forked goes on."""
        self._channel.close()
        deadline = time.monotonic() + _STOP_SECONDS
        while self._is_alive() and time.monotonic() < deadline:
            time.sleep(_STOP_POLL_SECONDS)
        processes.send(self._id, signal.SIGKILL)


def _channel_pair() -> tuple[socket.socket, socket.socket]:
    """Our end and theirs."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _template_environment(env: Mapping[str, str]) -> dict[str, str]:
    """What imports may see: the same for all replicas, and nothing of any one of them."""
    common = {name: env[name] for name in _COMMON_ENVIRONMENT if name in env}
    # A pool of threads, even an idle one, would not survive the fork.
    return {**common, "OPENBLAS_NUM_THREADS": "1", ROOM_VARIABLE: "-" * ROOM_BYTES}


def _request(launch: Launch, label: LaunchLabel, runtime_dir: Path) -> ForkRequest:
    return ForkRequest(
        module=launch.module,
        arguments=launch.arguments,
        env=clean_environment(launch.env, label, runtime_dir),
        shown_env=shown_label(label),
        runtime_dir=str(runtime_dir),
    )
