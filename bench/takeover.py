"""`python -m bench.takeover --json`: for how long nobody leads when the leading controller is killed.

Starts a fleet of its own without nodes, two spare controllers beside the fleet's own one, and kills the
leader with SIGKILL again and again, at moments spread over the interval at which leases are renewed.
Postgres says who leads; the audit record says how long the gap was by the new leader's own account.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from bench.fleet_run import FleetRun, FleetRunError, fleet_up
from exaserve_ops.adapters.processes import FLEET_VARIABLE, PROGRAM_VARIABLE, read_environment_of

HERE = Path(__file__).resolve().parents[1]
WANTED_SECONDS = 3.0
SPARES = 2
RENEWAL_SECONDS = 0.5
"""At which phase of it a leader dies decides a quarter of the gap, so kills are spread over it."""
_UP_SECONDS = 60.0
_TAKE_OVER_SECONDS = 30.0
_STOP_SECONDS = 20.0
_POLL_SECONDS = 0.005

_LEADER = """
SELECT holder, epoch FROM health_leaderlease WHERE expires_at > clock_timestamp() AND holder <> ''
"""
_RECORD = """
SELECT reason FROM audit_event WHERE event = 'leader_changed' AND generation = %s ORDER BY id
"""


@dataclass(frozen=True, slots=True)
class TakeOver:
    """One change of hands, in seconds from the kill, and from the last renewal as it was recorded."""

    taken_seconds: float
    """Until another holds the lease."""
    working_seconds: float
    """Until it has begun to watch the fleet."""
    recorded_gap_seconds: float
    records: int
    """How often it was written down: once."""


class Spares:
    """Controllers beside the fleet's own one; one that was killed is replaced."""

    def __init__(self, run: FleetRun) -> None:
        self._folder = run.var.parent
        pid = run.summary()["pids"]["controllers"]
        # Not under the fleet's label: its supervisor minds its own.
        ours = {FLEET_VARIABLE, PROGRAM_VARIABLE}
        self.environment = {n: v for n, v in read_environment_of(pid).items() if n not in ours}
        self._running: dict[Path, subprocess.Popen[bytes]] = {}
        self._count = 0

    def fill(self) -> None:
        """Have as many as are wanted, each of which waits for the lead or has it."""
        for log, process in list(self._running.items()):
            if process.poll() is not None:
                del self._running[log]
        while len(self._running) < SPARES:
            self._start()
        deadline = time.monotonic() + _UP_SECONDS
        while any("event=waiting_for_lead" not in log.read_text() for log in self._running):
            if time.monotonic() > deadline:
                raise FleetRunError("a spare controller does not come up")
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """End them all."""
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self) -> None:
        self._count += 1
        log = self._folder / f"spare-{self._count}.log"
        with log.open("wb") as out:
            self._running[log] = subprocess.Popen(
                [sys.executable, "manage.py", "run_controllers"],
                cwd=HERE,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )


@contextlib.contextmanager
def spare_controllers(run: FleetRun) -> Iterator[Spares]:
    """Spares for as long as the block lasts."""
    spares = Spares(run)
    try:
        yield spares
    finally:
        spares.close()


def kill_leader(link: psycopg.Connection[Any]) -> TakeOver:
    """SIGKILL for whoever leads, and wait until another one has begun. Raises `FleetRunError`."""
    holder, epoch = _wait_for(lambda: link.execute(_LEADER).fetchone(), "somebody to lead")
    os.kill(int(holder.rpartition("-")[2]), signal.SIGKILL)
    killed_at = time.monotonic()

    def successor() -> tuple[str, int] | None:
        row = link.execute(_LEADER).fetchone()
        return row if row is not None and row[1] > epoch else None

    _, new_epoch = _wait_for(successor, "another one to lead")
    taken = time.monotonic() - killed_at
    records = _wait_for(lambda: link.execute(_RECORD, [new_epoch]).fetchall(), "the record of it")
    working = time.monotonic() - killed_at
    return TakeOver(taken, working, _gap_of(records[0][0]), len(records))


def measure(*, kills: int) -> dict[str, Any]:
    """Kill so many leaders. Raises `FleetRunError`."""
    with tempfile.TemporaryDirectory(prefix="exaops-takeover-") as folder:
        var = Path(folder) / "var"
        with fleet_up(HERE, var, "--no-demo", "--nodes", "0") as run, spare_controllers(run) as spares:
            url = spares.environment["DATABASE_URL"]
            with psycopg.connect(url, autocommit=True) as link:
                return figures_of([_one(link, spares, number / kills) for number in range(kills)])


def figures_of(seen: Sequence[TakeOver]) -> dict[str, Any]:
    """What is printed."""
    working = [one.working_seconds for one in seen]
    return {
        "kills": len(seen),
        "taken_p50_seconds": _quantile([one.taken_seconds for one in seen], 0.5),
        "taken_max_seconds": _quantile([one.taken_seconds for one in seen], 1.0),
        "takeover_p50_seconds": _quantile(working, 0.5),
        "takeover_max_seconds": _quantile(working, 1.0),
        "recorded_gap_max_seconds": _quantile([one.recorded_gap_seconds for one in seen], 1.0),
        "recorded_twice": sum(one.records != 1 for one in seen),
        "wanted_seconds": WANTED_SECONDS,
        "is_met": max(working) < WANTED_SECONDS,
    }


def _one(link: psycopg.Connection[Any], spares: Spares, phase_ratio: float) -> TakeOver:
    spares.fill()
    time.sleep(phase_ratio * RENEWAL_SECONDS)
    return kill_leader(link)


def _wait_for(condition: Any, what: str) -> Any:  # noqa: ANN401 - rows of a query
    deadline = time.monotonic() + _TAKE_OVER_SECONDS
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise FleetRunError(f"still waiting: {what}")
        time.sleep(_POLL_SECONDS)
    return value


def _gap_of(reason: str) -> float:
    match = re.fullmatch(r"nobody led for (\d+\.\d+) s", reason)
    if match is None:
        raise FleetRunError(f"the record of a killed leader says {reason!r}")
    return float(match[1])


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return float(round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 3))


def show(figures: Mapping[str, Any]) -> str:
    """One line for each figure."""
    return "\n".join(f"{name:<26} {value}" for name, value in figures.items())


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="bench.takeover", description="How long nobody leads.")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--kills", type=int, default=10, help="leaders to kill, one after another")
    arguments = parser.parse_args(argv)
    if arguments.kills < 1:
        parser.error("--kills must be at least 1")
    # Whoever ends the benchmark ends its fleet: `finally` blocks run for this exception.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        figures = measure(kills=arguments.kills)
    except FleetRunError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(figures) if arguments.json else show(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
