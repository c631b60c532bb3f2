"""Who else sits on this node's accelerators: reported so that people can see it, never touched."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection

import psutil

from workers.agent.processes import read_label, read_stat
from workers.probes import accelerators
from workers.protocol.v1 import UnknownProcess

_INTERVAL_SECONDS = 10.0
_COMMAND_CHARACTERS = 120

logger = logging.getLogger(__name__)


class ForeignWatch:
    """Asks the vendor's tool now and then, in a thread of its own since the tool may hang."""

    def __init__(self, node_id: str, own_sessions: Callable[[], Collection[int]]) -> None:
        self._node_id = node_id
        self._own_sessions = own_sessions
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="foreign", daemon=True)
        self.found: tuple[UnknownProcess, ...] = ()

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def stop(self) -> None:
        """Stop; a tool that hangs is not waited for."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.found = self.look()
            except Exception:  # top of the loop: an odd tool must not end the watch
                logger.exception("looking for foreign accelerator processes failed")
            self._stopping.wait(_INTERVAL_SECONDS)

    def look(self) -> tuple[UnknownProcess, ...]:
        """Return the processes on accelerators that are no replica of this node."""
        sessions = self._own_sessions()
        return tuple(
            UnknownProcess(
                pid=process.pid,
                accelerator_uuid=process.accelerator_uuid,
                memory_bytes=process.memory_bytes,
                command=_command(process.pid),
            )
            for process in accelerators.processes()
            if not self._is_ours(process.pid, sessions)
        )

    def _is_ours(self, pid: int, sessions: Collection[int]) -> bool:
        stat, label = read_stat(pid), read_label(pid)
        labelled = label is not None and label.node_id == self._node_id
        return labelled or (stat is not None and stat.session in sessions)


def _command(pid: int) -> str:
    """Name of the program; not its arguments, which may hold somebody's secrets."""
    try:
        return psutil.Process(pid).name()[:_COMMAND_CHARACTERS]
    except psutil.Error:
        return ""
