"""What goes through network interfaces and RDMA ports, and what they could carry."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from workers.protocol.machine import RdmaRate
from workers.protocol.observed import InterfaceRate

NICS = Path("/sys/class/net")
RDMA_ADAPTERS = Path("/sys/class/infiniband")
MOST_PORTS = 16
"""A host may have hundreds, one for each virtual function: those with most traffic are told."""
_RDMA_WORD_BYTES = 4
"""The data counters of a port count words of the fabric, not bytes."""
_MEGABIT_BYTES = 125_000
_GIGABIT_BYTES = 125_000_000
_RATE = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,3})?) Gb/sec\b")


@dataclass(frozen=True, slots=True)
class NicCounters:
    """Bytes of one interface since it came up, or of one RDMA port."""

    received: int
    sent: int
    link_bytes_per_second: float | None = None


def read_nic_counters(nics: Path = NICS) -> dict[str, NicCounters]:
    """Interfaces that lead off this host; in a container, which sees no hardware, all but loopback.

    Bridges and virtual pairs would count the same bytes once more.
    """
    # The stubs promise counters; a container without any interface gets None.
    found: Mapping[str, object] = psutil.net_io_counters(pernic=True) or {}
    counters = {
        name: (getattr(value, "bytes_recv", 0), getattr(value, "bytes_sent", 0))
        for name, value in found.items()
        if name != "lo"
    }
    hardware = {name for name in counters if (nics / name / "device").exists()}
    return {
        name: NicCounters(*bytes_moved, read_link_speed(nics / name) if name in hardware else None)
        for name, bytes_moved in counters.items()
        if name in hardware or not hardware
    }


def read_link_speed(nic: Path) -> float | None:
    """Bytes a second each way, of the link as negotiated; `None` where it is down or that is not told."""
    megabits = _whole(nic / "speed")
    return megabits * _MEGABIT_BYTES if megabits is not None and megabits > 0 else None


def read_rdma_counters(adapters: Path = RDMA_ADAPTERS) -> dict[str, NicCounters]:
    """Active ports of all RDMA adapters, by names such as `mlx5_0/1`; none where there is no adapter."""
    found = {}
    for port in sorted(adapters.glob("*/ports/*")):
        received, sent = (_whole(port / "counters" / f"port_{way}_data") for way in ("rcv", "xmit"))
        if received is None or sent is None or "ACTIVE" not in _text(port / "state"):
            continue
        found[f"{port.parent.parent.name}/{port.name}"] = NicCounters(
            received * _RDMA_WORD_BYTES, sent * _RDMA_WORD_BYTES, parse_port_rate(_text(port / "rate"))
        )
    return found


def parse_port_rate(text: str) -> float | None:
    """Bytes a second of `200 Gb/sec (4X HDR)`; `None` for anything else, and for a port that is down."""
    found = _RATE.match(text.strip())
    return float(found[1]) * _GIGABIT_BYTES or None if found else None


def interface_rates(
    before: Mapping[str, NicCounters], after: Mapping[str, NicCounters], seconds: float
) -> dict[str, InterfaceRate]:
    """Of the interfaces that were there both times and were not reset in between."""
    return {
        name: InterfaceRate(
            receive_bytes_per_second=(now.received - before[name].received) / seconds,
            send_bytes_per_second=(now.sent - before[name].sent) / seconds,
            link_bytes_per_second=now.link_bytes_per_second,
        )
        for name, now in _comparable(before, after)
    }


def rdma_rates(
    before: Mapping[str, NicCounters], after: Mapping[str, NicCounters], seconds: float
) -> dict[str, RdmaRate]:
    """The same of RDMA ports, those with most traffic first and at most `MOST_PORTS`."""
    rates = {
        name: RdmaRate(
            receive_bytes_per_second=(now.received - before[name].received) / seconds,
            send_bytes_per_second=(now.sent - before[name].sent) / seconds,
            link_bytes_per_second=now.link_bytes_per_second,
        )
        for name, now in _comparable(before, after)
    }
    return dict(sorted(rates.items(), key=_by_traffic)[:MOST_PORTS])


def busiest(interfaces: Mapping[str, InterfaceRate]) -> dict[str, InterfaceRate]:
    """Those with most traffic, at most `MOST_PORTS`."""
    return dict(sorted(interfaces.items(), key=_by_traffic)[:MOST_PORTS])


def _by_traffic(pair: tuple[str, InterfaceRate | RdmaRate]) -> tuple[float, str]:
    name, rate = pair
    return -rate.receive_bytes_per_second - rate.send_bytes_per_second, name


def _comparable(
    before: Mapping[str, NicCounters], after: Mapping[str, NicCounters]
) -> Iterable[tuple[str, NicCounters]]:
    """Those that only grew: a counter that fell was reset, or had no more digits."""
    for name, now in after.items():
        known = before.get(name)
        if known is not None and now.received >= known.received and now.sent >= known.sent:
            yield name, now


def _whole(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if re.fullmatch("-?[0-9]{1,20}", text) else None


def _text(path: Path) -> str:
    """Such a file fails to be read where its link is down."""
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
