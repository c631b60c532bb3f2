"""The loops that keep one gateway process current, and its orderly end."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from exaserve_ops.adapters.gateway_reports import GatewayReportWriter
from exaserve_ops.adapters.reach_table import ReachWriter
from exaserve_ops.adapters.route_table import RouteTable, RouteTableReader
from exaserve_ops.gateway.reach import ReachProbe
from exaserve_ops.gateway.shared import Shared

_SWEEP_SECONDS = 0.25
_FIGURES_SECONDS = 1.0
_REPORT_SECONDS = 2.0
_CANCEL_AGAIN_SECONDS = 0.2
_LAST_WORDS_SECONDS = 2.0
"""How long clients have to take what is left for them after their requests were given up."""


class DataPlane:
    """Brings the route table in, writes turns out, and ends what takes too long."""

    def __init__(self, shared: Shared, client: redis.asyncio.Redis) -> None:
        self._shared = shared
        self._client = client
        self._table = RouteTable(0)
        """The newest: what it still has in common with the next one needs no taking in again."""
        self.first_table = asyncio.Event()
        """Set once it is known who may ask, and who serves."""
        self._reader = RouteTableReader(
            client, self._on_table, self._on_contact, poll_seconds=shared.settings.poll_seconds
        )
        name = f"{socket.gethostname()}:{shared.settings.port}"
        if shared.settings.process >= 0:
            name = f"{name}/{shared.settings.process}"
        self._name = name
        self._reports = GatewayReportWriter(client)
        self._reach = ReachProbe(
            shared.fleet.slots,
            ReachWriter(client, name),
            shared.waiting.wake_all,
            gateway_name=name,
            clock=shared.clock,
        )

    async def run(self) -> None:
        """Work until cancelled."""
        await asyncio.gather(
            self._reader.run(),
            self._shared.turns.run(),
            self._sweep_for_ever(),
            self._reach.run(),
            self._shared.prefix_news.run(
                self._client, lambda: self._shared.fleet.is_loaded, self._shared.settings.prefix_news_seconds
            ),
            self._write_figures_for_ever(),
            self._report_for_ever(),
        )

    async def drain(self) -> None:
        """Finish open requests for as long as the settings allow, and write the last turns."""
        shared = self._shared
        shared.is_draining = True
        for connection in list(shared.connections):
            connection.drain()
        await self._wait_for_clients(shared.settings.drain_seconds)
        for request in list(shared.open_requests):
            request.give_up_at_exit()
        await self._wait_for_clients(_LAST_WORDS_SECONDS)
        await shared.turns.flush()
        await shared.close()

    async def _wait_for_clients(self, limit_seconds: float) -> None:
        if not self._shared.connections:
            return
        try:
            async with asyncio.timeout(limit_seconds):
                await self._shared.last_client_left.wait()
        except TimeoutError:
            return

    def _on_table(self, table: RouteTable) -> None:
        shared = self._shared
        now = shared.clock()
        if table.dropped:
            self._shared.problems.report("route_records_unreadable", now, count=table.dropped)
        if table.keys is not None and table.keys is not self._table.keys:
            self._shared.keys.replace(table.keys)
        if table.replicas is not None and table.replicas is not self._table.replicas:
            self._shared.fleet.replace(table.replicas, now)
            self._reach.wake()
        self._table = table
        if shared.fleet.is_loaded and shared.keys.loaded:
            self.first_table.set()
        self._shared.fleet.declare_models(table.models, table.coming)
        self._shared.fleet.note_facts(table.facts, now)
        self._shared.waiting.wake_all()

    def _on_contact(self, answered: bool) -> None:  # noqa: FBT001 - a call-back's one argument
        if answered:
            self._shared.contact_seconds = self._shared.clock()
        else:
            self._shared.problems.report("redis_unreachable", self._shared.clock())

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            try:
                self._sweep(self._shared.clock())
            except Exception as error:  # noqa: BLE001 - top of a loop: one fault must not end it
                self._shared.note_fault(error)

    async def _write_figures_for_ever(self) -> None:
        while self._shared.figures:
            self._shared.write_figures()
            await asyncio.sleep(_FIGURES_SECONDS)

    async def _report_for_ever(self) -> None:
        while True:
            report = self._shared.report(self._name)
            try:
                await self._reports.write(report)
            except (OSError, redis.exceptions.RedisError):
                self._shared.problems.report("redis_unreachable", self._shared.clock())
            await asyncio.sleep(_REPORT_SECONDS)

    def _sweep(self, now: float) -> None:
        for connection in list(self._shared.connections):
            connection.sweep(now)
        self._shared.fleet.sweep(now)
        self._shared.quotas.renew()
        self._shared.waiting.wake_all()  # a mark-down may have run out


async def cancel(task: asyncio.Task[None]) -> None:
    """Cancel until it has ended: Python 3.11's `wait_for`, deep in a client, can lose a cancel."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_AGAIN_SECONDS)


def open_redis(url: str) -> redis.asyncio.Redis:
    """Make a client that fails fast and does not retry by itself: every caller has a fall-back."""
    options: dict[str, Any] = {} if url.startswith("unix:") else {"socket_keepalive": True}
    return redis.asyncio.Redis.from_url(
        url,
        decode_responses=False,
        socket_connect_timeout=1.0,
        socket_timeout=5.0,
        health_check_interval=15,
        retry=Retry(NoBackoff(), 0),
        **options,
    )
