"""The agent's care for holders: one process for each CUDA device whose memory replicas share.

A holder outlives the agent, as replicas do, and is found again by its socket. Its death takes nothing away
from a replica; a new one is started so that more can be lent, and so that the next replica finds weights.
"""

from __future__ import annotations

import enum
import logging
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import workers
from workers.agent.processes import open_log
from workers.kv.holder import UNAVAILABLE_STATUS
from workers.kv.holder_link import HolderLink, socket_of

_LOOK_SECONDS = 5.0
_ANSWER_SECONDS = 0.5
_START_SECONDS = 20.0
"""To load the driver and make a context; a holder that takes longer is ended."""
_RETRY_SECONDS = 60.0
_RETRY_UNAVAILABLE_SECONDS = 1800.0
"""A device that cannot share will not learn it before the driver is updated."""
_FALLBACK_PATH = "/usr/local/bin:/usr/bin:/bin"

logger = logging.getLogger(__name__)


class HolderStartingError(Exception):
    """A launch has to wait for the holder of its accelerator."""


class HolderState(enum.Enum):
    """What a launch is to do."""

    ANSWERS = "answers"
    STARTING = "starting"
    """Wait for it."""
    NONE = "none"
    """Go without."""


@dataclass(slots=True)
class _Holder:
    socket: Path
    environment: Mapping[str, str] | None = None
    """What shows it its device; `None`: no launch has said yet."""
    process: subprocess.Popen[bytes] | None = None
    """`None`: another agent started it, or nobody has."""
    pid: int = 0
    """Of the one that answered last."""
    started_at: float = float("-inf")
    looked_at: float = float("-inf")
    not_before: float = float("-inf")
    answers: bool = False
    went_without: bool = False
    """A replica was launched with memory of its own, and may run still."""


@dataclass(slots=True)
class DeviceHolders:
    """Holders by accelerator. For one thread; nothing is started before a launch asks for it."""

    folder: Path
    """Of the node's KV pools."""
    logs: Path
    memory: str = "cuda"
    """`host` has the same done without a device, for tests."""
    enabled: bool = True
    _holders: dict[str, _Holder] = field(default_factory=dict)

    def find(self, accelerator: str, environment: Mapping[str, str], *, now: float) -> HolderState:
        """Say whether a holder answers; starts one if need be. `environment` shows it its device alone."""
        if not self.enabled:
            return HolderState.NONE
        holder = self._holders.setdefault(accelerator, _Holder(socket_of(self.folder, accelerator)))
        holder.environment = environment
        state = self._keep(accelerator, holder, now)
        holder.went_without |= state is HolderState.NONE
        return state

    def socket(self, accelerator: str) -> Path:
        """Where the holder of an accelerator listens."""
        return socket_of(self.folder, accelerator)

    def tend(self, wanted: Collection[str], *, now: float) -> None:
        """Look after the holders that launches have asked for, and those of an earlier agent.

        `wanted` are the accelerators of replicas that are to be here; the others' holders end by themselves.
        """
        for accelerator in wanted:
            if self.enabled and accelerator not in self._holders and self.socket(accelerator).exists():
                self._holders[accelerator] = _Holder(self.socket(accelerator))
        for accelerator, holder in tuple(self._holders.items()):
            if accelerator in wanted:
                self._keep(accelerator, holder, now)
            elif holder.process is None or holder.process.poll() is not None:
                del self._holders[accelerator]
            else:
                holder.went_without = False

    def sharing(self) -> frozenset[str]:
        """Accelerators on which all replicas hold the same weights once, so that these can be counted so."""
        holders = tuple(self._holders.items())
        return frozenset(uuid for uuid, one in holders if one.answers and not one.went_without)

    def pids(self) -> set[int]:
        """Processes of holders: they are on the devices by right."""
        holders = tuple(self._holders.values())  # another thread may be adding one
        started = {holder.process.pid for holder in holders if holder.process}
        return started | {holder.pid for holder in holders if holder.pid}

    def _keep(self, accelerator: str, holder: _Holder, now: float) -> HolderState:
        """See to it that there is a holder, as far as its device is known."""
        self._look(accelerator, holder, now)
        if holder.answers:
            return HolderState.ANSWERS
        if holder.process is None and holder.environment is not None and now >= holder.not_before:
            self._start(accelerator, holder, holder.environment, now)
        return HolderState.NONE if holder.process is None else HolderState.STARTING

    def _look(self, accelerator: str, holder: _Holder, now: float) -> None:
        """See whether it answers, or has ended, or never came up."""
        if holder.answers and now - holder.looked_at < _LOOK_SECONDS:
            return
        holder.looked_at = now
        holder.pid = _pid_of(holder.socket)
        was_there, holder.answers = holder.answers, bool(holder.pid)
        if holder.answers:
            if not was_there:
                logger.info("the holder of %s answers, pid %d", accelerator, holder.pid)
            return
        process = holder.process
        if process is None:
            return
        status = process.poll()
        if status is None and now - holder.started_at > _START_SECONDS:
            logger.warning("the holder of %s does not answer and is ended", accelerator)
            process.kill()
            status = process.wait()
        if status is not None:
            self._note_end(accelerator, holder, status, now)

    def _note_end(self, accelerator: str, holder: _Holder, status: int, now: float) -> None:
        holder.process = None
        unavailable = status == UNAVAILABLE_STATUS
        if unavailable:
            reason = _last_line(self._log_of(accelerator))
            logger.warning("replicas on %s have memory of their own: %s", accelerator, reason)
        elif status:
            logger.warning("the holder of %s ended with status %d", accelerator, status)
        # One that has served for a while is started again at once.
        came_up = now - holder.started_at > _RETRY_SECONDS
        wait = _RETRY_UNAVAILABLE_SECONDS if unavailable else 0.0 if came_up or not status else _RETRY_SECONDS
        holder.not_before = now + wait

    def _start(self, accelerator: str, holder: _Holder, environment: Mapping[str, str], now: float) -> None:
        holder.started_at = now
        try:
            log = open_log(self._log_of(accelerator))
            try:
                holder.process = subprocess.Popen(  # noqa: S603 - our own module, no shell
                    [
                        *(sys.executable, "-P", "-m", "workers.kv.holder", f"--memory={self.memory}"),
                        *(f"--accelerator={accelerator}", f"--socket={holder.socket}"),
                        f"--pools={self.folder}",
                    ],
                    env={**_environment(), **environment},
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            finally:
                os.close(log)
        except OSError as error:
            logger.warning("no holder of %s: %s", accelerator, error)
            holder.not_before = now + _RETRY_SECONDS

    def _log_of(self, accelerator: str) -> Path:
        return self.logs / f"{socket_of(self.folder, accelerator).name}.log"


def _environment() -> dict[str, str]:
    """Only what it needs; nothing else of the agent's own reaches it."""
    return {
        "PATH": os.environ.get("PATH", _FALLBACK_PATH),
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(Path(workers.__file__ or "").resolve().parent.parent),
    }


def _pid_of(socket: Path) -> int:
    """Process that listens at a socket, or 0."""
    if not os.path.lexists(socket):
        return 0
    try:
        link = HolderLink(socket, greeting_seconds=_ANSWER_SECONDS)
    except OSError:
        return 0
    link.close()
    return link.hello.pid


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text("utf-8", "replace").splitlines()
    except OSError as error:
        return f"and its log cannot be read: {error}"
    return lines[-1] if lines else "without a reason"
