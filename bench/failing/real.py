"""`kill -9` of whole agents with their engines: real processes of this machine, under load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from bench.failing.record import Death
from bench.failing.stage import Stage, all_rows, change, say, under_load
from bench.fleet_run import FleetRun, FleetRunError, fleet_up, leftovers

HERE = Path(__file__).resolve().parents[2]
NODES = 3
MODEL = "demo"
_LOAD_PER_SECOND = 3.0
_OUTAGE_SECONDS = 12.0
_READY_SECONDS = 120.0
_SEED = 12


async def measure_kills(run: FleetRun, kills: int) -> dict[str, Any]:
    """Kill one node's agent and engines after the other, on a fleet of three with one standby."""
    deaths: list[Death] = []
    [deployment] = run.get("/api/v1/deployments?page_size=10")["results"]
    change(run, f"/api/v1/deployments/{deployment['id']}", {"replicas": NODES - 1, "standbys": 1})
    async with under_load(run, MODEL, per_second=_LOAD_PER_SECOND, seed=_SEED) as stage:
        await _until_whole(stage)
        before = stage.snapshot()
        for number in range(kills):
            deaths.append(await _kill_one(stage))
            await _until_whole(stage)
            say(f"{number + 1} of {kills} kills, {len(stage.talk.asked)} requests")
        figures = await stage.figures(before, deaths)
    return figures | {"nodes": NODES, "replicas": NODES, "standbys": 1}


async def _kill_one(stage: Stage) -> Death:
    """Kill a node that serves, ask for what would have gone there, and let it come back."""
    run = stage.run
    node_id = stage.rng.choice(sorted(set(stage.watch.table.values())))
    rows = await asyncio.to_thread(all_rows, run, "/api/v1/nodes?page_size=10")
    name = next(str(row["name"]) for row in rows if row["id"] == node_id)
    session = await stage.pin(node_id)
    doomed = await asyncio.to_thread(processes_of, run, node_id, name)
    with nobody_restarts(run):
        at = time.monotonic()
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if session:
            await stage.talk.ask("pinned", session_id=session, death=node_id)
        await asyncio.sleep(max(0.0, at + _OUTAGE_SECONDS - time.monotonic()))
        death = Death(node_id, name, at)
    return replace(death, until=time.monotonic())


async def _until_whole(stage: Stage) -> None:
    """Wait until all replicas are ready and the table has those that serve."""
    run = stage.run
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        nodes = await asyncio.to_thread(all_rows, run, "/api/v1/nodes?page_size=10")
        replicas = await asyncio.to_thread(all_rows, run, "/api/v1/replicas?page_size=100")
        ready = sum(row["status"] == "ready" for row in replicas)
        alive = sum(row["liveness"] == "alive" for row in nodes)
        if (alive, ready, len(replicas), len(stage.watch.table)) == (NODES, NODES, NODES, NODES - 1):
            return
        if time.monotonic() > deadline:
            seen = [(row["name"], row["status"], row.get("healing_note")) for row in replicas]
            raise FleetRunError(f"the fleet is not whole: {alive} nodes alive, {seen}")
        await asyncio.sleep(0.5)


def processes_of(run: FleetRun, node_id: str, name: str) -> list[psutil.Process]:
    """The agent of a node and all engines on it, with their children. Only what this fleet started."""
    rows = all_rows(run, "/api/v1/replicas?page_size=100")
    roots = [run.summary()["pids"][name.replace("node-", "agent-")]]
    roots += [row["pid"] for row in rows if row["node"] == node_id and row["pid"]]
    ours = {process.identity.pid for process in leftovers(run.var)}
    strangers = set(roots) - ours
    if strangers:
        raise FleetRunError(f"processes {sorted(strangers)} do not belong to this fleet")
    found = [psutil.Process(pid) for pid in roots]
    return [*found, *(child for process in found for child in process.children(recursive=True))]


@contextlib.contextmanager
def nobody_restarts(run: FleetRun) -> Iterator[None]:
    """Hold the process manager still, as if it had gone with the machine."""
    manager = run.summary()["pids"]["supervisord"]
    os.kill(manager, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(manager, signal.SIGCONT)


@contextlib.contextmanager
def real_fleet(folder: Path) -> Iterator[FleetRun]:
    """Start a fleet of three real nodes with one replica each."""
    say(f"starting {NODES} real nodes")
    options = ("--nodes", str(NODES), "--replicas", "1")
    with fleet_up(HERE, folder / "real" / "var", *options) as run:
        yield run
