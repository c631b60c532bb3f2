"""The node's own load: CPU, memory, disk, network."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from workers.probes.limits import Limits, read_limits, usable_memory_bytes
from workers.protocol.observed import HostTelemetry, InterfaceRate

_NICS = Path("/sys/class/net")
_PRESSURE = Path("/proc/pressure")
_MOST_INTERFACES = 16
_SOME = re.compile(r"^some avg10=([0-9]+(?:\.[0-9]+)?) ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class NicCounters:
    """Bytes of one interface since it came up."""

    received: int
    sent: int


@dataclass(frozen=True, slots=True)
class DiskCounters:
    """Bytes of all disks together since the start."""

    read: int
    written: int


class HostProbe:
    """Reads the host. Rates and CPU use are since the call before, so the first has none."""

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
        *,
        read_nics: Callable[[], Mapping[str, NicCounters]] | None = None,
        read_disks: Callable[[], DiskCounters | None] | None = None,
        limits: Callable[[], Limits] = read_limits,
        pressure: Path = _PRESSURE,
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._read_nics = read_nics or read_nic_counters
        self._read_disks = read_disks or read_disk_counters
        self._limits = limits
        self._pressure = pressure
        self._before: tuple[float, Mapping[str, NicCounters], DiskCounters | None] | None = None
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
        interfaces, disks = self._rates()
        return HostTelemetry(
            cpu_used_ratio=psutil.cpu_percent(interval=None) / 100,
            memory_used_bytes=used,
            memory_total_bytes=total,
            disk_free_bytes=_disk_free(self._folder),
            load1=_load1(),
            network_receive_bytes_per_second=_total(
                rate.receive_bytes_per_second for rate in interfaces.values()
            ),
            network_send_bytes_per_second=_total(rate.send_bytes_per_second for rate in interfaces.values()),
            interfaces=_busiest(interfaces),
            disk_read_bytes_per_second=None if disks is None else disks[0],
            disk_write_bytes_per_second=None if disks is None else disks[1],
            cpu_stalled_ratio=read_pressure(self._pressure / "cpu"),
            memory_stalled_ratio=read_pressure(self._pressure / "memory"),
            io_stalled_ratio=read_pressure(self._pressure / "io"),
        )

    def _rates(self) -> tuple[dict[str, InterfaceRate], tuple[float, float] | None]:
        before, self._before = self._before, (self._clock(), self._read_nics(), self._read_disks())
        now, nics, disks = self._before
        if before is None or now <= before[0]:
            return {}, None
        seconds = now - before[0]
        return _interface_rates(before[1], nics, seconds), _disk_rates(before[2], disks, seconds)


def _busiest(interfaces: Mapping[str, InterfaceRate]) -> dict[str, InterfaceRate]:
    """A host may have hundreds, one for each virtual function: those with most traffic are told."""
    ranked = sorted(
        interfaces.items(),
        key=lambda pair: (-pair[1].receive_bytes_per_second - pair[1].send_bytes_per_second, pair[0]),
    )
    return dict(ranked[:_MOST_INTERFACES])


def _total(rates: Iterable[float]) -> float | None:
    known = list(rates)
    return sum(known) if known else None


def _interface_rates(
    before: Mapping[str, NicCounters], after: Mapping[str, NicCounters], seconds: float
) -> dict[str, InterfaceRate]:
    """Of the interfaces that were there both times and were not reset in between."""
    return {
        name: InterfaceRate(
            receive_bytes_per_second=(now.received - before[name].received) / seconds,
            send_bytes_per_second=(now.sent - before[name].sent) / seconds,
        )
        for name, now in after.items()
        if name in before and now.received >= before[name].received and now.sent >= before[name].sent
    }


def _disk_rates(
    before: DiskCounters | None, after: DiskCounters | None, seconds: float
) -> tuple[float, float] | None:
    if before is None or after is None or after.read < before.read or after.written < before.written:
        return None
    return (after.read - before.read) / seconds, (after.written - before.written) / seconds


def read_disk_counters() -> DiskCounters | None:
    """All disks that the kernel counts, partitions once; `None` where it shows none."""
    found = psutil.disk_io_counters(nowrap=True)
    return None if found is None else DiskCounters(found.read_bytes, found.write_bytes)


def read_pressure(path: Path) -> float | None:
    """Share of the last ten seconds in which some task stood still for want of a resource.

    `None` where the kernel keeps no such figures, or keeps them from this process.
    """
    try:
        found = _SOME.search(path.read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError):
        return None
    return None if found is None else min(float(found[1]) / 100, 1.0)


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
