"""A network of namespaces on this machine: one bridge, and a link to each node that is slow both ways."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

_SUBNET = "10.213.7"
_BURST = "128kb"
"""Room for two of the large packets that the kernel passes down whole."""
_LATENCY = "60ms"


def why_not() -> str:
    """Why no such network can be made here; empty where one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not shutil.which("ip") or not shutil.which("tc"):
        return "ip and tc (package iproute2) are needed"
    return ""


@dataclass(frozen=True, slots=True)
class Place:
    """One namespace with its address."""

    namespace: str
    address: str

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command that runs another one in here."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def sent_bytes(self) -> int:
        """Bytes that left it, headers and all."""
        done = subprocess.run(
            self.command(["cat", "/sys/class/net/eth0/statistics/tx_bytes"]),
            check=True,
            capture_output=True,
            text=True,
        )
        return int(done.stdout)


class Lan:
    """Makes the namespaces, and takes them away whatever happens."""

    def __init__(self, places: int, megabits: float) -> None:
        self._prefix = f"exa{os.getpid()}"
        self._megabits = megabits
        self._hub = f"{self._prefix}-hub"
        self.places = [Place(f"{self._prefix}-{i}", f"{_SUBNET}.{i + 1}") for i in range(places)]

    def __enter__(self) -> Self:
        """Make it."""
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take it away."""
        self._remove()

    def limit(self, place: Place, megabits: float) -> None:
        """Change the rate of one link, both ways."""
        _run("ip", "netns", "exec", place.namespace, "tc", *_shape("replace", "eth0", megabits))
        port = f"p{self.places.index(place)}"
        _run("ip", "netns", "exec", self._hub, "tc", *_shape("replace", port, megabits))

    def _make(self) -> None:
        _run("ip", "netns", "add", self._hub)
        _run("ip", "-n", self._hub, "link", "add", "name", "hub0", "type", "bridge")
        _run("ip", "-n", self._hub, "link", "set", "dev", "hub0", "up")
        for number, place in enumerate(self.places):
            port = f"p{number}"
            _run("ip", "netns", "add", place.namespace)
            ends = ("type", "veth", "peer", "name", "eth0", "netns", place.namespace)
            _run("ip", "-n", self._hub, "link", "add", "name", port, *ends)
            _run("ip", "-n", self._hub, "link", "set", "dev", port, "master", "hub0", "up")
            _run("ip", "-n", place.namespace, "addr", "add", f"{place.address}/24", "dev", "eth0")
            _run("ip", "-n", place.namespace, "link", "set", "dev", "eth0", "up")
            _run("ip", "-n", place.namespace, "link", "set", "dev", "lo", "up")
            self.limit(place, self._megabits)

    def _remove(self) -> None:
        for namespace in (*(place.namespace for place in self.places), self._hub):
            command = ["ip", "netns", "del", namespace]
            subprocess.run(command, check=False, capture_output=True)


def _shape(verb: str, device: str, megabits: float) -> list[str]:
    rate = f"{megabits:g}mbit"
    return ["qdisc", verb, "dev", device, "root", "tbf", "rate", rate, "burst", _BURST, "latency", _LATENCY]


def _run(*arguments: str) -> None:
    done = subprocess.run(arguments, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip()}")


def cpu_seconds(pids: Sequence[int]) -> float:
    """CPU that these processes have used so far; ended ones count nothing."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def wait_until(done: float) -> None:
    """Sleep until a time of the monotonic clock."""
    time.sleep(max(0.0, done - time.monotonic()))
