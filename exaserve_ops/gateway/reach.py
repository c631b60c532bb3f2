"""Tries every replica's port before a request is sent there, and says what it cannot reach.

Only a TCP connect: whether the engine is well is its agent's business. A replica is tried as soon as it
is new in the table, and again and again while it cannot be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from exaserve_ops.adapters.reach_table import place_token
from exaserve_ops.routing.domain.records import RouteRecord

TRY_SECONDS = 2.0
CONNECT_SECONDS = 2.0
TRIES_AT_ONCE = 64
FAILURES_UNTIL_SAID = 2
"""One refused connect is a replica that just ended; its agent says so within a second."""

_log = logging.getLogger(__name__)
_MOST_PART_OF_TIME = 0.2
"""A table that changes all the time must not keep the gateway at looking through it."""
_LEAST_PAUSE_SECONDS = 0.05
_Place = tuple[str, int, str, int]


class ReachLog(Protocol):
    """Where reasons go."""

    async def write(self, unreachable: Mapping[str, str], reached: frozenset[str], /) -> None:
        """Replace what this gateway said, and say that it lives."""
        ...


class Candidate(Protocol):
    """A replica in the table, as the data plane keeps it."""

    record: RouteRecord
    reach: bool | None
    """Whether this gateway could connect to it; `None` before it has tried."""

    @property
    def failed_at_seconds(self) -> float:
        """Monotonic time of the last failure, 0 if there was none."""
        ...


class ReachProbe:
    """Runs beside the data plane; of its table it changes nothing but each replica's `reach`."""

    def __init__(
        self,
        candidates: Callable[[], Iterable[Candidate]],
        log: ReachLog,
        on_reached: Callable[[], None],
        *,
        gateway_name: str,
        clock: Callable[[], float],
    ) -> None:
        self._candidates = candidates
        self._log = log
        self._on_reached = on_reached
        self._woken = asyncio.Event()
        self._gateway_name = gateway_name
        self._clock = clock
        self._reached_at: dict[_Place, float] = {}
        self._failures: dict[_Place, int] = {}
        self.failures = 0
        """How many steps failed, as while Redis is away."""

    async def run(self) -> None:
        """Try and tell until cancelled."""
        while True:
            started_at = self._clock()
            self._woken.clear()
            try:
                await self.step()
            except Exception as error:  # noqa: BLE001 - a loop's top: it must not end the gateway
                self.failures += 1
                if self.failures & (self.failures - 1) == 0:  # Redis may be away for long
                    _log.warning("event=reach_probe_failed count=%d error=%r", self.failures, error)
            took = self._clock() - started_at
            await asyncio.sleep(max(_LEAST_PAUSE_SECONDS, took / _MOST_PART_OF_TIME - took))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TRY_SECONDS):
                    await self._woken.wait()

    def wake(self) -> None:
        """The table has changed: try what is new."""
        self._woken.set()

    async def step(self) -> None:
        """Try what is new, was out of reach or failed a request since, and say what is out of reach."""
        candidates = {_place(candidate.record): candidate for candidate in self._candidates()}
        self._reached_at = {p: at for p, at in self._reached_at.items() if p in candidates}
        self._failures = {p: count for p, count in self._failures.items() if p in candidates}
        due = [
            place
            for place, candidate in candidates.items()
            if candidate.failed_at_seconds >= self._reached_at.get(place, 0.0)
        ]
        gate = asyncio.Semaphore(TRIES_AT_ONCE)
        results = await asyncio.gather(*(self._attempt(place, candidates[place], gate) for place in due))
        said = {place[0]: reason for place, reason in zip(due, results, strict=True) if reason}
        await self._log.write(said, frozenset(map(_token, self._reached_at)))

    async def _attempt(self, place: _Place, candidate: Candidate, gate: asyncio.Semaphore) -> str:
        """Returns what to say of this one: nothing where it can be reached, or failed just once."""
        _, _, host, port = place
        async with gate:
            started_at = self._clock()
            reason = await try_connect(host, port)
        if not reason:
            self._reached_at[place] = started_at
            self._failures.pop(place, None)
            if not candidate.reach:
                candidate.reach = True
                self._on_reached()
            return ""
        self._failures[place] = self._failures.get(place, 0) + 1
        if self._failures[place] < FAILURES_UNTIL_SAID:
            return ""
        self._reached_at.pop(place, None)
        if candidate.reach is None:
            candidate.reach = False  # once reached, its own failures mark it down, and may be its load
        return f"port {port} unreachable from gateway {self._gateway_name}: {reason}"


async def try_connect(host: str, port: int) -> str:
    """Connect and hang up. Returns why not, or nothing."""
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"no answer within {CONNECT_SECONDS:.0f} s"
    except OSError as error:
        return error.strerror or str(error)
    writer.close()
    return ""


def _place(record: RouteRecord) -> _Place:
    return (record.replica_id, record.attempt, record.host, record.port)


def _token(place: _Place) -> str:
    replica_id, attempt, _, port = place
    return place_token(replica_id, attempt, port)
