"""Which network interface has an address of this node, or leads to another one."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

import psutil

_ANY_PORT = 9
"""Of a datagram socket that never sends: only its route is asked for."""
_RDMA = Path("/sys/class/infiniband")


def find_interface(address: str, peer: str = "") -> str:
    """Name of the interface with this address (IP or host name), or else of the one that leads to `peer`.

    Empty where neither is found.
    """
    names = {
        told.address.partition("%")[0]: name
        for name, addresses in psutil.net_if_addrs().items()
        for told in addresses
        if told.family in (socket.AF_INET, socket.AF_INET6)
    }
    local = _resolve(address)
    if local and ipaddress.ip_address(local).is_loopback:
        # The whole of 127.0.0.0/8 is there, and only one address of it is listed.
        local = "::1" if ":" in local else "127.0.0.1"
    return names.get(local, "") or names.get(_source_towards(_resolve(peer)), "")


def rdma_adapters(wanted: tuple[str, ...], folder: Path = _RDMA) -> tuple[str, ...]:
    """Those of the named adapters that RDMA goes by here, each once, in their order."""
    return tuple(name for name in dict.fromkeys(wanted) if name and (folder / name).exists())


def _resolve(host: str) -> str:
    """IP address of a host; empty where there is none."""
    if not host:
        return ""
    try:
        (_, _, _, _, address), *_ = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    return str(address[0]).partition("%")[0]


def _source_towards(address: str) -> str:
    """Address of this node that its packets to another one carry."""
    if not address:
        return ""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _ANY_PORT))
        except OSError:
            return ""
        return str(probe.getsockname()[0])
