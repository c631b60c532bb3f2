"""The route table as a gateway sees it: read by the gateways' own reader, at the same announcements."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import redis.asyncio

from bench.failing.record import TableChange
from bench.fleet_run import FleetRun, FleetRunError
from exaserve_ops.adapters.processes import read_environment_of
from exaserve_ops.adapters.route_table import RouteTable, RouteTableReader
from exaserve_ops.routing.domain import hashing


class TableWatch:
    """Keeps every change of who may be routed to. `run` is for one event loop."""

    def __init__(self, redis_url: str, model: str) -> None:
        self._client = redis.asyncio.Redis.from_url(redis_url)
        self._model = model
        self._reader = RouteTableReader(self._client, self._take, lambda _: None)
        self._table: dict[str, str] = {}
        self.changes: list[TableChange] = []

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            await self._reader.run()
        finally:
            await self._client.aclose()

    @property
    def table(self) -> Mapping[str, str]:
        """Node id by replica id, as of now."""
        return self._table

    def sessions_on(self, node_id: str) -> Iterator[str]:
        """Names of sessions that gateways place on this node, without end."""
        nodes = sorted(set(self._table.values()))
        number = time.monotonic_ns()
        while True:
            number += 1
            name = f"pinned-{number}"
            seed = hashing.key_seed(f"{self._model}\0{name}")
            if max(nodes, key=lambda node: hashing.score(seed, node)) == node_id:
                yield name

    def _take(self, table: RouteTable) -> None:
        if table.replicas is None:
            return
        now = time.monotonic()
        new = {
            replica_id: record.node_id
            for replica_id, record in table.replicas.items()
            if record.model == self._model and record.accepts_new
        }
        gained = {name: node for name, node in new.items() if name not in self._table}
        lost = {name: node for name, node in self._table.items() if name not in new}
        if gained or lost:
            self.changes.append(TableChange(now, gained, lost))
        self._table = new


def redis_url_of(run: FleetRun) -> str:
    """Where the controllers of a fleet find Redis. Raises `FleetRunError`."""
    url = read_environment_of(run.summary()["pids"]["controllers"]).get("REDIS_URL", "")
    if not url:
        raise FleetRunError("the controllers' environment names no Redis")
    return url
