"""What a node's accelerators and adapters carry just now: parts of a heartbeat. Since 1.7."""

from __future__ import annotations

from workers.protocol.part import Part


class AcceleratorLoad(Part, frozen=True, kw_only=True, array_like=True):
    """One card's load. `None`: nobody told; it is never 0 in place of unknown.

    On the wire a list without names, since eight of them go out each second: fields are only ever appended.
    """

    uuid: str
    ordinal: int = 0
    """The vendor tool's index. For people, as `AcceleratorInfo.ordinal`."""
    sources: tuple[str, ...] = ()
    """Who told, in order of precedence: `dcgm`, `nvml`, or the name of a vendor's tool."""
    age_seconds: float = 0.0
    """Of the oldest of what is told, when the heartbeat was made."""
    used_ratio: float | None = None
    """Share of the time in which anything ran on it; says nothing of how much of it was busy."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    pcie_receive_bytes_per_second: float | None = None
    """Into the card."""
    pcie_send_bytes_per_second: float | None = None
    pcie_link_bytes_per_second: float | None = None
    """What the lanes that it has carry each way, at the generation that card and slot can do."""
    pcie_replays: int | None = None
    """Packets sent anew since the driver was loaded; a few are normal, a growing number is not."""
    nvlinks: int | None = None
    """0: the card has none."""
    nvlinks_up: int | None = None
    nvlink_receive_bytes_per_second: float | None = None
    """Over all links, as the other two."""
    nvlink_send_bytes_per_second: float | None = None
    nvlink_both_bytes_per_second: float | None = None
    """Both directions together, from sources that do not tell them apart."""
    nvlink_link_bytes_per_second: float | None = None
    """What all links that are up carry each way."""
    nvlink_errors: int | None = None
    """Since the driver was loaded: flits that failed their check, replays, recoveries."""
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None
    held_back_by: tuple[str, ...] | None = None
    """Why its clocks are lower than they could be under load: `power cap`, `heat`; empty: nothing does."""
    ecc_uncorrected: int | None = None
    """Since the driver was loaded."""
    last_xid: int | None = None
    """Number of the driver's last error on this card; 0: none was seen."""
    notes: tuple[str, ...] = ()
    """What could not be read because something is wrong, such as `power: GPU is lost`."""


class RdmaRate(Part, frozen=True, kw_only=True):
    """What goes through one port of an RDMA adapter, past the host's network stack."""

    receive_bytes_per_second: float
    send_bytes_per_second: float
    link_bytes_per_second: float | None = None
    """What the port carries each way."""
