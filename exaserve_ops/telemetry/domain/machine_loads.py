"""What a node says of its machine: shapes that a decoded heartbeat already has, so that none is copied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class LinkRate(Protocol):
    """What goes through one interface or port, in bytes a second each way."""

    receive_bytes_per_second: float
    send_bytes_per_second: float
    link_bytes_per_second: float | None


class HostLoad(Protocol):
    """The machine itself. `None`: it was not told."""

    cpu_used_ratio: float | None
    cpu_busiest_ratio: float | None
    cpu_stalled_ratio: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    memory_stalled_ratio: float | None
    network_receive_bytes_per_second: float | None
    network_send_bytes_per_second: float | None
    disk_read_bytes_per_second: float | None
    disk_write_bytes_per_second: float | None
    io_stalled_ratio: float | None

    @property
    def interfaces(self) -> Mapping[str, LinkRate]:
        """By name."""
        ...

    @property
    def rdma(self) -> Mapping[str, LinkRate]:
        """By adapter and port."""
        ...


class CardLoad(Protocol):
    """One accelerator."""

    ordinal: int
    age_seconds: float
    used_ratio: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    pcie_receive_bytes_per_second: float | None
    pcie_send_bytes_per_second: float | None
    pcie_link_bytes_per_second: float | None
    nvlink_receive_bytes_per_second: float | None
    nvlink_send_bytes_per_second: float | None
    nvlink_both_bytes_per_second: float | None
    nvlink_link_bytes_per_second: float | None
    power_watts: float | None
    temperature_celsius: float | None
    held_back_by: tuple[str, ...] | None


def used_share(used: float | None, whole: float | None) -> float | None:
    """A ratio; `None` where either is unknown or there is nothing to use."""
    return used / whole if used is not None and whole else None


def pcie_use(card: CardLoad) -> float | None:
    """Of what the link carries one way, in the direction with more on it."""
    return used_share(
        _more(card.pcie_receive_bytes_per_second, card.pcie_send_bytes_per_second),
        card.pcie_link_bytes_per_second,
    )


def nvlink_use(card: CardLoad) -> float | None:
    """The same of all NVLinks that are up; at least that much where directions are not told apart."""
    busier = _more(card.nvlink_receive_bytes_per_second, card.nvlink_send_bytes_per_second)
    if busier is None and card.nvlink_both_bytes_per_second is not None:
        busier = card.nvlink_both_bytes_per_second / 2
    return used_share(busier, card.nvlink_link_bytes_per_second)


def nvlink_bytes_per_second(card: CardLoad) -> float | None:
    """Both directions together."""
    if card.nvlink_both_bytes_per_second is not None:
        return card.nvlink_both_bytes_per_second
    return _sum(card.nvlink_receive_bytes_per_second, card.nvlink_send_bytes_per_second)


def pcie_bytes_per_second(card: CardLoad) -> float | None:
    """Both directions together."""
    return _sum(card.pcie_receive_bytes_per_second, card.pcie_send_bytes_per_second)


def links_use(rates: Mapping[str, LinkRate]) -> float | None:
    """Of the fullest of several links, in the direction with more on it."""
    shares = (
        used_share(max(rate.receive_bytes_per_second, rate.send_bytes_per_second), rate.link_bytes_per_second)
        for rate in rates.values()
    )
    return max((share for share in shares if share is not None), default=None)


def received(rates: Mapping[str, LinkRate]) -> float | None:
    """Over all of several links; `None` of none."""
    return sum(rate.receive_bytes_per_second for rate in rates.values()) if rates else None


def sent(rates: Mapping[str, LinkRate]) -> float | None:
    """Over all of several links; `None` of none."""
    return sum(rate.send_bytes_per_second for rate in rates.values()) if rates else None


def _more(one: float | None, other: float | None) -> float | None:
    return max((value for value in (one, other) if value is not None), default=None)


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None and other is None else (one or 0.0) + (other or 0.0)
