"""A machine of its own as far as the network goes: a namespace behind a virtual cable that can be cut.

Silent cuts are made by giving an address a hardware address that nobody has: frames leave, and no
answer ever says that they did not arrive. This needs neither a firewall nor a kernel module.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

IP = shutil.which("ip") or "/sbin/ip"
_NOBODY = "02:00:00:00:00:ff"
_numbers = itertools.count()


class NoNamespaceError(Exception):
    """None can be made here; the text says why."""


@dataclass
class Cable:
    """From this machine (`control` and `store`, two addresses of it) to another one (`node`)."""

    number: int = field(default_factory=lambda: (os.getpid() * 7 + next(_numbers)) % 8000)

    @property
    def name(self) -> str:
        return f"exacable-{self.number}"

    @property
    def control(self) -> str:
        """Where this machine's own connections come from."""
        return self._address(1)

    @property
    def store(self) -> str:
        """Where the store listens, and nothing else."""
        return self._address(2)

    @property
    def node(self) -> str:
        return self._address(3)

    @property
    def prefix(self) -> tuple[str, ...]:
        """What starts a program over there."""
        return (IP, "netns", "exec", self.name)

    def lay(self) -> None:
        """Raises `NoNamespaceError`."""
        if os.geteuid() != 0 or not Path(IP).exists():
            raise NoNamespaceError("network namespaces need root and iproute2")
        try:
            _ip("netns", "add", self.name)
            _ip("link", "add", self._here, "type", "veth", "peer", "name", self._there)
            _ip("link", "set", self._there, "netns", self.name)
            for address in (self.control, self.store):
                _ip("address", "add", f"{address}/29", "dev", self._here)
            _ip("link", "set", self._here, "up")
            self._over_there("address", "add", f"{self.node}/29", "dev", self._there)
            self._over_there("link", "set", "lo", "up")
            self._over_there("link", "set", self._there, "up")
        except subprocess.CalledProcessError as error:
            self.remove()
            raise NoNamespaceError(f"no network namespace here: {error.stderr.decode().strip()}") from error

    def remove(self) -> None:
        """Take everything down, whatever there is of it."""
        for leftover in (["link", "delete", self._here], ["netns", "delete", self.name]):
            subprocess.run([IP, *leftover], check=False, capture_output=True)

    def cut(self, how: str) -> None:
        """`cable`: both directions, with a sign of it; `store`: from there to the store alone, silently;
        `inward`: from here to there, silently, so that what is said over there is heard.
        """
        match how:
            case "cable":
                self._over_there("link", "set", self._there, "down")
            case "store":
                self._over_there(*self._nowhere(self.store, self._there))
            case "inward":
                _ip(*self._nowhere(self.node, self._here))
            case _:
                raise ValueError(how)

    def mend(self, how: str) -> None:
        """Undo a cut."""
        match how:
            case "cable":
                self._over_there("link", "set", self._there, "up")
            case "store":
                self._over_there("neighbour", "delete", self.store, "dev", self._there)
            case "inward":
                _ip("neighbour", "delete", self.node, "dev", self._here)

    @property
    def _here(self) -> str:
        return f"xc{self.number}a"

    @property
    def _there(self) -> str:
        return f"xc{self.number}b"

    def _address(self, host: int) -> str:
        """Of the range that is set aside for tests of networks: no real machine is there."""
        block = self.number * 8
        return f"198.19.{block // 256}.{block % 256 + host}"

    def _over_there(self, *arguments: str) -> None:
        _ip("-n", self.name, *arguments)

    @staticmethod
    def _nowhere(address: str, device: str) -> tuple[str, ...]:
        return ("neighbour", "replace", address, "lladdr", _NOBODY, "dev", device, "nud", "permanent")


@contextmanager
def cable() -> Iterator[Cable]:
    """One that is laid and removed. Raises `NoNamespaceError`."""
    laid = Cable()
    laid.lay()
    try:
        yield laid
    finally:
        laid.remove()


def _ip(*arguments: str) -> None:
    subprocess.run([IP, *arguments], check=True, capture_output=True)
