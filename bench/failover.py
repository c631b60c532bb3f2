"""`python -m bench.failover --json`: how long after a node's death others do its work, and what it costs.

Three parts (`--only` picks one; all of them by default):

`simulated`  A fleet of its own (Postgres, Valkey, controllers, gateway), 256 x 12 simulated replicas of
             which a twelfth stands by, and an open-loop load of new chats and turns of sessions. A hundred
             nodes die, a few at a time; every other one goes mute instead of refusing connections.
`real`       Three real agents with torch engines on this machine. Agent and engines of one node are
             killed by SIGKILL, again and again; the process manager is held still until they are due back.
`quiet`      Nothing dies: report loss, jitter and mass silence on the simulated fleet, and an hour of the
             same in virtual time through the detector's and the guard's rules. No death may be seen.

What is measured, from the moment at which the fault took effect:

detect       until the controllers wrote the death down (the audit event's time)
reroute      until the route table, as the gateways' own reader gets it, has none of the node's replicas
             **and** a turn of a session that lived there, asked right after the fault, had the first byte
             of its answer from another node; whichever is later
standby      until the table has another replica for each that it lost with the node
failed_new_requests   requests begun after the first fault whose client got an error and no byte before
false_deaths          deaths written down of nodes that no fault had taken

At the top stand the worst part's times and the sum of the counts; each part's own are below.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.failing.real import measure_kills, real_fleet
from bench.failing.record import combine
from bench.failing.simulated import Plan, measure_deaths, measure_quiet, simulation
from bench.failing.stage import say
from bench.failing.virtual import measure_virtual
from bench.fleet_run import FleetRunError, leftovers

PARTS = ("simulated", "quiet", "real")


def measure(plan: Plan, *, parts: Sequence[str], kills: int, virtual_hours: float) -> dict[str, Any]:
    """Run the parts that are asked for, and put their figures together. Raises `FleetRunError`."""
    load_before = os.getloadavg()[0]
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="exaops-failover-") as name:
        folder = Path(name)
        if {"simulated", "quiet"} & set(parts):
            found |= _measure_simulated(folder, plan, parts)
        if "quiet" in parts:
            say(f"{virtual_hours} virtual hours of {plan.nodes} nodes")
            found["quiet"] |= measure_virtual(nodes=plan.nodes, hours=virtual_hours)
            found["quiet"]["false_deaths"] += found["quiet"]["virtual_false_deaths"]
        if "real" in parts:
            (folder / "real").mkdir()
            with real_fleet(folder) as run:
                found["real"] = asyncio.run(measure_kills(run, kills))
        orphans = sum(len(leftovers(var)) for var in folder.glob("*/var"))
    return (
        combine(found)
        | found
        | {
            "cpu_count": os.cpu_count(),
            "load1_before": round(load_before, 2),
            "orphans_after_stop": orphans,
        }
    )


def _measure_simulated(folder: Path, plan: Plan, parts: Sequence[str]) -> dict[str, dict[str, Any]]:
    found = {}
    (folder / "simulated").mkdir()
    with simulation(folder, plan) as simulated:
        if "simulated" in parts:
            found["simulated"] = asyncio.run(measure_deaths(simulated))
            say(json.dumps(found["simulated"]))
        if "quiet" in parts:
            found["quiet"] = asyncio.run(measure_quiet(simulated))
            say(json.dumps(found["quiet"]))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    arguments = _parse(argv)
    # Whoever ends the benchmark ends its fleet: `finally` blocks run for this exception.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGALRM, _too_late)
    signal.alarm(arguments.limit_seconds)
    plan = Plan(
        nodes=arguments.nodes,
        replicas=arguments.replicas,
        deaths=min(arguments.deaths, arguments.nodes),
        pace_seconds=arguments.pace_seconds,
        quiet_seconds=arguments.quiet_seconds,
    )
    parts = arguments.only or PARTS
    try:
        figures = measure(plan, parts=parts, kills=arguments.kills, virtual_hours=arguments.virtual_hours)
    except FleetRunError as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(figures))
        return 0
    for name, value in figures.items():
        print(f"{name:<24} {value}")
    return 0


def _too_late(*_: object) -> None:
    raise FleetRunError("it takes too long; what was measured so far stands above (see --limit-seconds)")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.failover", description="What a node's death costs.")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--only", action="append", choices=PARTS, help="one part; may be repeated")
    parser.add_argument("--nodes", type=int, default=256, help="simulated")
    parser.add_argument("--replicas", type=int, default=12, help="on each simulated node")
    parser.add_argument("--deaths", type=int, default=100, help="of simulated nodes")
    parser.add_argument("--pace-seconds", type=float, default=2.5, help="from one death to the next")
    parser.add_argument("--quiet-seconds", type=float, default=120.0, help="of loss and jitter in real time")
    parser.add_argument("--virtual-hours", type=float, default=1.0, help="of loss and jitter in virtual time")
    parser.add_argument("--kills", type=int, default=5, help="of real nodes")
    parser.add_argument("--limit-seconds", type=int, default=900, help="give up after so long")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
