"""Moves of a benchmark, with a death at any step.

The parts of the controller and of the agent are played here, after `controllers.moves` and
`agent.session_moves`: a record of each move that outlives whoever made it, the order to the source,
its answer, the swap by epoch and turns, and the source's being let go. The engines, their transfer and
the session table are the product's own, and so is what dies of them.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any

from bench.relocation.engines import MODEL, Engine
from bench.relocation.house import House, let_go, send_session
from bench.relocation.store import Store
from bench.relocation.talk import Conversation
from bench.relocation.tally import Tally
from bench.relocation.wire import OK, UnansweredError
from exaserve_ops.adapters.session_table import (
    SessionEntry,
    SessionTable,
    SessionTableUnavailableError,
    owner_digest,
)
from exaserve_ops.sessions.domain.moves import (
    BETWEEN,
    DONE,
    DROPPED,
    FAILED,
    PLANNED,
    SENDING,
    SWITCHING,
    WITHOUT_KV,
)

SOURCE, TARGET, AGENT, CONTROLLER, REDIS, GATEWAY = (
    "source",
    "target",
    "agent",
    "controller",
    "redis",
    "gateway",
)
CONTROLLER_STEPS = ("recorded", "ordered", "answered", "swapped", "finished")
"""After which of its steps a controller dies."""
_MOST_STEPS = 14
"""Calls and answers of an engine in one move, and a few more: then it outlives the move."""
_AGENT_SECONDS = 0.02
_STORE_SECONDS = 0.03
_SWITCH_SECONDS = 10.0
_PAUSE_SECONDS = 0.02


@dataclass(slots=True)
class Record:
    """A move as the record has it: all that the next controller knows."""

    session: Conversation
    name: str
    source: Engine
    target: Engine
    status: str = PLANNED
    reason: str = ""
    owner_epoch: int = 0
    turns: int = 0
    target_tokens: int = 0
    carrier: str = ""
    since: float = 0.0

    def become(self, status: str, reason: str = "") -> None:
        """Go on to another status."""
        self.status, self.reason, self.since = status, reason, time.monotonic()


class _ControllerDiedError(Exception):
    """What it had in its head is gone."""


class Moves:
    """Moves conversations and kills what takes part."""

    def __init__(self, house: House, twin: str, table: SessionTable, store: Store, tally: Tally) -> None:
        """`twin` is the replica that takes no part."""
        self._house = house
        self._twin = twin
        self._table = table
        self._store = store
        self._tally = tally
        self._storing = asyncio.Lock()

    async def move(self, session: Conversation, drawn: random.Random, death: str) -> None:
        """Move a session from where it is to anywhere else; `death` says what dies meanwhile."""
        record = await self._plan(session, drawn)
        if record is None:
            return
        self._tally.moves += 1
        dying = asyncio.create_task(self._kill(record, drawn, death))
        # An engine that is to die at one of the move's steps must know before the first.
        await asyncio.wait({dying}, timeout=None if death in (SOURCE, TARGET) else 0)
        controller_dies_at = drawn.choice(CONTROLLER_STEPS) if death == CONTROLLER else ""
        while record.status in (PLANNED, SENDING, SWITCHING):
            try:
                await self._step(record, drawn, controller_dies_at, agent_dies=death == AGENT)
            except _ControllerDiedError:
                self._tally.deaths[CONTROLLER] += 1
                controller_dies_at = ""
                self._next_controller(record)
        await dying
        await self._defuse(record, death)
        self._count(record)

    async def _plan(self, session: Conversation, drawn: random.Random) -> Record | None:
        name = session.name
        entry = await self._found(name)
        able = [engine for engine in self._house.serving() if engine.seat.replica_id != self._twin]
        sources = [e for e in able if entry and owner_digest(e.seat.replica_id) == entry.owner]
        targets = [e for e in able if e not in sources]
        if not sources or not targets:
            await asyncio.sleep(_PAUSE_SECONDS)
            return None
        return Record(session, name, sources[0], drawn.choice(targets), since=time.monotonic())

    # -- the controller ----------------------------------------------------------------------------
    async def _step(self, record: Record, drawn: random.Random, dies_at: str, *, agent_dies: bool) -> None:
        if record.status == PLANNED:
            await self._start(record)
            self._live_on("recorded", dies_at)
        if record.status == SENDING:
            answer = await self._order(record, drawn, agent_dies=agent_dies)
            self._live_on("ordered", dies_at)
            self._take_answer(record, answer)
            self._live_on("answered", dies_at)
        if record.status == SWITCHING:
            await self._switch(record, dies_at)

    def _live_on(self, step: str, dies_at: str) -> None:
        if step == dies_at:
            raise _ControllerDiedError(step)

    def _next_controller(self, record: Record) -> None:
        """Whether a sending was ordered nobody knows: it ends by its time, which is not waited for."""
        if record.status == SENDING:
            record.become(DROPPED, "nobody answered")

    async def _start(self, record: Record) -> None:
        entry = await self._found(record.name)
        if entry is None or entry.owner != owner_digest(record.source.seat.replica_id):
            record.become(DROPPED, "not at its source")
            return
        record.owner_epoch, record.turns = entry.owner_epoch, entry.turns
        record.become(SENDING)

    def _take_answer(self, record: Record, answer: tuple[int, dict[str, Any]] | None) -> None:
        if answer is None:
            record.become(DROPPED, "nobody answered")
            return
        status, told = answer
        code = "" if status == OK else str(told.get("error", {}).get("code", status))
        if code in WITHOUT_KV:
            record.become(SWITCHING, code)
        elif code:
            record.become(DROPPED if code in BETWEEN else FAILED, code)
        elif told["turn_began"]:
            record.become(DROPPED, "a turn began")
        else:
            record.target_tokens, record.carrier = told["target_tokens"], told["carrier"]
            self._tally.moved_bytes += told["sent_bytes"]
            record.become(SWITCHING)

    async def _switch(self, record: Record, dies_at: str) -> None:
        if time.monotonic() - record.since > _SWITCH_SECONDS:
            record.become(DROPPED, "switching for too long")
            return
        target = owner_digest(record.target.seat.replica_id)
        try:
            entry = await self._table.found(MODEL, record.name)
            expected = (entry.owner_epoch, entry.turns) == (record.owner_epoch, record.turns)
            if expected and self._house.find(record.target.seat.replica_id) is not None:
                entry = await self._table.repinned(
                    MODEL, record.name, record.target.seat.replica_id, record.owner_epoch,
                    expected_turns=record.turns,
                )  # fmt: skip
                self._tally.swaps_during_turns += entry.owner == target and record.session.open_turns > 0
                self._live_on("swapped", dies_at)
        except SessionTableUnavailableError:
            await asyncio.sleep(_PAUSE_SECONDS)
            return
        if (entry.owner, entry.owner_epoch) != (target, record.owner_epoch + 1):
            record.become(DROPPED, "a turn, a gateway or a death came between")
            return
        record.become(DONE, "with its KV" if record.target_tokens else "without KV")
        record.session.moved_tokens = record.target_tokens
        if dies_at != "finished":
            await self._let_go(record)
        else:
            self._tally.deaths[CONTROLLER] += 1

    async def _let_go(self, record: Record) -> None:
        try:
            await let_go(record.source, record.name)
        except UnansweredError:
            return  # it died: there is nothing left to let go

    # -- the agent -----------------------------------------------------------------------------------
    async def _order(
        self, record: Record, drawn: random.Random, *, agent_dies: bool
    ) -> tuple[int, dict[str, Any]] | None:
        """Have the source send; `None` if nobody lives to tell what came of it."""
        sending = asyncio.create_task(send_session(record.source, record.target, record.name))
        if agent_dies:
            await asyncio.wait({sending}, timeout=drawn.uniform(0, _AGENT_SECONDS))
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            self._tally.deaths[AGENT] += 1
            return None
        try:
            return await sending
        except UnansweredError:
            return 502, {"error": {"code": "engine_unreachable"}}

    # -- deaths --------------------------------------------------------------------------------------
    async def _kill(self, record: Record, drawn: random.Random, death: str) -> None:
        if death in (SOURCE, TARGET):
            victim = record.source if death == SOURCE else record.target
            step = drawn.randint(1, _MOST_STEPS)
            if await asyncio.to_thread(victim.die_at, step):
                self._tally.death_steps[f"{death} {step:02d}"] += 1
        elif death == REDIS and not self._storing.locked():
            async with self._storing:
                await asyncio.sleep(drawn.uniform(0, _STORE_SECONDS))
                await self._store.die()
                self._tally.deaths[REDIS] += 1

    async def _defuse(self, record: Record, death: str) -> None:
        """Count an engine that died; one that was to, and did not get that far, lives on."""
        if death not in (SOURCE, TARGET):
            return
        victim = record.source if death == SOURCE else record.target
        if await asyncio.to_thread(victim.die_at, 0):
            self._tally.deaths[f"{death} outlived the move"] += 1
        else:
            self._tally.deaths[death] += 1

    # -- the rest ------------------------------------------------------------------------------------
    async def _found(self, name: str) -> SessionEntry | None:
        try:
            entry = await self._table.found(MODEL, name)
        except SessionTableUnavailableError:
            return None
        return entry if entry.owner_epoch else None

    def _count(self, record: Record) -> None:
        self._tally.outcomes[f"{record.status}: {record.reason}"] += 1
        if record.carrier and record.status == DONE:
            self._tally.carriers[record.carrier] += 1
