"""Many moves while engines and the store are killed: nothing may be lost, and no token may differ."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.relocation.engines import Seat
from bench.relocation.house import node_pools, running
from bench.relocation.moves import AGENT, CONTROLLER, GATEWAY, REDIS, SOURCE, TARGET, Moves
from bench.relocation.store import running_store
from bench.relocation.talk import Conversation, Talk
from bench.relocation.tally import Tally
from exaserve_ops.adapters.resp_link import RespLink
from exaserve_ops.adapters.session_table import SessionTable
from workers.engines.demo_model import make_demo_model

_TWIN = "twin"
_NODES = ("a", "b")
_REPLICAS = 2
_BLOCKS = 768
_TWIN_BLOCKS = 1024
_TURN_MEANWHILE_RATIO = 0.2
_TURN_SECONDS = 0.02
_SAY_EVERY = 500
_REAL = "engine processes, KV pools, transfers, session table, its store; engines and store die by SIGKILL"
_PLAYED = "controller, agent, gateway, after the product's own: one that dies forgets what it knew"
DEATHS: Mapping[str, float] = {
    SOURCE: 0.03, TARGET: 0.03, AGENT: 0.03, CONTROLLER: 0.05, GATEWAY: 0.03, REDIS: 0.004,
}  # fmt: skip
"""How often each dies, of all moves."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much, and by which seed."""

    moves: int
    sessions: int = 16
    seed: int = 1


async def measure(folder: Path, plan: Plan) -> dict[str, Any]:
    """Move until it is enough, and then have one last turn of each session. Raises `HouseError`."""
    model = folder / "demo"
    make_demo_model(model)
    tally = Tally()
    began = time.monotonic()
    with running_store(folder / "store") as store:
        async with running(_seats(folder, model)) as house:
            link = RespLink(store.url, answer_seconds=2.0)
            table = SessionTable(link)
            talk = Talk(house, _TWIN, table, tally)
            moves = Moves(house, _TWIN, table, store, tally)
            lives = [
                _Life(Conversation(n, random.Random(f"{plan.seed} {n}")), talk, moves, tally)  # noqa: S311
                for n in range(plan.sessions)
            ]
            await asyncio.gather(*(life.live(plan.moves) for life in lives))
            await house.until_all_serve()
            await asyncio.gather(*(talk.turn(life.session) for life in lives))
            await link.close()
            restarts = house.restarts
    return tally.report() | {
        "engine_restarts": restarts,
        "sessions": plan.sessions,
        "seed": plan.seed,
        "seconds": round(time.monotonic() - began, 1),
        "real": _REAL,
        "played": _PLAYED,
    }


def _seats(folder: Path, model: Path) -> list[Seat]:
    weights = folder / "weights"
    seats = [
        Seat(f"{node}{number}", node, model, weights, _BLOCKS, pool)
        for node, pool in ((node, node_pools(node, folder / node)) for node in _NODES)
        for number in range(_REPLICAS)
    ]
    return [*seats, Seat(_TWIN, _TWIN, model, weights, _TWIN_BLOCKS)]


@dataclass(slots=True)
class _Life:
    """One session's, from its first turn to its last move."""

    session: Conversation
    talk: Talk
    moves: Moves
    tally: Tally

    async def live(self, moves: int) -> None:
        await self.talk.turn(self.session)
        while self.tally.moves < moves:
            before = self.tally.moves
            await self._move_and_talk()
            if before // _SAY_EVERY != self.tally.moves // _SAY_EVERY:
                print(f"{self.tally.moves} moves, {self.tally.turns} turns", file=sys.stderr)

    async def _move_and_talk(self) -> None:
        drawn = self.session.drawn
        death = drawn.choices([*DEATHS, ""], [*DEATHS.values(), 1 - sum(DEATHS.values())])[0]
        moving = asyncio.create_task(self.moves.move(self.session, drawn, death))
        if drawn.random() < _TURN_MEANWHILE_RATIO:
            await asyncio.wait({moving}, timeout=drawn.uniform(0, _TURN_SECONDS))
            self.tally.turns_during_moves += not moving.done()
            await self.talk.turn(self.session)
        await moving
        await self.talk.turn(self.session, gateway_dies=death == GATEWAY)
