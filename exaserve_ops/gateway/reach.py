"""Tries every replica's port now and then, so that one out of reach shows before a request fails.

Only a TCP connect: whether the engine is well is its agent's business. A replica is tried when it
is new in the table, and again and again while it cannot be reached.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from exaserve_ops.routing.domain.records import RouteRecord

TRY_SECONDS = 2.0
CONNECT_SECONDS = 2.0
TRIES_AT_ONCE = 64
FAILURES_UNTIL_SAID = 2
"""One refused connect is a replica that just ended; its agent says so within a second."""

_log = logging.getLogger(__name__)
_Place = tuple[str, str, int]


class ReachLog(Protocol):
    """Where reasons go."""

    async def write(self, unreachable: Mapping[str, str], /) -> None:
        """Replace what this gateway said."""
        ...


class Candidate(Protocol):
    """A replica in the table, as the data plane keeps it."""

    record: RouteRecord

    @property
    def failed_at_seconds(self) -> float:
        """Monotonic time of the last failure, 0 if there was none."""
        ...


class ReachProbe:
    """Runs beside the data plane; reads its table, changes nothing of it."""

    def __init__(
        self,
        candidates: Callable[[], Iterable[Candidate]],
        log: ReachLog,
        *,
        gateway_name: str,
        clock: Callable[[], float],
    ) -> None:
        self._candidates = candidates
        self._log = log
        self._gateway_name = gateway_name
        self._clock = clock
        self._reached_at: dict[_Place, float] = {}
        self._failures: dict[_Place, int] = {}
        self._said_any = False
        self.failures = 0
        """How many steps failed, as while Redis is away."""

    async def run(self) -> None:
        """Try and tell until cancelled."""
        while True:
            try:
                await self.step()
            except Exception as error:  # noqa: BLE001 - a loop's top: it must not end the gateway
                self.failures += 1
                if self.failures & (self.failures - 1) == 0:  # Redis may be away for long
                    _log.warning("event=reach_probe_failed count=%d error=%r", self.failures, error)
            await asyncio.sleep(TRY_SECONDS)

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
        results = await asyncio.gather(*(self._attempt(place, gate) for place in due))
        said = {place[0]: reason for place, reason in zip(due, results, strict=True) if reason}
        if said or self._said_any:
            await self._log.write(said)
        self._said_any = bool(said)

    async def _attempt(self, place: _Place, gate: asyncio.Semaphore) -> str:
        """Returns what to say of this one: nothing where it can be reached, or failed just once."""
        _, host, port = place
        async with gate:
            started_at = self._clock()
            reason = await try_connect(host, port)
        if not reason:
            self._reached_at[place] = started_at
            self._failures.pop(place, None)
            return ""
        self._failures[place] = self._failures.get(place, 0) + 1
        if self._failures[place] < FAILURES_UNTIL_SAID:
            return ""
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
    return (record.replica_id, record.host, record.port)
