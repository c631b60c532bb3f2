"""What the connections and exchanges of one gateway process share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from exaserve_ops.adapters import turn_log
from exaserve_ops.adapters.api_key_table import ApiKeyTable
from exaserve_ops.adapters.prefix_news import PrefixNews
from exaserve_ops.adapters.quota_table import QuotaTable
from exaserve_ops.adapters.resp_link import RespLink
from exaserve_ops.adapters.session_table import SessionTable
from exaserve_ops.adapters.turn_log import TurnLog
from exaserve_ops.gateway.admission import Admission
from exaserve_ops.gateway.continuation import ContinuationDesk
from exaserve_ops.gateway.counters import Counters, Family, Gauges, families_of, render
from exaserve_ops.gateway.familiar import FamiliarHeads
from exaserve_ops.gateway.fleet import Fleet
from exaserve_ops.gateway.headers import Roles
from exaserve_ops.gateway.outbox import Outbox
from exaserve_ops.gateway.problems import Problems
from exaserve_ops.gateway.processes import SharedFigures
from exaserve_ops.gateway.quotas import QuotaDesk
from exaserve_ops.gateway.recent import RecentTurns
from exaserve_ops.gateway.router import Bounds, Router
from exaserve_ops.gateway.settings import GatewaySettings
from exaserve_ops.gateway.waiting import Queue, WaitingRoom
from exaserve_ops.routing.domain.records import GatewayReport

_POLLS_TO_STALE = 2.5
"""Without an answer for so many polls the table is called stale."""

_log = logging.getLogger("exaserve_ops.gateway")


class Connection(Protocol):
    """A client's connection, to those who look after all of them."""

    def sweep(self, now: float) -> None:
        """End what takes too long."""

    def drain(self) -> None:
        """Take no further request."""


class OpenRequest(Protocol):
    """A request that has not ended."""

    def give_up_at_exit(self) -> None:
        """End now, because the process does."""


class Shared:
    """State of one gateway process. Everything runs in one event loop, so nothing is locked."""

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.wall_clock = wall_clock
        self.open_requests: set[OpenRequest] = set()
        self.outbox = Outbox(self.open_requests)
        self.fleet = Fleet(settings, self.outbox)
        self.keys = ApiKeyTable()
        session_headers = settings.session_header_names
        self.roles = Roles(session_headers)
        self.admission = Admission(
            self.keys,
            body_bytes=settings.body_bytes,
            session_headers=session_headers,
            continues=settings.continue_streams,
        )
        self.heads = FamiliarHeads(self.roles, self.admission, session_headers)
        self.waiting = WaitingRoom(settings.wait_requests)
        self.counters = Counters()
        self._recent = RecentTurns(self.counters, clock())
        self.continuations = ContinuationDesk(settings, self.counters, clock)
        self.problems = Problems()
        self.turn_link = RespLink(settings.redis_url, answer_seconds=turn_log.ANSWER_SECONDS)
        self.turns = TurnLog(self.turn_link)
        self.session_link = RespLink(settings.redis_url, answer_seconds=settings.session_answer_seconds)
        self.sessions = SessionTable(self.session_link, ttl_seconds=settings.session_seconds)
        self.quotas = QuotaDesk(QuotaTable(self.session_link), clock=clock)
        self.prefix_news = PrefixNews(self._hear, clock=clock)
        self.router = Router(
            self.fleet,
            self.sessions,
            bounds=Bounds(
                settings.in_flight_per_replica,
                settings.batch_in_flight_per_replica,
                settings.long_prompts_per_replica,
                settings.long_prompt_tokens,
                settings.long_prompt_share,
            ),
            is_overtaking=self.waiting.holds_interactive,
            tell=self.prefix_news.add,
            clock=clock,
        )
        self.figures = SharedFigures(settings.figures, settings.process) if settings.figures else None
        self.connections: set[Connection] = set()
        self.is_draining = False
        self.last_client_left = asyncio.Event()
        """Set when, while draining, no client is connected any more."""
        self.contact_seconds: float | None = None
        """When Redis last answered."""
        self._started_at_unix_seconds = int(wall_clock())
        self._faults = 0

    def _hear(self, owner: bytes, digests: Sequence[bytes], at_seconds: float) -> None:
        self.router.hear(owner, digests, at_seconds)

    async def close(self) -> None:
        """Hang up on engines and on Redis."""
        self.fleet.close()
        await self.session_link.close()
        await self.turn_link.close()

    def add_connection(self, connection: Connection) -> bool:
        """Count a client in. Returns false if there are too many."""
        if len(self.connections) >= self.settings.connections:
            self.problems.report("connections_exhausted", self.clock())
            return False
        self.connections.add(connection)
        return True

    def drop_connection(self, connection: Connection) -> None:
        """Count a client out."""
        self.connections.discard(connection)
        if self.is_draining and not self.connections:
            self.last_client_left.set()

    def note_fault(self, error: BaseException) -> None:
        """A fault of ours: log its traceback."""
        self._faults += 1
        _log.error("event=fault count=%d", self._faults, exc_info=error)

    def render_models(self) -> bytes:
        """Body of the list of models, from the gateway's own table."""
        models = [self._describe_model(name) for name in self.fleet.models()]
        return msgspec.json.encode({"object": "list", "data": models})

    def render_model(self, name: str) -> bytes | None:
        """Body that describes one model; `None` for one that nothing here serves."""
        return msgspec.json.encode(self._describe_model(name)) if name in self.fleet.models() else None

    def _describe_model(self, name: str) -> dict[str, str | int]:
        return {
            "id": name,
            "object": "model",
            "created": self._started_at_unix_seconds,
            "owned_by": "exaserve-ops",
        }

    def render_metrics(self) -> bytes:
        """Body of the page for Prometheus; where there are several processes, of all of them."""
        others = self.figures.others(self.wall_clock()) if self.figures else []
        return render(self._families(), *others)

    def report(self, name: str) -> GatewayReport:
        """What is shown of this gateway beside others."""
        returning, sticky, seconds = self._recent.look(self.clock())
        age = self._table_age()
        return GatewayReport(
            gateway=name,
            returning_turns=returning,
            sticky_turns=sticky,
            window_seconds=seconds,
            open_requests=len(self.open_requests),
            waiting_requests=len(self.waiting),
            route_table_age_seconds=age,
            is_route_table_stale=self._is_stale(age),
            session_table_failures=self.router.session_failures,
        )

    def _table_age(self) -> float | None:
        return None if self.contact_seconds is None else self.clock() - self.contact_seconds

    def _is_stale(self, age_seconds: float | None) -> bool:
        return age_seconds is None or age_seconds > self.settings.poll_seconds * _POLLS_TO_STALE

    def write_figures(self) -> None:
        """Leave our figures where the processes beside us find them."""
        if self.figures:
            self.figures.write(self._families())

    def _families(self) -> list[Family]:
        age = self._table_age()
        returning, sticky, _ = self._recent.look(self.clock())
        gauges = Gauges(
            slots=self.fleet.slots(),
            open_requests=len(self.open_requests),
            waiting_requests=len(self.waiting),
            waiting_long_prompts=self.waiting.waiting_in(Queue.LONG),
            known_beginnings=self.router.known_beginnings,
            beginnings_untold=self.prefix_news.dropped,
            connections=len(self.connections),
            table_age_seconds=age,
            is_table_stale=self._is_stale(age),
            recent_sticky_ratio=sticky / returning if returning else None,
            kept_tokens=self.continuations.budget.kept,
            turns_dropped=self.turns.dropped,
            session_table_failures=self.router.session_failures,
        )
        return families_of(self.counters, gauges, str(self.settings.process) if self.figures else "")
