"""The node's own load: CPU, memory, disk, network."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from workers.probes.limits import Limits, read_limits, usable_memory_bytes
from workers.protocol.observed import HostTelemetry

_NICS = Path("/sys/class/net")


@dataclass(frozen=True, slots=True)
class NicCounters:
    """Bytes of one interface since it came up."""

    received: int
    sent: int


class HostProbe:
    """Reads the host. Rates and CPU use are since the call before, so the first has none."""

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
        *,
        read_nics: Callable[[], Mapping[str, NicCounters]] | None = None,
        limits: Callable[[], Limits] = read_limits,
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._read_nics = read_nics or read_nic_counters
        self._limits = limits
        self._network: tuple[float, Mapping[str, NicCounters]] | None = None
        psutil.cpu_percent(interval=None)  # begins its own interval

    def read(self) -> HostTelemetry:
        """Read everything; what this host does not tell is `None`."""
        memory = psutil.virtual_memory()
        limits = self._limits()
        total, used = memory.total, memory.total - memory.available
        if limits.memory_bytes is not None and limits.memory_bytes < total:
            # The container's wall is nearer than the machine's: what counts is what is left before it.
            total = usable_memory_bytes(limits)
            used = min(total, used) if limits.memory_used_bytes is None else limits.memory_used_bytes
        received, sent = self._network_rates()
        return HostTelemetry(
            cpu_used_ratio=psutil.cpu_percent(interval=None) / 100,
            memory_used_bytes=used,
            memory_total_bytes=total,
            disk_free_bytes=_disk_free(self._folder),
            load1=_load1(),
            network_receive_bytes_per_second=received,
            network_send_bytes_per_second=sent,
        )

    def _network_rates(self) -> tuple[float | None, float | None]:
        before, self._network = self._network, (self._clock(), self._read_nics())
        now, counters = self._network
        if before is None or now <= before[0]:
            return None, None
        return _rates(before[1], counters, now - before[0])


def _rates(
    before: Mapping[str, NicCounters], after: Mapping[str, NicCounters], seconds: float
) -> tuple[float | None, float | None]:
    """Sum over the interfaces that were there both times and were not reset in between."""
    both = [
        (before[name], now)
        for name, now in after.items()
        if name in before and now.received >= before[name].received and now.sent >= before[name].sent
    ]
    if not both:
        return None, None
    received = sum(now.received - then.received for then, now in both)
    sent = sum(now.sent - then.sent for then, now in both)
    return received / seconds, sent / seconds


def read_nic_counters() -> dict[str, NicCounters]:
    """Interfaces that lead off this host; in a container, which sees no hardware, all but loopback.

    Bridges and virtual pairs would count the same bytes once more.
    """
    # The stubs promise counters; a container without any interface gets None.
    found: Mapping[str, object] = psutil.net_io_counters(pernic=True) or {}
    counters = {
        name: NicCounters(getattr(value, "bytes_recv", 0), getattr(value, "bytes_sent", 0))
        for name, value in found.items()
        if name != "lo"
    }
    hardware = {name: value for name, value in counters.items() if (_NICS / name / "device").exists()}
    return hardware or counters


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
