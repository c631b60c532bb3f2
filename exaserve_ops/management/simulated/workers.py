"""The processes that simulate: each gets a private file and a share of the nodes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from exaserve_ops.adapters.fleet_files import FleetFiles, write_private
from exaserve_ops.management.simulated.enrolment import FOLDER
from workers.simulation.config import SimulationConfig
from workers.simulation.faults import Fault, Place
from workers.simulation.node import NodeIdentity

NODES_PER_PROCESS = 512
_POLL_SECONDS = 0.2
_STOP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class SimulationShape:
    """What all processes have in common."""

    redis_url: str
    seed: int
    slots: int
    requests_per_second: float
    faults: tuple[Fault, ...]
    serve: bool
    stamp_queue: bool


def write_configs(
    files: FleetFiles, nodes: Sequence[NodeIdentity], shape: SimulationShape, *, processes: int | None
) -> list[Path]:
    """Write one private file for each process. A node is always simulated by exactly one."""
    count = processes or -(-len(nodes) // NODES_PER_PROCESS)
    places = tuple(Place(node.name, node.rack) for node in nodes)
    paths = []
    for number in range(count):
        config = SimulationConfig(
            redis_url=shape.redis_url,
            seed=shape.seed,
            nodes=tuple(nodes[number::count]),
            places=places,
            slots=shape.slots,
            requests_per_second=shape.requests_per_second,
            faults=shape.faults,
            serve=shape.serve,
            stamp_queue=shape.stamp_queue,
        )
        path = files.var / FOLDER / f"process-{number + 1}.json"
        write_private(path, msgspec.json.encode(config).decode())
        paths.append(path)
    return paths


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
