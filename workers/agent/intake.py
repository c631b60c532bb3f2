"""Command intake: the socket that commands arrive on, and the Celery child that brings them."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from workers.agent.home import Home
from workers.agent.intake_wire import (
    ENV_AGENT_PID,
    ENV_HOME,
    IntakeError,
    receive_command,
    short_address,
)

_PRIVATE_FILE = 0o600
_TREE = Path(__file__).resolve().parents[2]
_RESTART_PAUSE_SECONDS = 1.0
_LONGEST_RESTART_PAUSE_SECONDS = 30.0
"""A worker costs a second of processor time to start, and one that Redis refuses may end at once."""
_LONGEST_PATIENCE_SECONDS = 600.0
_STOP_SECONDS = 5.0

logger = logging.getLogger(__name__)


class IntakeServer:
    """Accepts commands from the child, one at a time, and remembers when the last one came."""

    def __init__(self, home: Home, take: Callable[[bytes], str]) -> None:
        self._home = home
        self._take = take
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="intake", daemon=True)
        self.last_taken_at: float | None = None

    def start(self) -> None:
        """Bind and listen."""
        self._home.intake_socket.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with short_address(self._home) as address:
            listener.bind(address)
        self._home.intake_socket.chmod(_PRIVATE_FILE)
        listener.listen(8)
        self._socket = listener
        self._thread.start()

    def stop(self) -> None:
        """Close the socket and wait for the command under way."""
        if self._socket is None:
            return
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread out of accept
        except OSError:
            logger.debug("intake socket was closed already")
        self._thread.join(_STOP_SECONDS)
        self._socket.close()
        self._home.intake_socket.unlink(missing_ok=True)

    @property
    def age_seconds(self) -> float | None:
        """Since the last command was taken in; `None` before the first."""
        taken = self.last_taken_at
        return None if taken is None else time.monotonic() - taken

    def _run(self) -> None:
        listener = self._socket
        while listener is not None:
            try:
                link, _address = listener.accept()
            except OSError:
                return  # stopped
            with link:
                self._serve(link)

    def _serve(self, link: socket.socket) -> None:
        try:
            answer = self._take(receive_command(link))
            self.last_taken_at = time.monotonic()
            link.sendall(answer.encode()[:4096])
        except (OSError, IntakeError) as error:
            logger.warning("intake connection failed: %s", error)
        except Exception:  # top of the intake loop: one command must not end the intake
            logger.exception("taking a command in failed")


class IntakeChild:
    """The Celery worker process: started, watched, and replaced when nothing comes through it."""

    def __init__(self, home: Home, server: IntakeServer, canary_seconds: float) -> None:
        self._home = home
        self._server = server
        self._canary_seconds = canary_seconds
        self._patience_seconds = canary_seconds
        self._pause_seconds = _RESTART_PAUSE_SECONDS
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """Pid of the running child."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the worker. Nothing secret is in its arguments or its environment."""
        log = os.open(
            self._home.logs / "intake.log",
            os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC,
            _PRIVATE_FILE,
        )
        arguments = [
            *("-m", "celery", "-A", "workers.agent.celery", "worker"),
            *("--pool", "solo", "--without-gossip", "--without-mingle", "--without-heartbeat"),
            *("--loglevel", "WARNING", "--hostname", "intake@localhost"),
        ]
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter, fixed arguments
                [sys.executable, *arguments],
                env={
                    "PATH": os.environ.get("PATH", os.defpath),
                    "LANG": "C.UTF-8",
                    "PYTHONPATH": str(_TREE),
                    ENV_HOME: str(self._home.root),
                    ENV_AGENT_PID: str(os.getpid()),
                },
                cwd=self._home.run,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(log)
        self._started_at = time.monotonic()

    def stop(self) -> None:
        """End the worker: at once, since a command under way comes again."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait(_STOP_SECONDS)
            self._process = None

    def check(self, *, redis_reached: bool) -> None:
        """Replace the worker if it has ended, or if nothing came for too long over a good Redis.

        The control plane sends the wish every few seconds, so silence means a consumer that hangs.
        The patience doubles with each restart that did not help: the control plane may be away.
        """
        process, now = self._process, time.monotonic()
        if process is None:
            return
        taken = self._server.last_taken_at
        if taken is not None and taken > self._started_at:
            self._patience_seconds = self._canary_seconds
            self._pause_seconds = _RESTART_PAUSE_SECONDS
        if process.poll() is not None:
            if now - self._started_at >= self._pause_seconds:
                self._pause_seconds = min(self._pause_seconds * 2, _LONGEST_RESTART_PAUSE_SECONDS)
                self._replace(f"ended with {process.returncode}")
            return
        silent_since = max(taken or 0.0, self._started_at)
        if redis_reached and now - silent_since > self._patience_seconds:
            self._patience_seconds = min(self._patience_seconds * 2, _LONGEST_PATIENCE_SECONDS)
            self._replace(f"took nothing in for {now - silent_since:.0f} s")

    def _replace(self, why: str) -> None:
        logger.warning("command intake %s; starting it again", why)
        self.stop()
        self.restarts += 1
        self.start()
