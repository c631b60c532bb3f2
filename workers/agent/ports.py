"""Choosing ports for a replica: leased in the journal, and free on this machine right now."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Collection, Iterator
from dataclasses import dataclass


class NoPortError(Exception):
    """The whole range is leased or taken."""


@dataclass(frozen=True, slots=True)
class PortRange:
    """Ports from `first` to `last`, both included."""

    first: int
    last: int

    def walk(self, seed: str) -> Iterator[int]:
        """Every port once, from a start that the seed decides.

        Two agents on one machine begin at different places, and so does each attempt, which keeps a
        port that was just lost from being tried again at once.
        """
        size = self.last - self.first + 1
        start = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest(), "big") % size
        for step in range(size):
            yield self.first + (start + step) % size


def choose_ports(
    count: int, *, ports: PortRange, seed: str, leased: Collection[int], host: str
) -> tuple[int, ...]:
    """Pick ports that nobody has. Raises `NoPortError` when the range is used up.

    Somebody may still take one before the engine binds it; that attempt then ends with
    "address already in use" and the next one gets other ports.
    """
    chosen: list[int] = []
    for port in ports.walk(seed):
        if len(chosen) == count:
            break
        if port not in leased and is_free(host, port):
            chosen.append(port)
    if len(chosen) < count:
        raise NoPortError(f"no {count} free ports in {ports.first}-{ports.last}")
    return tuple(chosen)


def is_free(host: str, port: int) -> bool:
    """True if the port can be bound on this host now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: a connection of a dead attempt in TIME_WAIT does not hold the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
