"""Choosing ports for a replica: leased in the journal, and free on this machine right now."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Collection, Iterator, Sequence
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
    counts: Sequence[int], *, ports: PortRange, seed: str, leased: Collection[int], host: str
) -> tuple[int, ...]:
    """Pick ports that nobody has: for each count so many in a row. Raises `NoPortError` when none are left.

    Somebody may still take one before the engine binds it; that attempt then ends with
    "address already in use" and the next one gets other ports.
    """
    chosen: list[int] = []
    walk = ports.walk(seed)
    for count in counts:
        row: list[int] = []
        while len(row) < count:
            port = next(walk, None)
            if port is None:
                raise NoPortError(f"no {sum(counts)} free ports in {ports.first}-{ports.last}")
            if port in leased or not is_free(host, port):
                row = []
            elif row and port != row[-1] + 1:
                row = [port]  # the walk began again at the range's first port
            else:
                row.append(port)
        chosen += row
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
