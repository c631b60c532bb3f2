"""`python -m bench.kills --json`: what clients lose when something is killed, streams continued and not.

A fleet of its own: two real nodes, two replicas on each, two gateway processes on one port. Under an
open-loop load of streams and plain requests, SIGKILL goes to one gateway process, to one replica (its
engine), and to one node (its agent and all its engines), again and again; first with clients that do not
ask for continuation, then with clients that do.

failed_*                  requests that were open at the kill, or began within three seconds, and ended badly
sent_again_by_clients     those without a byte of an answer, which official clients send again, as ours does
late_*                    how much longer than usual the others took, of those
moved_*                   streams whose replica died while it gave text: from the kill to the next piece
lost_beyond_prefill_*     the same without what a first token usually takes: the target has to compute it, too

`--engine simulated` has a fixed pace and shows what the gateway adds; `--engine torch` computes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.failing.real import nobody_restarts, processes_of
from bench.failing.stage import all_rows, change, say
from bench.fleet_run import FleetRun, FleetRunError, fleet_up, leftovers
from bench.killing.figures import Kill, summarize
from bench.killing.load import Load

HERE = Path(__file__).resolve().parents[1]
KINDS = ("gateway", "replica", "node")
NODES, REPLICAS_EACH, GATEWAYS = 2, 2, 2
_SETTLE_SECONDS = 3.0
_OUTAGE_SECONDS = 6.0
_READY_SECONDS = 150.0
_SEED = 21
SERVED_NAME = "kills"
OPTIONS: dict[str, dict[str, int]] = {
    "simulated": {"ttft_ms": 50, "itl_ms": 20},
    "torch": {"num_blocks": 192},
}


@dataclass
class Scene:
    """A fleet under load, and what was killed of it."""

    run: FleetRun
    load: Load
    rng: random.Random
    kills: list[Kill] = field(default_factory=list)

    async def kill(self, kind: str) -> None:
        """Kill one of a kind, wait a while, and until everything is there again."""
        await asyncio.sleep(_SETTLE_SECONDS)
        rows = await asyncio.to_thread(replica_rows, self.run)
        if kind == "gateway":
            parent = psutil.Process(self.run.summary()["pids"]["gateway"])
            self._strike(kind, [self.rng.choice(parent.children())], frozenset())
            await asyncio.sleep(_OUTAGE_SECONDS)
        elif kind == "replica":
            victim = self._busiest(rows, "id")
            process = psutil.Process(next(row["pid"] for row in rows if row["id"] == victim))
            self._strike(kind, [process, *process.children(recursive=True)], frozenset({victim}))
            await asyncio.sleep(_OUTAGE_SECONDS)
        else:
            await self._kill_node(rows)
        await self.until_whole()

    async def _kill_node(self, rows: list[dict[str, Any]]) -> None:
        node = self._busiest(rows, "node")
        nodes = await asyncio.to_thread(all_rows, self.run, "/api/v1/nodes?page_size=10")
        name = next(str(row["name"]) for row in nodes if row["id"] == node)
        doomed = await asyncio.to_thread(processes_of, self.run, node, name)
        with nobody_restarts(self.run):
            self._strike("node", doomed, frozenset(row["id"] for row in rows if row["node"] == node))
            await asyncio.sleep(_OUTAGE_SECONDS)

    def _busiest(self, rows: list[dict[str, Any]], field_name: str) -> str:
        """Whoever has most streams open now: a kill that nobody notices tells nothing."""
        owner = {row["id"]: str(row[field_name]) for row in rows}
        open_now = Counter(
            owner[one.replica_id] for one in self.load.seen if not one.ended_at and one.replica_id in owner
        )
        return max(sorted(set(owner.values())), key=lambda name: open_now[name])

    def _strike(self, kind: str, doomed: Sequence[psutil.Process], replica_ids: frozenset[str]) -> None:
        self.kills.append(Kill(kind, time.monotonic(), replica_ids))
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    async def until_whole(self) -> None:
        """Wait until nodes, gateways and replicas that these reach are all there. Raises `FleetRunError`."""
        deadline = time.monotonic() + _READY_SECONDS
        ready_wanted = NODES * REPLICAS_EACH
        while True:
            nodes = await asyncio.to_thread(all_rows, self.run, "/api/v1/nodes?page_size=10")
            rows = await asyncio.to_thread(replica_rows, self.run)
            alive = sum(row["liveness"] == "alive" for row in nodes)
            gateways = len(psutil.Process(self.run.summary()["pids"]["gateway"]).children())
            # Gateways send nothing to a replica until one has connected to it, seconds after it is ready.
            ready = sum(row["status"] == "ready" and row["reach"] == "reached" for row in rows)
            if (alive, ready, gateways, len(rows)) == (NODES, ready_wanted, GATEWAYS, ready_wanted):
                return
            if time.monotonic() > deadline:
                raise FleetRunError(f"not whole again: {alive} nodes, {ready} replicas, {gateways} gateways")
            await asyncio.sleep(0.3)


def replica_rows(run: FleetRun) -> list[dict[str, Any]]:
    """Live replicas that serve."""
    deployments = {
        row["id"] for row in all_rows(run, "/api/v1/deployments") if row["served_name"] == SERVED_NAME
    }
    return [
        row for row in all_rows(run, "/api/v1/replicas?page_size=100") if row["deployment"] in deployments
    ]


def deploy(run: FleetRun, engine: str) -> None:
    """Have replicas in the demo's place that stay with their node: each kill finds the same fleet."""
    [demo] = all_rows(run, "/api/v1/deployments")
    change(run, f"/api/v1/deployments/{demo['id']}", {"replicas": 0})
    for node in all_rows(run, "/api/v1/nodes?page_size=10"):
        wish = {
            "name": f"kills-{node['name']}",
            "served_name": SERVED_NAME,
            "model": demo["model"],
            "engine": engine,
            "engine_options": OPTIONS[engine],
            "replicas": REPLICAS_EACH,
            "nodes": [node["name"]],
        }
        summary = run.summary()
        request = urllib.request.Request(  # noqa: S310 - http, to the fleet that we started
            f"{summary['web_url']}/api/v1/deployments",
            data=json.dumps(wish).encode(),
            headers={
                "Authorization": f"Bearer {summary['api_token']}",
                "Content-Type": "application/json",
            },
        )
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - as above
            answer.read()


@contextlib.asynccontextmanager
async def under_load(
    run: FleetRun, *, per_second: float, answer_tokens: int, continues: bool
) -> AsyncIterator[Scene]:
    """Ask for as long as the block lasts; then wait for all answers."""
    summary = run.summary()
    load = Load(summary["gateway_url"], summary["api_token"], SERVED_NAME, answer_tokens, continues)
    rng = random.Random(_SEED)  # noqa: S311 - no secret
    going = True
    scene = Scene(run, load, rng)
    await scene.until_whole()
    asking = asyncio.create_task(load.run(per_second=per_second, may_go_on=lambda: going, rng=rng))
    try:
        yield scene
    finally:
        going = False
        await asking


async def measure_kills(run: FleetRun, options: argparse.Namespace) -> dict[str, Any]:
    """Kill one of each kind so often, without continuation and with it."""
    deploy(run, options.engine)
    found: dict[str, Any] = {}
    for name, continues in (("off", False), ("on", True)):
        async with under_load(
            run,
            per_second=options.per_second,
            answer_tokens=options.answer_tokens,
            continues=continues,
        ) as scene:
            for kind in options.only or KINDS:
                for number in range(options.kills):
                    await scene.kill(kind)
                    say(f"continuation {name}: {kind} {number + 1} of {options.kills}")
            await asyncio.sleep(_SETTLE_SECONDS)
        found[name] = {kind: summarize(kind, scene.kills, scene.load.seen) for kind in options.only or KINDS}
        found[name]["requests"] = len(scene.load.seen)
        found[name]["failed"] = sum(bool(one.error) for one in scene.load.seen)
        say(json.dumps(found[name]))
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start a fleet, kill, and stop it. Raises `FleetRunError`."""
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="exaops-kills-") as folder:
        var = Path(folder) / "var"
        shape = ("--nodes", str(NODES), "--replicas", str(REPLICAS_EACH))
        with fleet_up(HERE, var, *shape, environment={"EXAOPS_GATEWAY_PROCESSES": str(GATEWAYS)}) as run:
            found = asyncio.run(measure_kills(run, options))
        orphans = len(leftovers(var))
    return {
        "engine": options.engine,
        "per_second": options.per_second,
        "answer_tokens": options.answer_tokens,
        **found,
        "cpu_count": os.cpu_count(),
        "load1_before": round(load_before, 2),
        "orphans_after_stop": orphans,
    }


def show(figures: dict[str, Any]) -> str:
    """One line for each figure."""
    lines = []
    for name in ("off", "on"):
        for kind in KINDS:
            for figure, value in figures[name].get(kind, {}).items():
                lines.append(f"continuation {name:<4} {kind:<8} {figure:<28} {value}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="bench.kills", description="What clients lose by kills.")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--engine", choices=("simulated", "torch"), default="simulated")
    parser.add_argument("--only", action="append", choices=KINDS, help="one kind; may be repeated")
    parser.add_argument("--kills", type=int, default=3, help="of each kind, in each of both runs")
    parser.add_argument("--per-second", type=float, default=10.0, help="requests, half of them streams")
    parser.add_argument("--answer-tokens", type=int, default=80)
    options = parser.parse_args(argv)
    # Whoever ends the benchmark ends its fleet: `finally` blocks run for this exception.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        figures = measure(options)
    except FleetRunError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(figures) if options.json else show(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
