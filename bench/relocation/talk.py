"""Conversations of a benchmark: each turn through the session table, compared with a twin that never moves.

A gateway's part is played here: look the session up, go to its owner, choose another one where that is
gone, and tell the table. The table, its script and the engines are the product's own.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.relocation.engines import MODEL, Engine
from bench.relocation.house import TURN_SECONDS, House, complete
from bench.relocation.tally import Tally
from bench.relocation.wire import UnansweredError
from exaserve_ops.adapters.session_table import (
    NOBODY,
    SessionEntry,
    SessionTable,
    SessionTableUnavailableError,
    owner_digest,
)

_ANSWER_TOKENS = 6
_FIRST_TOKENS = (40, 240)
_MORE_TOKENS = (4, 40)
_LONGEST_TOKENS = 600
_VOCABULARY = 256
_PAUSE_SECONDS = 0.05


@dataclass(slots=True)
class Conversation:
    """One session: what was said, and how many turns of it are open."""

    number: int
    drawn: random.Random
    tokens: list[int] = field(default_factory=list)
    generation: int = 0
    open_turns: int = 0
    moved_tokens: int = 0
    """Of its context, that the last move brought to where it is now; until its next turn."""

    @property
    def name(self) -> str:
        """Its id, as a client would give it."""
        return f"session-{self.number}-{self.generation}"

    def next_prompt(self) -> list[int]:
        """What the next turn asks: all that was said, and something new. A long one starts anew."""
        if not self.tokens or len(self.tokens) > _LONGEST_TOKENS:
            self.generation += 1
            self.moved_tokens = 0
            self.tokens = [
                self.drawn.randrange(_VOCABULARY) for _ in range(self.drawn.randint(*_FIRST_TOKENS))
            ]
            return self.tokens
        more = [self.drawn.randrange(_VOCABULARY) for _ in range(self.drawn.randint(*_MORE_TOKENS))]
        return self.tokens + more


class Talk:
    """Has conversations on a house of engines."""

    def __init__(self, house: House, twin: str, table: SessionTable, tally: Tally) -> None:
        """`twin` is the replica that serves nobody but the twins, and neither moves nor dies."""
        self._house = house
        self._twin = twin
        self._table = table
        self._tally = tally

    async def turn(self, session: Conversation, *, gateway_dies: bool = False) -> None:
        """Have one turn. With `gateway_dies`, the one that it is asked through dies meanwhile."""
        prompt = session.next_prompt()
        told = asyncio.create_task(self._twin_says(prompt))
        if gateway_dies:
            await self._ask_in_vain(session, prompt)
        answer = await self._ask(session, prompt)
        expected = await told
        self._tally.turns += 1
        if answer is None:
            self._tally.lost_sessions += 1
            self._tally.tell(f"{session.name} got no answer in {TURN_SECONDS:g} s")
        elif answer != expected:
            self._tally.wrong_turns += 1
            self._tally.tell(f"{session.name} at {len(prompt)} tokens got {answer} and its twin {expected}")
        session.tokens = prompt + expected

    async def _twin_says(self, prompt: Sequence[int]) -> list[int]:
        twin = self._house.find(self._twin)
        if twin is None:
            raise UnansweredError("the twin does not run")
        return (await complete(twin, "", prompt, _ANSWER_TOKENS))[0]

    async def _ask_in_vain(self, session: Conversation, prompt: Sequence[int]) -> None:
        """Ask through a gateway that dies within some milliseconds."""
        self._tally.deaths["gateway"] += 1
        asking = asyncio.create_task(self._ask(session, prompt))
        await asyncio.wait({asking}, timeout=session.drawn.uniform(0, 0.03))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        self._tally.retried_turns += 1

    async def _ask(self, session: Conversation, prompt: Sequence[int]) -> list[int] | None:
        entry = await self._look(session)
        session.open_turns += 1
        try:
            return await self._serve(session, prompt, entry)
        finally:
            session.open_turns -= 1

    async def _serve(
        self, session: Conversation, prompt: Sequence[int], entry: SessionEntry | None
    ) -> list[int] | None:
        """Have it answered, by others where one dies of it; `None` if nobody does in time."""
        deadline = time.monotonic() + TURN_SECONDS
        tried: set[str] = set()
        while time.monotonic() < deadline:
            engine = await self._route(session, entry, tried)
            if engine is None:
                tried.clear()
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            try:
                answer, cached, _ = await complete(engine, session.name, prompt, _ANSWER_TOKENS)
            except UnansweredError:
                self._tally.retried_turns += 1
                tried.add(engine.seat.replica_id)
                entry = await self._look(session, counts=False)
                continue
            self._note_cached(session, cached)
            return answer
        return None

    def _note_cached(self, session: Conversation, cached: int) -> None:
        if session.moved_tokens:
            self._tally.after_move_tokens["cached"] += min(cached, session.moved_tokens)
            self._tally.after_move_tokens["computed"] += max(0, session.moved_tokens - cached)
            session.moved_tokens = 0

    async def _look(self, session: Conversation, *, counts: bool = True) -> SessionEntry | None:
        """Return the session's entry; `None` if the table has none, or is away."""
        try:
            entry = await (self._count(session) if counts else self._table.found(MODEL, session.name))
        except SessionTableUnavailableError:
            return None
        return entry if entry.owner_epoch else None

    async def _count(self, session: Conversation) -> SessionEntry:
        """Count a turn, as gateways do before they choose. Raises `SessionTableUnavailableError`."""
        answer: asyncio.Future[SessionEntry | None] = asyncio.get_running_loop().create_future()
        self._table.claim(MODEL, session.name, NOBODY, answer.set_result)
        entry = await asyncio.shield(answer)
        if entry is None:
            raise SessionTableUnavailableError("no entry")
        return entry

    async def _route(
        self, session: Conversation, entry: SessionEntry | None, tried: set[str]
    ) -> Engine | None:
        """Its owner while that serves, else another one, which the table is told of."""
        able = [
            engine
            for engine in self._house.serving()
            if engine.seat.replica_id not in tried and engine.seat.replica_id != self._twin
        ]
        if entry is not None:
            for engine in able:
                if owner_digest(engine.seat.replica_id) == entry.owner:
                    return engine
        if not able:
            return None
        chosen = max(able, key=lambda engine: _weight(engine, session))
        try:
            if entry is None:
                after = await self._table.claimed(MODEL, session.name, chosen.seat.replica_id)
            else:
                after = await self._table.repinned(
                    MODEL, session.name, chosen.seat.replica_id, entry.owner_epoch
                )
        except SessionTableUnavailableError:
            return chosen
        session.moved_tokens = 0
        return next((e for e in able if owner_digest(e.seat.replica_id) == after.owner), chosen)


def _weight(engine: Engine, session: Conversation) -> bytes:
    """Of a replica for a session: the largest is its place where there is no table."""
    return hashlib.blake2b(f"{engine.seat.replica_id} {session.name}".encode()).digest()
