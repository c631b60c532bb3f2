"""The agent's side of template processes: one for each set of imports that launches share."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from workers.agent.processes import LaunchError, LaunchLabel, clean_environment, open_log, shown_label
from workers.agent.template_process import (
    LARGEST_MESSAGE_BYTES,
    ROOM_BYTES,
    ROOM_VARIABLE,
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

logger = logging.getLogger(__name__)


class Templates:
    """Template processes by what they have imported. Not safe for use by several threads at once."""

    def __init__(self, log_file: Path, *, enabled: bool = True) -> None:
        self._log_file = log_file
        self._enabled = enabled
        self._running: dict[tuple[str, ...], TemplateProcess] = {}
        self._not_before: dict[tuple[str, ...], float] = {}

    def find(self, launch: Launch, *, now: float) -> TemplateProcess | None:
        """Return the template to fork a launch off, started if need be; `None`: launch the program."""
        key = launch.preload
        if not (self._enabled and launch.module) or now < self._not_before.get(key, now):
            return None
        template = self._running.get(key)
        if template is None:
            template = self._begin(launch)
        elif template.has_failed(now=now):
            self.give_up(template, now=now)
            template = None
        return template

    def give_up(self, template: TemplateProcess, *, now: float) -> None:
        """Take a template that failed out of use; for a while launches go without."""
        logger.warning("template process of %s failed; launches go without it", ", ".join(template.preload))
        template.stop()
        self._running.pop(template.preload, None)
        self._not_before[template.preload] = now + _RETRY_SECONDS

    def rest(self, wanted: Iterable[str], *, now: float) -> None:
        """Stop the templates of engines that have not been wanted for a while."""
        engines = set(wanted)
        for key, template in tuple(self._running.items()):
            if template.engines & engines:
                template.last_wanted_at = now
            elif now - template.last_wanted_at > _IDLE_SECONDS:
                template.stop()
                del self._running[key]

    def stop(self) -> None:
        """End all of them; what they forked goes on."""
        for template in self._running.values():
            template.stop()
        self._running.clear()

    def _begin(self, launch: Launch) -> TemplateProcess | None:
        try:
            template = TemplateProcess(launch.preload, launch.env, self._log_file)
        except OSError as error:
            logger.warning("no template process: %s", error)
            self._not_before[launch.preload] = time.monotonic() + _RETRY_SECONDS
            return None
        self._running[launch.preload] = template
        return template


class TemplateProcess:
    """One process that has imported `preload`, or is about to."""

    def __init__(self, preload: tuple[str, ...], env: Mapping[str, str], log_file: Path) -> None:
        """Start it. Raises `OSError`."""
        self.preload = preload
        self.engines: set[str] = set()
        """Names of the engines that were launched from it."""
        self.last_wanted_at = self._started_at = time.monotonic()
        self._ready = False
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            log = open_log(log_file)
            try:
                self._process = subprocess.Popen(  # noqa: S603 - our own module, no shell
                    [
                        *(sys.executable, "-P", "-m", "workers.agent.template_process"),
                        *(str(theirs.fileno()), *preload, "-" * ROOM_BYTES),
                    ],
                    env=_template_environment(env),
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

    def is_ready(self) -> bool:
        """Whether its imports are done."""
        if not self._ready:
            self._channel.settimeout(0.0)
            try:
                self._ready = bool(self._channel.recv(LARGEST_MESSAGE_BYTES))
            except BlockingIOError:
                return False
            except OSError:
                return False  # it ended: `has_failed` says so
        return self._ready

    def has_failed(self, *, now: float) -> bool:
        """Whether it ended, or takes too long to import."""
        if self._process.poll() is not None:
            return True
        return not self.is_ready() and now - self._started_at > _READY_SECONDS

    def start_attempt(self, launch: Launch, label: LaunchLabel, *, runtime_dir: Path, log_file: Path) -> int:
        """Fork an attempt off; return the pid of its shim. Raises `LaunchError`."""
        try:
            runtime_dir.mkdir(mode=0o700, parents=True)
            log = open_log(log_file)
        except OSError as error:
            raise LaunchError(f"cannot start: {error.strerror} ({error.filename})") from error
        try:
            return self._ask(_request(launch, label, runtime_dir), log)
        except OSError as error:
            # The answer may still be under way: whatever it forks carries the label and is found by it.
            self.stop()
            raise LaunchError(f"the template process does not answer: {error}") from error
        finally:
            os.close(log)

    def _ask(self, request: ForkRequest, log: int) -> int:
        self._channel.settimeout(_ANSWER_SECONDS)
        socket.send_fds(self._channel, [msgspec.json.encode(request)], [log])
        message = self._channel.recv(LARGEST_MESSAGE_BYTES)
        if not message:
            raise ConnectionResetError("it ended")
        answer = msgspec.json.decode(message, type=ForkAnswer)
        if not answer.pid:
            raise LaunchError(f"cannot start: {answer.error}")
        return answer.pid

    def stop(self) -> None:
        """End it; what it forked goes on."""
        self._channel.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _template_environment(env: Mapping[str, str]) -> dict[str, str]:
    """What imports may see: the same for all replicas, and nothing of any one of them."""
    common = {name: env[name] for name in ("PATH", "LANG", "PYTHONUNBUFFERED", "PYTHONPATH") if name in env}
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
