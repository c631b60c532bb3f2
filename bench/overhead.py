"""`python -m bench.overhead --nodes 256 --replicas 12 --seconds 30 --json`: what watching a fleet costs.

Starts a fleet of its own without real nodes, lets simulated ones join (in processes of their own,
over the real Redis and the real queues), opens one viewer, and counts the CPU seconds that each part
of the control plane spends. Every cell of a frame tells when its report was made, so how old values
are when they reach a screen is measured for all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import websockets

from bench.fleet_run import FleetRun, FleetRunError, fleet_up, leftovers
from exaserve_ops.telemetry.domain.frames import METRICS, DecodedFrame, decode_frame

HERE = Path(__file__).resolve().parents[1]
STAMPED = next(index for index, metric in enumerate(METRICS) if metric.key == "requests_waiting")
STAMPS = 60_000
"""Stamps are hundredths of a second and begin anew after ten minutes."""
_HIGHEST_STAMP = STAMPS - 1
_PARTS = {
    "control_plane_core_ratio": ("controllers", "web", "gateway"),
    "redis_core_ratio": ("valkey",),
    "postgres_core_ratio": ("postgres",),
}
_READY_SECONDS_PER_REPLICA = 0.1
_SETTLE_SECONDS = 20.0
_STOP_SECONDS = 20.0
_REFERENCE_NODES = 256
_LARGE_NODES = 1024


@dataclass
class Screen:
    """What one viewer has seen: how old each value was at its first appearance."""

    ages_seconds: list[float] = field(default_factory=list)
    frames: int = 0
    frame_bytes: int = 0
    _before: Sequence[int] = ()

    def see(self, frame: DecodedFrame, size_bytes: int, *, wall_seconds: float) -> None:
        """Take one frame in, as it arrived."""
        stamps = frame.codes[STAMPED]
        now = wall_seconds * 100
        if len(self._before) == len(stamps):
            self.frames += 1
            self.frame_bytes += size_bytes
            self.ages_seconds += [
                ((now - stamp) % STAMPS) / 100
                for stamp, known in zip(stamps, self._before, strict=True)
                if stamp != known and stamp <= _HIGHEST_STAMP
            ]
        self._before = stamps


@contextlib.contextmanager
def simulated_nodes(
    run: FleetRun, nodes: int, replicas: int, *options: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Have simulated nodes on the fleet for as long as the block lasts; `options` are the command's."""
    log = run.var.parent / f"{run.var.name}.simulate-{nodes}.output"
    command = ["manage.py", "simulate", "--nodes", str(nodes), "--replicas", str(replicas), *options]
    own = {name: value for name, value in os.environ.items() if not name.startswith("EXAOPS_")}
    for name in ("DATABASE_URL", "REDIS_URL"):
        own.pop(name, None)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=HERE,
            env=own | {"EXAOPS_VAR_DIR": str(run.var)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(run: FleetRun, simulation: subprocess.Popen[bytes], wanted: int) -> float:
    """Wait until every replica is ready; returns how long that took. Raises `FleetRunError`."""
    began = time.monotonic()

    def ready() -> bool:
        if simulation.poll() is not None:
            raise FleetRunError(f"the simulation ended with {simulation.returncode}")
        count: int = run.get("/api/v1/replicas?status=ready&page_size=1")["count"]
        time.sleep(1.0)  # asking costs what is about to be measured
        return count >= wanted

    limit = 120.0 + wanted * _READY_SECONDS_PER_REPLICA
    run.wait_until(ready, f"{wanted} simulated replicas to be ready", seconds=limit)
    return time.monotonic() - began


async def watch(run: FleetRun, screen: Screen, seconds: float) -> None:
    """View the fleet for so long, as a page does."""
    summary = run.summary()
    address = summary["web_url"].replace("http", "ws", 1) + "/ws/live/"
    headers = {"Authorization": f"Bearer {summary['api_token']}"}
    deadline = time.monotonic() + seconds
    async with websockets.connect(address, additional_headers=headers, max_size=None) as socket:
        while (left := deadline - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left):
                    message = await socket.recv()
            except TimeoutError:
                return
            if isinstance(message, bytes):
                screen.see(decode_frame(message), len(message), wall_seconds=_wall_clock_seconds())


def cpu_seconds(pids: Mapping[str, int]) -> dict[str, float]:
    """CPU seconds that each program and its children have used so far."""
    return {name: sum(map(_cpu_of, _family(pid))) for name, pid in pids.items() if pid}


def measure_size(run: FleetRun, nodes: int, replicas: int, seconds: float) -> dict[str, Any]:
    """Figures of one size of fleet, once it has come to rest."""
    with simulated_nodes(run, nodes, replicas, "--stamp-queue") as simulation:
        ready_seconds = wait_until_ready(run, simulation, nodes * replicas)
        time.sleep(_SETTLE_SECONDS)
        pids = run.summary()["pids"] | {"simulation": simulation.pid}
        screen = Screen()
        before, began = cpu_seconds(pids), time.monotonic()
        asyncio.run(watch(run, screen, seconds))
        after, took = cpu_seconds(pids), time.monotonic() - began
    spent = {name: (after[name] - before[name]) / took for name in before if name in after}
    figures: dict[str, Any] = {"nodes": nodes, "replicas": nodes * replicas, "seconds": round(took, 1)}
    for figure, parts in _PARTS.items():
        figures[figure] = round(sum(spent.get(part, 0.0) for part in parts), 4)
    figures |= {
        f"{part}_core_ratio": round(spent.get(part, 0.0), 4) for part in ("controllers", "web", "gateway")
    }
    return figures | {
        "simulation_core_ratio": round(spent.get("simulation", 0.0), 4),
        "report_to_screen_p50_seconds": _quantile(screen.ages_seconds, 0.50),
        "report_to_screen_p95_seconds": _quantile(screen.ages_seconds, 0.95),
        "frames_per_second": round(screen.frames / took, 3),
        "frame_bytes": screen.frame_bytes // max(1, screen.frames),
        "ready_after_seconds": round(ready_seconds, 1),
    }


def measure(*, sizes: Sequence[int], replicas: int, seconds: float, headline: int) -> dict[str, Any]:
    """Measure all sizes, smallest first, on one fleet; the headline size's figures stand at the top."""
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="exaops-overhead-") as folder:
        var = Path(folder) / "var"
        with fleet_up(HERE, var, "--no-demo", "--nodes", "0") as run:
            by_size = []
            for nodes in sorted({*sizes, headline}):
                by_size.append(measure_size(run, nodes, replicas, seconds))
                print(json.dumps(by_size[-1]), file=sys.stderr)  # the larger sizes take minutes
        orphans = len(leftovers(var))
    top = next(figures for figures in by_size if figures["nodes"] == headline)
    return top | {
        "growth_1024_over_256": _growth(by_size),
        "sizes": by_size,
        "cpu_count": os.cpu_count(),
        "load1_before": round(load_before, 2),
        "orphans_after_stop": orphans,
    }


def _growth(by_size: Sequence[Mapping[str, Any]]) -> float | None:
    """How many times the control plane costs at 1,024 nodes what it costs at 256."""
    cost = {figures["nodes"]: figures["control_plane_core_ratio"] for figures in by_size}
    if not cost.get(_REFERENCE_NODES) or _LARGE_NODES not in cost:
        return None
    return float(round(cost[_LARGE_NODES] / cost[_REFERENCE_NODES], 3))


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _cpu_of(process: psutil.Process) -> float:
    """Own time, and that of children that have ended: Postgres forks for every connection."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)


def _quantile(values: Sequence[float], share: float) -> float | None:
    ordered = sorted(values)
    return float(round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 3)) if ordered else None


def _wall_clock_seconds() -> float:
    """The clock that the simulated nodes stamp with: both are this machine's."""
    return datetime.datetime.now(tz=datetime.UTC).timestamp()  # noqa: TID251 - the one place, see above


def _sizes(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="bench.overhead", description="Cost of watching a fleet.")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--nodes", type=int, default=_REFERENCE_NODES, help="headline size")
    parser.add_argument("--replicas", type=int, default=12, help="on each node")
    parser.add_argument("--seconds", type=float, default=30.0, help="of watching, for each size")
    parser.add_argument("--sizes", type=_sizes, default=[], help="more sizes, such as 64,128,512,1024")
    arguments = parser.parse_args(argv)
    # Whoever ends the benchmark ends its fleet: `finally` blocks run for this exception.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        figures = measure(
            sizes=arguments.sizes,
            replicas=arguments.replicas,
            seconds=arguments.seconds,
            headline=arguments.nodes,
        )
    except FleetRunError as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(figures))
        return 0
    for row in figures["sizes"]:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    print(f"growth_1024_over_256 {figures['growth_1024_over_256']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
