"""What a move costs against staying and against computing the context again, on an otherwise idle fleet.

Three engines of one model: two on one node's memory, and one with memory of its own, which stands for
another node. The line between is the loopback: the machine's own TCP, without a network card.
"""

from __future__ import annotations

import random
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.engines.made_model import VOCABULARY, make_model
from bench.relocation.engines import Engine, Seat
from bench.relocation.house import House, HouseError, complete, let_go, node_pools, running, send_session
from bench.relocation.wire import OK

_BLOCKS = 600
_MORE_TOKENS = 24
_MEASURED_BYTES = 256 << 20
_PIECE_BYTES = 1 << 20
_TRIES = 3
CARRIERS = {"shared_memory": "near", "tcp": "far"}
"""By the replica that is moved to."""


@dataclass(slots=True)
class _Found:
    """Samples of one kind of move."""

    bytes: list[int] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    send_seconds: list[float] = field(default_factory=list)
    moved_ms: list[float] = field(default_factory=list)
    """To the first token of the next turn."""
    stayed_ms: list[float] = field(default_factory=list)
    recomputed_ms: list[float] = field(default_factory=list)


async def measure(folder: Path, *, tokens: int, sessions: int) -> dict[str, Any]:
    """Move sessions of so many tokens each way. Raises `HouseError`, `UnansweredError`."""
    model = folder / "model"
    model.mkdir()
    make_model(model, seed=5, dtype="float32")
    pool = node_pools("near", folder)
    seats = [
        Seat("here", "n1", model, folder / "weights", _BLOCKS, pool),
        Seat("near", "n1", model, folder / "weights", _BLOCKS, pool),
        Seat("far", "n2", model, folder / "weights", _BLOCKS),
    ]
    line, memory = _best(_loopback), _best(_memory)
    numbers = random.Random(11)  # noqa: S311 - test data
    async with running(seats) as house:
        found = {carrier: _Found() for carrier in CARRIERS}
        for number in range(sessions):
            for carrier, target in CARRIERS.items():
                prompt = [numbers.randrange(VOCABULARY) for _ in range(tokens)]
                await _one(house, f"{carrier}-{number}", prompt, target, found[carrier])
    return {
        "context_tokens": tokens,
        "sessions_each": sessions,
        "loopback_bytes_per_second": round(line),
        "memcpy_bytes_per_second": round(memory),
        "tcp": _summary(found["tcp"]) | {"line_ratio": _ratio(found["tcp"], line)},
        "shared_memory": _summary(found["shared_memory"])
        | {"memory_ratio": _ratio(found["shared_memory"], memory)},
    }


async def _one(house: House, name: str, prompt: list[int], target: str, found: _Found) -> None:
    source, there = _engine(house, "here"), _engine(house, target)
    answer, _, _ = await complete(source, name, prompt, 1)
    following = [*prompt, *answer, *(token % VOCABULARY for token in range(_MORE_TOKENS))]
    # Somebody else's name: the next turn of a session that was not moved, on an engine that has it not.
    found.recomputed_ms.append(await _first_token_ms(there, f"{name}-other", _unlike(following), cached=0))
    began = time.monotonic()
    status, told = await send_session(source, there, name)
    found.milliseconds.append((time.monotonic() - began) * 1e3)
    if status != OK or CARRIERS[told["carrier"]] != target:
        raise HouseError(f"the move went wrong: {status} {told}")
    found.bytes.append(told["sent_bytes"])
    found.send_seconds.append(told["send_seconds"])
    whole = told["target_tokens"]
    found.stayed_ms.append(await _first_token_ms(source, name, following, cached=whole))
    found.moved_ms.append(await _first_token_ms(there, name, following, cached=whole))
    await let_go(source, name)
    await let_go(there, name)


def _unlike(prompt: Sequence[int]) -> list[int]:
    """As long and as dear to compute, and nothing in common."""
    return [VOCABULARY - 1 - token for token in prompt]


async def _first_token_ms(engine: Engine, session: str, prompt: Sequence[int], *, cached: int) -> float:
    _, found, seconds = await complete(engine, session, prompt, 1)
    if not cached <= found <= cached + _MORE_TOKENS:
        raise HouseError(f"{found} tokens were cached where {cached} should be")
    return seconds * 1e3


def _engine(house: House, replica_id: str) -> Engine:
    engine = house.find(replica_id)
    if engine is None:
        raise HouseError(f"{replica_id} does not run")
    return engine


def _summary(found: _Found) -> dict[str, Any]:
    def median(values: Sequence[float]) -> float:
        return round(statistics.median(values), 2)

    moved, stayed, computed = map(median, (found.moved_ms, found.stayed_ms, found.recomputed_ms))
    milliseconds = median(found.milliseconds)
    return {
        "bytes": round(statistics.median(found.bytes)),
        "milliseconds": milliseconds,
        "bytes_per_second": round(_speed(found)),
        "next_turn_ms_after_move": moved,
        "next_turn_ms_stayed": stayed,
        "next_turn_ms_recomputed": computed,
        "move_and_turn_against_recompute": round((milliseconds + moved) / computed, 4),
    }


def _speed(found: _Found) -> float:
    return sum(found.bytes) / sum(found.send_seconds)


def _ratio(found: _Found, limit: float) -> float:
    return round(_speed(found) / limit, 4)


# -- what the machine could do -----------------------------------------------------------------------
def _best(measured: Callable[[], float]) -> float:
    return max(measured() for _ in range(_TRIES))


def _memory() -> float:
    """Bytes a second that one core copies, of a buffer that no cache holds."""
    source = np.ones(_MEASURED_BYTES, np.uint8)
    target = np.zeros_like(source)
    began = time.monotonic()
    np.copyto(target, source)
    return _MEASURED_BYTES / (time.monotonic() - began)


def _loopback() -> float:
    """Bytes a second that one TCP connection to ourselves carries."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sending = threading.Thread(target=_send_all, args=(server.getsockname(),))
        sending.start()
        connection, _ = server.accept()
        into, left = memoryview(bytearray(_PIECE_BYTES)), _MEASURED_BYTES
        began = time.monotonic()
        with connection:
            while left:
                left -= connection.recv_into(into[: min(left, _PIECE_BYTES)])
        seconds = time.monotonic() - began
        sending.join()
    return _MEASURED_BYTES / seconds


def _send_all(address: tuple[str, int]) -> None:
    piece = bytes(_PIECE_BYTES)
    with socket.create_connection(address) as connection:
        for _ in range(_MEASURED_BYTES // _PIECE_BYTES):
            connection.sendall(piece)
