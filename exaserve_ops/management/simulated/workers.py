"""The processes that simulate: each gets a private file and a share of the nodes."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from exaserve_ops.adapters.fleet_files import FleetFiles, FleetFilesError, is_port_free, write_private
from exaserve_ops.management.simulated.enrolment import FOLDER
from workers.simulation.config import SimulationConfig
from workers.simulation.faults import Fault, Place
from workers.simulation.hardware import CutCards
from workers.simulation.identity import PORTS_PER_SLOT, NodeIdentity

NODES_PER_PROCESS = 512
_PORTS = range(12_000, 20_000)
"""Below those of the all-in-one fleet's own services."""
_PORT_TRIES = 100
_POLL_SECONDS = 0.2
_STOP_SECONDS = 5.0
JOURNAL = f"{FOLDER}/faults.jsonl"
"""Faults that took effect, one a line."""
INBOX = f"{FOLDER}/inbox"
"""Faults to come, one word a line: whoever appends one sees it happen."""


@dataclass(frozen=True, slots=True)
class SimulationShape:
    """What all processes have in common."""

    redis_url: str
    seed: int
    slots: int
    cut_cards: CutCards
    requests_per_second: float
    faults: tuple[Fault, ...]
    serve: bool
    stamp_queue: bool


def write_configs(
    files: FleetFiles, nodes: Sequence[NodeIdentity], shape: SimulationShape, *, processes: int | None
) -> list[Path]:
    """Write one private file for each process. A node is always simulated by exactly one."""
    count = processes or -(-len(nodes) // NODES_PER_PROCESS)
    width = PORTS_PER_SLOT * (shape.slots + shape.cut_cards.slices)
    first_port = choose_ports(count * width)
    places = tuple(Place(node.name, node.rack) for node in nodes)
    for name in (JOURNAL, INBOX):
        write_private(files.var / name, "")
    paths = []
    for number in range(count):
        config = SimulationConfig(
            redis_url=shape.redis_url,
            seed=shape.seed,
            nodes=tuple(nodes[number::count]),
            places=places,
            slots=shape.slots,
            cut_cards=shape.cut_cards,
            first_port=first_port + number * width,
            requests_per_second=shape.requests_per_second,
            faults=shape.faults,
            serve=shape.serve,
            stamp_queue=shape.stamp_queue,
            fault_journal=str(files.var / JOURNAL),
            fault_inbox=str(files.var / INBOX),
        )
        path = files.var / FOLDER / f"process-{number + 1}.json"
        write_private(path, msgspec.json.encode(config).decode())
        paths.append(path)
    return paths


def choose_ports(count: int) -> int:
    """Return the first of so many loopback ports in a row that nobody listens on."""
    for _ in range(_PORT_TRIES):
        first = secrets.choice(range(_PORTS.start, _PORTS.stop - count))
        if all(is_port_free(port) for port in range(first, first + count)):
            return first
    raise FleetFilesError(f"no {count} free ports in a row between {_PORTS.start} and {_PORTS.stop - 1}")


def run_workers(paths: Sequence[Path], *, code: Path, seconds: float | None) -> bool:
    """Run one process for each file until told to stop; false if one ended by itself."""
    asked = False

    def ask(*_: object) -> None:
        nonlocal asked
        asked = True

    for which in (signal.SIGTERM, signal.SIGINT):
        signal.signal(which, ask)
    deadline = None if seconds is None else time.monotonic() + seconds
    processes = [_start(path, code) for path in paths]
    try:
        while not asked and (deadline is None or time.monotonic() < deadline):
            if any(process.poll() is not None for process in processes):
                return False
            time.sleep(_POLL_SECONDS)
    finally:
        _end(processes)
    return True


def _start(path: Path, code: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - our own interpreter and module
        [sys.executable, "-m", "workers.simulation", "--config", str(path)],
        cwd=code,
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        process_group=0,
    )


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _STOP_SECONDS
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
