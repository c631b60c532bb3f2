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
from workers.probes.network import (
    NicCounters,
    busiest,
    interface_rates,
    rdma_rates,
    read_nic_counters,
    read_rdma_counters,
)
from workers.protocol.machine import RdmaRate
from workers.protocol.observed import HostTelemetry, InterfaceRate

_PRESSURE = Path("/proc/pressure")
_SOME = re.compile(r"^some avg10=([0-9]+(?:\.[0-9]+)?) ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class DiskCounters:
    """Bytes of all disks together since the start."""

    read: int
    written: int


@dataclass(frozen=True, slots=True)
class _Counters:
    """All that rates are made of, at one moment."""

    at_seconds: float
    nics: Mapping[str, NicCounters]
    rdma: Mapping[str, NicCounters]
    disks: DiskCounters | None


@dataclass(frozen=True, slots=True)
class _Rates:
    """What went through since the look before."""

    interfaces: Mapping[str, InterfaceRate]
    rdma: dict[str, RdmaRate]
    disks: tuple[float, float] | None


class HostProbe:
    """Reads the host. Rates and CPU use are since the call before, so the first has none."""

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
        *,
        read_nics: Callable[[], Mapping[str, NicCounters]] | None = None,
        read_rdma: Callable[[], Mapping[str, NicCounters]] | None = None,
        read_disks: Callable[[], DiskCounters | None] | None = None,
        limits: Callable[[], Limits] = read_limits,
        pressure: Path = _PRESSURE,
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._read_nics = read_nics or read_nic_counters
        self._read_rdma = read_rdma or read_rdma_counters
        self._read_disks = read_disks or read_disk_counters
        self._limits = limits
        self._pressure = pressure
        self._before: _Counters | None = None
        psutil.cpu_percent(interval=None, percpu=True)  # begins its own interval

    def read(self) -> HostTelemetry:
        """Read everything; what this host does not tell is `None`."""
        memory = psutil.virtual_memory()
        limits = self._limits()
        total, used = memory.total, memory.total - memory.available
        if limits.memory_bytes is not None and limits.memory_bytes < total:
            # The container's wall is nearer than the machine's: what counts is what is left before it.
            total = usable_memory_bytes(limits)
            used = min(total, used) if limits.memory_used_bytes is None else limits.memory_used_bytes
        rates = self._rates()
        interfaces, disks = rates.interfaces, rates.disks
        cores = psutil.cpu_percent(interval=None, percpu=True)
        return HostTelemetry(
            cpu_used_ratio=sum(cores) / len(cores) / 100 if cores else None,
            cpu_busiest_ratio=max(cores) / 100 if cores else None,
            memory_used_bytes=used,
            memory_total_bytes=total,
            disk_free_bytes=_disk_free(self._folder),
            load1=_load1(),
            network_receive_bytes_per_second=_total(
                rate.receive_bytes_per_second for rate in interfaces.values()
            ),
            network_send_bytes_per_second=_total(rate.send_bytes_per_second for rate in interfaces.values()),
            interfaces=busiest(interfaces),
            rdma=rates.rdma,
            disk_read_bytes_per_second=None if disks is None else disks[0],
            disk_write_bytes_per_second=None if disks is None else disks[1],
            cpu_stalled_ratio=read_pressure(self._pressure / "cpu"),
            memory_stalled_ratio=read_pressure(self._pressure / "memory"),
            io_stalled_ratio=read_pressure(self._pressure / "io"),
        )

    def _rates(self) -> _Rates:
        before = self._before
        self._before = after = _Counters(
            self._clock(), self._read_nics(), self._read_rdma(), self._read_disks()
        )
        if before is None or after.at_seconds <= before.at_seconds:
            return _Rates({}, {}, None)
        seconds = after.at_seconds - before.at_seconds
        return _Rates(
            interface_rates(before.nics, after.nics, seconds),
            rdma_rates(before.rdma, after.rdma, seconds),
            _disk_rates(before.disks, after.disks, seconds),
        )


def _total(rates: Iterable[float]) -> float | None:
    known = list(rates)
    return sum(known) if known else None


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
