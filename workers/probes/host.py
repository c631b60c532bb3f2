"""The node's own load: CPU, memory, disk, network."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from workers.protocol.v1 import HostTelemetry


class HostProbe:
    """Reads the host. Rates and CPU use are since the call before, so the first has none."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._network: tuple[float, int, int] | None = None
        psutil.cpu_percent(interval=None)  # begins its own interval

    def read(self) -> HostTelemetry:
        """Read everything; what this host does not tell is `None`."""
        memory = psutil.virtual_memory()
        received, sent = self._network_rates()
        return HostTelemetry(
            cpu_used_ratio=psutil.cpu_percent(interval=None) / 100,
            memory_used_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
            disk_free_bytes=_disk_free(self._folder),
            load1=_load1(),
            network_receive_bytes_per_second=received,
            network_send_bytes_per_second=sent,
        )

    def _network_rates(self) -> tuple[float | None, float | None]:
        # The stubs promise a value; a container without any interface gets None.
        counters: object = psutil.net_io_counters()
        received = getattr(counters, "bytes_recv", None)
        sent = getattr(counters, "bytes_sent", None)
        if received is None or sent is None:
            self._network = None
            return None, None
        before, self._network = self._network, (self._clock(), received, sent)
        if before is None:
            return None, None
        seconds = self._network[0] - before[0]
        if seconds <= 0 or received < before[1] or sent < before[2]:
            return None, None  # an interface went away, and its counters with it
        return (received - before[1]) / seconds, (sent - before[2]) / seconds


def _disk_free(folder: Path) -> int | None:
    try:
        return psutil.disk_usage(str(folder)).free
    except OSError:
        return None


def _load1() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None
