"""Several gateway processes on one port: the kernel spreads connections over them (`SO_REUSEPORT`).

They share nothing but the port and Redis. The parent serves nobody: it starts them, starts one that ended
again, passes signals on, and goes when they have gone. Each process writes its figures to a file of a
common folder, so that any of them can tell those of all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

import msgspec

from exaserve_ops.gateway.counters import Family
from exaserve_ops.gateway.settings import PREFIX, GatewaySettings

START_AGAIN_SECONDS = 1.0
_FIGURES_SECONDS = 10.0
"""Figures of a process that has written none for so long are left out: it is gone."""
_KILL_AFTER_DRAIN_SECONDS = 10.0
_IN_USE = 1

_log = logging.getLogger("exaserve_ops.gateway")
_decoder = msgspec.msgpack.Decoder(list[Family])


async def run_all(settings: GatewaySettings) -> int:
    """Run as many processes as the settings say until told to stop. Returns the exit status."""
    if not _port_is_free(settings):
        _log.error("event=port_in_use host=%s port=%d", settings.host, settings.port)
        return _IN_USE
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory(prefix="exaops-gateway-") as folder:
        children = [_Child(index, settings, folder) for index in range(settings.processes)]
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGHUP, _pass_on, children, signal.SIGHUP)
        keepers = [loop.create_task(child.keep(stop)) for child in children]
        await stop.wait()
        _pass_on(children, signal.SIGTERM)
        _, late = await asyncio.wait(keepers, timeout=settings.drain_seconds + _KILL_AFTER_DRAIN_SECONDS)
        if late:
            _pass_on(children, signal.SIGKILL)
            await asyncio.wait(late)
    return 0


class _Child:
    """One process, started again whenever it ends."""

    def __init__(self, index: int, settings: GatewaySettings, folder: str) -> None:
        self._index = index
        self._environment = os.environ | {
            f"{PREFIX}HOST": settings.host,
            f"{PREFIX}PORT": str(settings.port),
            f"{PREFIX}PROCESSES": str(settings.processes),
            f"{PREFIX}PROCESS": str(index),
            f"{PREFIX}PARENT": str(os.getpid()),
            f"{PREFIX}FIGURES": folder,
        }
        self._process: asyncio.subprocess.Process | None = None

    async def keep(self, stop: asyncio.Event) -> None:
        """Have it run until everything stops."""
        while not stop.is_set():
            command = (sys.executable, "-m", "exaserve_ops.gateway")
            self._process = await asyncio.create_subprocess_exec(*command, env=self._environment)
            status = await self._process.wait()
            self._process = None
            if stop.is_set():
                return
            _log.error("event=process_ended process=%d status=%d", self._index, status)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(START_AGAIN_SECONDS):
                    await stop.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


def _pass_on(children: list[_Child], number: signal.Signals) -> None:
    for child in children:
        child.send(number)


def _port_is_free(settings: GatewaySettings) -> bool:
    """Whether nobody has the port: with `SO_REUSEPORT` a second gateway would share it silently."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError:
        return False
    return True


class SharedFigures:
    """The figures of the processes beside this one, each as old as its last write."""

    def __init__(self, folder: str, index: int) -> None:
        self._folder = Path(folder)
        self._own = self._folder / f"{index}.figures"

    def write(self, families: list[Family]) -> None:
        """Leave our figures for the others. Failing is no reason to stop."""
        scratch = self._own.with_suffix(".new")
        with contextlib.suppress(OSError):
            scratch.write_bytes(msgspec.msgpack.encode(families))
            scratch.replace(self._own)

    def others(self, wall_seconds: float) -> list[list[Family]]:
        """Read what the others left lately."""
        found: list[list[Family]] = []
        for path in sorted(self._folder.glob("*.figures")):
            try:
                if path != self._own and wall_seconds - path.stat().st_mtime < _FIGURES_SECONDS:
                    found.append(_decoder.decode(path.read_bytes()))
            except (OSError, msgspec.DecodeError):
                continue
        return found
