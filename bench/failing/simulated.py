"""Deaths of simulated nodes, and a bad network that must kill none."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.failing.record import Death
from bench.failing.stage import Stage, all_rows, read_verdicts, say, tally, under_load
from bench.fleet_run import FleetRun, FleetRunError, fleet_up
from bench.overhead import simulated_nodes, wait_until_ready
from workers.simulation.journal import BEGIN, read_journal

HERE = Path(__file__).resolve().parents[2]
MODEL = "simulated-8b"
MASS_SILENCE_SECONDS = 15.0
_MANNERS = ("refused", "mute")
_STRIKE_SECONDS = 5.0
_SETTLE_SECONDS = 25.0
_SEED = 11


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes and times of the simulated part."""

    nodes: int
    replicas: int
    deaths: int
    pace_seconds: float = 2.5
    """From one death to the next, on average."""
    outage_seconds: float = 12.0
    """Before a node comes back."""
    load_per_second: float = 16.0
    quiet_seconds: float = 120.0

    @property
    def standbys(self) -> int:
        """As many as the nodes have that are off at any time, and then as many again."""
        places = self.nodes * self.replicas
        return min(places // 2, max(2 * self.replicas, places // 12))


@dataclass(frozen=True, slots=True)
class Simulation:
    """A fleet of simulated nodes, all of whose replicas are ready."""

    run: FleetRun
    plan: Plan
    ready_after_seconds: float
    journal: Path = field(init=False)
    inbox: Path = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "journal", self.run.var / "simulated" / "faults.jsonl")
        object.__setattr__(self, "inbox", self.run.var / "simulated" / "inbox")

    def inject(self, word: str) -> None:
        """Have a fault happen."""
        with self.inbox.open("a") as file:
            file.write(word + "\n")

    def deaths(self) -> list[Death]:
        """Every death so far, from the simulator's own notes."""
        found: dict[str, Death] = {}
        for note in read_journal(self.journal):
            if note.kind != "node-death":
                continue
            if note.phase == BEGIN:
                found[note.node_id] = Death(note.node_id, note.node, note.monotonic_seconds)
            elif note.node_id in found:
                before = found[note.node_id]
                found[note.node_id] = Death(before.node_id, before.node, before.at, note.monotonic_seconds)
        return list(found.values())


@contextlib.contextmanager
def simulation(folder: Path, plan: Plan) -> Iterator[Simulation]:
    """Start a fleet, let simulated nodes join, and wait until all is ready."""
    say(f"starting a fleet for {plan.nodes} x {plan.replicas} simulated replicas")
    with (
        fleet_up(HERE, folder / "simulated" / "var", "--no-demo", "--nodes", "0") as run,
        simulated_nodes(run, plan.nodes, plan.replicas, "--standbys", str(plan.standbys)) as process,
    ):
        took = wait_until_ready(run, process, plan.nodes * plan.replicas)
        say(f"all ready after {took:.0f} s, {plan.standbys} of them stand by")
        yield Simulation(run, plan, took)


async def measure_deaths(simulated: Simulation) -> dict[str, Any]:
    """Take nodes away, a few at a time, each of them once, and follow what comes of it."""
    plan = simulated.plan
    async with under_load(simulated.run, MODEL, per_second=plan.load_per_second, seed=_SEED) as stage:
        serving = plan.nodes * plan.replicas - plan.standbys
        await stage.until(lambda: len(stage.watch.table) >= serving, "all routes", seconds=120)
        before = stage.snapshot()
        nodes = all_rows(simulated.run, "/api/v1/nodes?page_size=500")
        victims = stage.rng.sample(sorted(nodes, key=lambda row: str(row["name"])), plan.deaths)
        strikes: list[asyncio.Task[None]] = []
        for number, victim in enumerate(victims):
            strikes.append(asyncio.create_task(_strike(stage, simulated, victim, _MANNERS[number % 2])))
            await asyncio.sleep(plan.pace_seconds * stage.rng.uniform(0.6, 1.4))
            if number % 10 == 9:  # noqa: PLR2004 - a line every ten
                say(f"{number + 1} of {plan.deaths} deaths, {len(stage.talk.asked)} requests")
        await asyncio.gather(*strikes)
        await asyncio.sleep(plan.outage_seconds)
        with contextlib.suppress(FleetRunError):  # what was not seen is counted
            await stage.until(
                lambda: len(stage.watch.table) >= serving, "all routes again", seconds=_SETTLE_SECONDS
            )
        figures = await stage.figures(before, simulated.deaths())
    return figures | {
        "nodes": plan.nodes,
        "replicas": plan.nodes * plan.replicas,
        "standbys": plan.standbys,
        "ready_after_seconds": round(simulated.ready_after_seconds, 1),
        "incidents": len(all_rows(simulated.run, "/api/v1/incidents?page_size=500")),
        "waits": _waits(simulated.run),
    }


async def _strike(stage: Stage, simulated: Simulation, victim: dict[str, Any], manner: str) -> None:
    """Take one node away, then ask for what would have gone there."""
    node_id, name = victim["id"], victim["name"]
    session = await stage.pin(node_id)
    simulated.inject(f"node-death@0s+{simulated.plan.outage_seconds}s:nodes={name},manner={manner}")
    await stage.until(
        lambda: any(death.node_id == node_id for death in simulated.deaths()),
        f"{name} to be struck",
        seconds=_STRIKE_SECONDS,
    )
    if session:
        await stage.talk.ask("pinned", session_id=session, death=node_id)
    else:
        say(f"no session would live on {name}")


async def measure_quiet(simulated: Simulation) -> dict[str, Any]:
    """Lose a tenth of all reports and delay the rest, then silence everybody: nobody may be called dead."""
    seconds = simulated.plan.quiet_seconds
    began = time.monotonic()
    say(f"{seconds:.0f} s of 10% loss and 0.9-interval jitter")
    simulated.inject(f"report-loss@0s+{seconds}s:loss_ratio=0.1")
    simulated.inject(f"jitter@0s+{seconds}s:jitter_ratio=0.9")
    await asyncio.sleep(seconds)
    bad_network = _deaths_since(simulated, began)
    say(f"{MASS_SILENCE_SECONDS:.0f} s of mass silence")
    simulated.inject(f"mass-silence@0s+{MASS_SILENCE_SECONDS}s")
    await asyncio.sleep(MASS_SILENCE_SECONDS + 2 * _STRIKE_SECONDS)
    total = _deaths_since(simulated, began)
    incidents = all_rows(simulated.run, "/api/v1/incidents?page_size=500")
    return {
        "false_deaths": total,
        "false_deaths_in_bad_network": bad_network,
        "false_deaths_in_mass_silence": total - bad_network,
        "quiet_seconds": seconds,
        "mass_silence_seconds": MASS_SILENCE_SECONDS,
        "mass_silence_incidents": sum(row["kind"] == "mass_silence" for row in incidents),
        "incidents_left_open": sum(row["status"] == "open" for row in incidents),
    }


def _deaths_since(simulated: Simulation, began: float) -> int:
    return sum(verdict.at >= began for verdict in read_verdicts(simulated.run))


def _waits(run: FleetRun) -> dict[str, int]:
    """Why replicas are not healed yet, at the end."""
    rows = all_rows(run, "/api/v1/replicas?page_size=500")
    notes = (str(row.get("healing_note") or "") for row in rows if row["status"] != "ready")
    return tally(note.partition("; ")[2] or note for note in notes)  # without the node's name
