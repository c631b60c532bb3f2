"""Moves on a whole fleet of this machine, whose real processes are killed: nothing is played here.

`manage.py up` starts it, as a person does. Turns go through its gateway, moves are asked for through its
API, its controllers plan and switch, its agents have its engines send. What is killed gets SIGKILL at a
random moment of a move and is brought back by whoever looks after it in the product.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from bench.fleet_run import FleetRun, fleet_up, leftovers
from bench.relocation.engines import MODEL, Seat
from bench.relocation.house import House, HouseError, running
from bench.relocation.tally import Tally
from bench.relocation.wire import OK, UnansweredError, ask
from workers.engines.demo_model import make_demo_model

HERE = Path(__file__).resolve().parents[2]
NODES = 2
REPLICAS = 2
VICTIMS = ("source", "target", "agent", "controllers", "gateway", "valkey")
_NOT_SEEN = {"swaps_during_turns", "turns_during_moves", "death_steps", "after_move_tokens"}
"""What cannot be counted from outside."""
_TWIN_BLOCKS = 1024
_ACCEPTED = 202
_ANSWER_TOKENS = 8
_LONGEST_CHARACTERS = 1500
_TURN_SECONDS = 60.0
_MOVE_SECONDS = 120.0
_SEEN_SECONDS = 60.0
_KILL_WITHIN_SECONDS = 2.0
_PAUSE_SECONDS = 0.25
_SAY_EVERY = 20
_WORDS = ("ship", "light", "harbour", "storm", "keeper", "night", "letter", "song", "stone", "island")


@dataclass(frozen=True, slots=True)
class Plan:
    """How much, and by which seed."""

    moves: int
    sessions: int = 6
    seed: int = 1
    kill_ratio: float = 0.2
    """Of the moves, those that something dies in."""


async def measure(folder: Path, plan: Plan) -> dict[str, Any]:
    """Move until it is enough. Raises `FleetRunError`, `HouseError`."""
    model = folder / "twin-model"
    make_demo_model(model)
    tally = Tally()
    began = time.monotonic()
    home = folder / "product"
    home.mkdir()
    options = ("--nodes", str(NODES), "--replicas", str(REPLICAS))
    with fleet_up(HERE, home / "var", *options) as run:
        async with running([Seat("twin", "", model, folder / "weights", _TWIN_BLOCKS)]) as house:
            fleet = _Fleet(run, house, tally)
            lives = [_Life(fleet, n, plan) for n in range(plan.sessions)]
            await asyncio.gather(*(life.live() for life in lives))
    orphans = len(leftovers(home / "var"))
    counted = {name: count for name, count in tally.report().items() if name not in _NOT_SEEN}
    return counted | {
        "nodes": NODES,
        "replicas": NODES * REPLICAS,
        "sessions": plan.sessions,
        "seed": plan.seed,
        "seconds": round(time.monotonic() - began, 1),
        "orphans_after_stop": orphans,
        "real": "all: engines, agents, controllers, gateway, API and stores, killed by SIGKILL",
    }


class _Fleet:
    """The running fleet, as clients and operators reach it, and the twin beside it."""

    def __init__(self, run: FleetRun, house: House, tally: Tally) -> None:
        self.run = run
        self.tally = tally
        self._house = house
        summary = run.summary()
        self._token, self._model = summary["api_token"], summary["model"]
        self._gateway, self._web = (urlsplit(summary[name]).netloc for name in ("gateway_url", "web_url"))

    async def complete(self, session: str, prompt: str) -> str | None:
        """Have a turn through the gateway, asked again as a client would; `None`: not within the time."""
        deadline = time.monotonic() + _TURN_SECONDS
        while time.monotonic() < deadline:
            try:
                status, told = await ask(
                    self._gateway, "POST", "/v1/completions", key=self._token,
                    body=_completion(self._model, prompt), headers={"x-session-id": session},
                )  # fmt: skip
            except UnansweredError:
                status, told = 0, {}
            if status == OK:
                return str(told["choices"][0]["text"])
            self.tally.retried_turns += 1
            await asyncio.sleep(_PAUSE_SECONDS)
        return None

    async def twin_says(self, prompt: str) -> str:
        """What an engine says that nobody moves to, from or kills."""
        twin = self._house.find("twin")
        if twin is None:
            raise HouseError("the twin does not run")
        _, told = await ask(
            twin.address, "POST", "/v1/completions", key=twin.api_key, body=_completion(MODEL, prompt)
        )
        return str(told["choices"][0]["text"])

    async def api(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Any:  # noqa: ANN401
        """Return status and JSON of the API; it is asked until it answers. Raises `HouseError`."""
        deadline = time.monotonic() + _MOVE_SECONDS
        while True:
            try:
                return await ask(self._web, method, "/api/v1" + path, key=self._token, body=body)
            except UnansweredError as error:
                if time.monotonic() > deadline:
                    raise HouseError(f"the API does not answer: {error}") from error
                await asyncio.sleep(_PAUSE_SECONDS)

    async def kill(self, victim: str, move: Mapping[str, Any]) -> None:
        """Send SIGKILL to what a move needs, if that has a process now."""
        pid = await self._pid(victim, move)
        if pid and self._is_ours(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.tally.deaths[victim] += 1
        else:
            self.tally.deaths[f"{victim} was dead already"] += 1

    def _is_ours(self, pid: int) -> bool:
        """Whether it is a process of this fleet: labelled so, or a child of its process manager."""
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).ppid() == self.run.summary()["pids"]["supervisord"]:
                return True
        return pid in {process.identity.pid for process in leftovers(self.run.var)}

    async def _pid(self, victim: str, move: Mapping[str, Any]) -> int:
        pids = self.run.summary()["pids"]
        if victim in pids:
            return int(pids[victim])
        _, replica = await self.api("GET", f"/replicas/{move['target' if victim == 'target' else 'source']}")
        if victim != "agent":
            return int(replica.get("pid") or 0)
        _, node = await self.api("GET", f"/nodes/{replica['node']}")
        return int(pids.get(str(node["name"]).replace("node-", "agent-"), 0))


def _completion(model: str, prompt: str) -> dict[str, object]:
    return {
        "model": model, "prompt": prompt, "max_tokens": _ANSWER_TOKENS, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip


class _Life:
    """One session: turns and moves by turns."""

    def __init__(self, fleet: _Fleet, number: int, plan: Plan) -> None:
        self._fleet = fleet
        self._tally = fleet.tally
        self._plan = plan
        self._number = number
        self._generation = 0
        self._drawn = random.Random(f"{plan.seed} {number}")  # noqa: S311 - test data
        self._text = ""

    @property
    def _name(self) -> str:
        return f"moves-{self._number}-{self._generation}"

    async def live(self) -> None:
        await self._turn()
        while self._tally.moves < self._plan.moves:
            await self._move()
            await self._turn()

    async def _turn(self) -> None:
        if len(self._text) > _LONGEST_CHARACTERS:
            self._text, self._generation = "", self._generation + 1
        prompt = self._text + " ".join(self._drawn.choices(_WORDS, k=self._drawn.randint(8, 40))) + ". "
        answer, expected = await asyncio.gather(
            self._fleet.complete(self._name, prompt), self._fleet.twin_says(prompt)
        )
        self._tally.turns += 1
        if answer is None:
            self._tally.lost_sessions += 1
            self._tally.tell(f"{self._name} got no answer in {_TURN_SECONDS:g} s")
        elif answer != expected:
            self._tally.wrong_turns += 1
            self._tally.tell(f"{self._name} got {answer!r} and its twin {expected!r}")
        self._text = prompt + expected

    async def _move(self) -> None:
        status, move = await self._ask_move()
        if status != _ACCEPTED:
            self._tally.outcomes[f"refused: {str(move)[:80]}"] += 1
            await asyncio.sleep(_PAUSE_SECONDS)
            return
        self._tally.moves += 1
        if self._tally.moves % _SAY_EVERY == 0:
            print(f"{self._tally.moves} moves of the whole fleet", file=sys.stderr)
        if self._drawn.random() < self._plan.kill_ratio:
            await asyncio.sleep(self._drawn.uniform(0, _KILL_WITHIN_SECONDS))
            await self._fleet.kill(self._rarest_victim(), move)
        await self._until_over(move["id"])

    def _rarest_victim(self) -> str:
        """One of those that died least often, so that a short run kills each of them."""
        deaths = self._tally.deaths
        least = min(deaths[name] for name in VICTIMS)
        return self._drawn.choice([name for name in VICTIMS if deaths[name] == least])

    async def _ask_move(self) -> tuple[int, Any]:
        """Ask for a move once the record has the session."""
        deadline = time.monotonic() + _SEEN_SECONDS
        while time.monotonic() < deadline:
            _, page = await self._fleet.api("GET", f"/sessions?session_id={self._name}")
            if page.get("results"):
                path = f"/sessions/{page['results'][0]['id']}/move"
                answer: tuple[int, Any] = await self._fleet.api("POST", path, {"reason": "bench"})
                return answer
            await asyncio.sleep(_PAUSE_SECONDS)
        return 0, "not on record"

    async def _until_over(self, move_id: str) -> None:
        deadline = time.monotonic() + _MOVE_SECONDS
        while time.monotonic() < deadline:
            _, row = await self._fleet.api("GET", f"/relocations/{move_id}")
            if row.get("ended_at"):
                self._count(row)
                return
            await asyncio.sleep(_PAUSE_SECONDS)
        self._tally.outcomes["did not end"] += 1
        self._tally.tell(f"the move {move_id} of {self._name} did not end in {_MOVE_SECONDS:g} s")

    def _count(self, row: Mapping[str, Any]) -> None:
        done = row["status"] == "done"
        how = row["way"] if done else str(row["reason"]).split(":")[0][:60]
        self._tally.outcomes[f"{row['status']}: {how}"] += 1
        self._tally.moved_bytes += row["sent_bytes"]
        if done and row["carrier"]:
            self._tally.carriers[row["carrier"]] += 1
