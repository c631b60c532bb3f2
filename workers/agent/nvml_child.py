"""The process that asks NVIDIA's management library, and what it said last."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

import workers
from workers.protocol.machine import AcceleratorLoad

SILENT_SECONDS = 30.0
"""Without a line for so long it hangs, and is ended."""
_PAUSE_SECONDS = 60.0
"""Between two starts: a node without the library must not spend its time on looking for it."""
_STOP_SECONDS = 1.0
_MOST_SAID_BYTES = 1000
_decoder = msgspec.json.Decoder(tuple[AcceleratorLoad, ...])

logger = logging.getLogger(__name__)


class NvmlChild:
    """Kept running by `check`. A child that does not even die is left alone until it is gone."""

    def __init__(self, interval_seconds: float, command: Sequence[str] = ()) -> None:
        """Have a reading each `interval_seconds`; `command` stands in for our own module."""
        self._command = [*(command or (sys.executable, "-m", "workers.probes.nvml")), str(interval_seconds)]
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = float("-inf")
        self._heard_at = float("-inf")
        self._loads: tuple[AcceleratorLoad, ...] = ()
        self._lock = threading.Lock()
        self._stopped = False
        self._killed: subprocess.Popen[bytes] | None = None

    def check(self) -> None:
        """Start it where it does not run; end it where it has long said nothing. Never waits for it."""
        now, process = time.monotonic(), self._process
        if process is not None and process.poll() is None:
            is_silent = now - max(self._heard_at, self._started_at) > SILENT_SECONDS
            if is_silent and process is not self._killed:
                # Once: what a driver holds in the kernel does not die of a second signal either.
                self._killed = process
                logger.warning("event=nvml_silent pid=%d", process.pid)
                process.kill()
        elif now - self._started_at > _PAUSE_SECONDS:
            with self._lock:
                if not self._stopped:
                    self._start(now)

    def read(self) -> tuple[tuple[AcceleratorLoad, ...], float]:
        """What it said last, and how many seconds ago."""
        return self._loads, time.monotonic() - self._heard_at

    def stop(self) -> None:
        """End it: it goes when its input does, and is not waited for where it hangs."""
        with self._lock:
            self._stopped = True
            process = self._process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()

    def _start(self, now: float) -> None:
        self._started_at = now
        try:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={
                    "PATH": os.environ.get("PATH", os.defpath),
                    "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""),
                    "PYTHONPATH": str(Path(workers.__file__ or "").resolve().parent.parent),
                },
                start_new_session=True,
            )
        except OSError as error:
            logger.warning("event=nvml_not_started error=%s", error)
            return
        self._process = process
        threading.Thread(target=self._listen, args=(process,), name="nvml", daemon=True).start()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        # In a thread of its own, so it may wait for a process that hangs; the pipes are closed after it.
        with process:
            for line in process.stdout or ():
                self._take(line)
            said = b"" if process.stderr is None else process.stderr.read(_MOST_SAID_BYTES)
        logger.info("event=nvml_ended said=%s", said.decode("utf-8", "replace").strip().rpartition("\n")[2])

    def _take(self, line: bytes) -> None:
        try:
            self._loads = _decoder.decode(line)
        except msgspec.DecodeError as error:
            logger.warning("event=nvml_line_left_out error=%s", error)
        else:
            self._heard_at = time.monotonic()
