"""Engines on the nodes of one benchmark: started, asked, moved between, killed and started again."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.relocation.engines import MODEL, Engine, Launcher, Seat
from bench.relocation.wire import OK, UnansweredError, ask
from workers.kv.pool import NodePools, pools_folder
from workers.protocol.digests import transfer_key

_READY_SECONDS = 120.0
_LAUNCHES = 3
_POLL_SECONDS = 0.02
TURN_SECONDS = 30.0


class HouseError(Exception):
    """An engine did not come up, or did not answer as it must."""


class House:
    """All engines, by replica."""

    def __init__(self, seats: Sequence[Seat]) -> None:
        """Remember who is to run."""
        self.seats = {seat.replica_id: seat for seat in seats}
        self.engines: dict[str, Engine] = {}
        self.restarts = 0
        self._launcher = Launcher()
        self._coming: dict[str, asyncio.Task[None]] = {}

    def serving(self) -> list[Engine]:
        """Engines that answered that they are ready, and that have not ended."""
        return [e for key, e in self.engines.items() if key not in self._coming and e.is_alive]

    def find(self, replica_id: str) -> Engine | None:
        """One of them."""
        engine = self.engines.get(replica_id)
        return engine if engine is not None and replica_id not in self._coming and engine.is_alive else None

    async def start_all(self) -> None:
        """Start everybody. Raises `HouseError`."""
        for seat in self.seats.values():
            self._begin(seat, 1)
        await asyncio.gather(*self._coming.values())

    async def tend(self) -> None:
        """Start whoever has died again, for ever."""
        while True:
            for replica_id, engine in list(self.engines.items()):
                if replica_id not in self._coming and not engine.is_alive:
                    engine.kill()
                    self.restarts += 1
                    self._begin(engine.seat, engine.attempt + 1)
            await asyncio.sleep(_POLL_SECONDS)

    async def until_all_serve(self) -> None:
        """Wait for whoever is being started again. Raises `HouseError`."""
        deadline = time.monotonic() + _READY_SECONDS
        while len(self.serving()) < len(self.seats):
            if time.monotonic() > deadline:
                raise HouseError("not all engines came back")
            await asyncio.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """End everybody, and what they left in shared memory."""
        for engine in self.engines.values():
            engine.kill()
        for folder in {seat.pool_dir for seat in self.seats.values() if seat.pool_dir is not None}:
            NodePools(folder).remove_all()

    def _begin(self, seat: Seat, attempt: int) -> None:
        self._coming[seat.replica_id] = asyncio.create_task(self._bring_up(seat, attempt))

    async def _bring_up(self, seat: Seat, attempt: int) -> None:
        """Start a process until one serves: its port may be somebody else's by the time it binds it."""
        for again in range(_LAUNCHES):
            engine = self._launcher.start(seat, attempt + again)
            self.engines[seat.replica_id] = engine
            if await self._is_ready(engine):
                del self._coming[seat.replica_id]
                return
            engine.kill()
        raise HouseError(f"replica {seat.replica_id} did not come up")

    async def _is_ready(self, engine: Engine) -> bool:
        """Wait until it serves; false if it ends before that, or takes too long."""
        deadline = time.monotonic() + _READY_SECONDS
        while engine.is_alive and time.monotonic() < deadline:
            try:
                status, _ = await ask(engine.address, "GET", "/health", key=engine.api_key, seconds=2.0)
            except UnansweredError:
                status = 0
            if status == OK:
                return True
            await asyncio.sleep(_POLL_SECONDS)
        return False


@asynccontextmanager
async def running(seats: Sequence[Seat]) -> AsyncIterator[House]:
    """Run engines for as long as the block lasts. Raises `HouseError`."""
    house = House(seats)
    try:
        await house.start_all()
        tending = asyncio.create_task(house.tend())
        try:
            yield house
        finally:
            tending.cancel()
    finally:
        house.close()


def node_pools(name: str, fallback: Path) -> Path:
    """Folder of a node's KV pools, which no other run has."""
    return pools_folder(f"bench-{name}-{secrets.token_hex(6)}", fallback)


# -- what is asked of engines ------------------------------------------------------------------------
async def complete(
    engine: Engine, session_id: str, prompt: Sequence[int], max_tokens: int
) -> tuple[list[int], int, float]:
    """Return the tokens of an answer, how many of the prompt were cached, and the seconds it took.

    Raises `UnansweredError` if there is none.
    """
    began = time.monotonic()
    status, told = await ask(
        engine.address,
        "POST",
        "/v1/completions",
        key=engine.api_key,
        headers={"x-session-id": session_id} if session_id else None,
        body={
            "model": MODEL, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        },
        seconds=TURN_SECONDS,
    )  # fmt: skip
    seconds = time.monotonic() - began
    if status != OK:
        raise UnansweredError(f"{status} {told}")
    tokens = [int(token) for token in told["choices"][0]["token_ids"]]
    return tokens, int(told["usage"]["prompt_tokens_details"]["cached_tokens"]), seconds


async def send_session(
    source: Engine, target: Engine, session_id: str, *, bytes_per_second: float = 0.0, seconds: float = 30.0
) -> tuple[int, dict[str, Any]]:
    """Have one engine send a session to another, as its agent would. Raises `UnansweredError`."""
    transfer_id = secrets.token_bytes(16)
    order = {
        "session_id": session_id,
        "transfer_id": transfer_id.hex(),
        "key": transfer_key(target.api_key, transfer_id).hex(),
        "target": f"http://{target.address}",
        "bytes_per_second": bytes_per_second,
    }
    return await ask(source.address, "POST", "/kv/moves", key=source.api_key, body=order, seconds=seconds)


async def let_go(source: Engine, session_id: str) -> None:
    """Tell an engine that a session lives elsewhere. Raises `UnansweredError`."""
    await ask(source.address, "DELETE", f"/kv/sessions/{session_id}", key=source.api_key)
