"""What the adapters of engines that are no part of this product have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workers.engines.base import (
    EngineInstall,
    EngineOptions,
    EngineRequest,
    EngineSample,
    KvEventSource,
    Launch,
    LaunchContext,
    PortBlock,
)
from workers.engines.endpoints import SLEEP, WAKE, EndpointTable, find_endpoint
from workers.engines.foreign_launch import KV_EVENTS, KV_REPLAY, KV_TOPIC, first_ports
from workers.protocol.engines.kinds import EngineOptionError
from workers.protocol.engines.option import Version, read_version, whole
from workers.protocol.engines.sleeping import can_sleep


@dataclass(frozen=True, slots=True)
class ForeignEngine:
    """One such engine: how it is launched, read and asked."""

    name: str
    endpoints: EndpointTable
    check_options: Callable[[EngineOptions, Version], None]
    port_blocks: Callable[[EngineOptions], tuple[PortBlock, ...]]
    build_launch: Callable[[EngineOptions, LaunchContext, EngineInstall], Launch]
    parse_metrics: Callable[[str], EngineSample]
    copies_option: str
    """Name of the option that says how many copies of the model, each with a cache, are behind one port."""


class ForeignAdapter:
    """Launches an engine out of the environment that it was found in."""

    port_count: int = 1
    health_path: str = "/health"
    metrics_path: str = "/metrics"

    def __init__(self, engine: ForeignEngine, install: EngineInstall) -> None:
        self.name: str = engine.name
        self.install = install
        self._engine = engine
        self._version = read_version(install.version)

    def check_options(self, options: EngineOptions) -> None:
        """Raise `EngineOptionError`, naming the option and what would be right."""
        self._engine.check_options(options, self._version)

    def port_blocks(self, options: EngineOptions) -> tuple[PortBlock, ...]:
        """What to lease for an engine with these options; the first is for HTTP."""
        return self._engine.port_blocks(options)

    def build_launch(self, options: EngineOptions, context: LaunchContext) -> Launch:
        """Return the process to start. Raises `EngineOptionError`."""
        return self._engine.build_launch(options, context, self.install)

    def parse_metrics(self, page: str) -> EngineSample:
        """Read a metrics page. A bad line is dropped and noted; the rest is used."""
        return self._engine.parse_metrics(page)

    def can_sleep(self, options: EngineOptions) -> bool:
        """Where it was started for it, and its version can be asked to."""
        found = [find_endpoint(self._engine.endpoints, what, self._version) for what in (SLEEP, WAKE)]
        return can_sleep(self.name, options) and None not in found

    def sleep_request(self) -> EngineRequest:
        """Weights leave the card for host memory, and KV is dropped. Raises `EngineOptionError`."""
        return self._request(SLEEP)

    def wake_request(self) -> EngineRequest:
        """Weights come back to where they were. Raises `EngineOptionError`."""
        return self._request(WAKE)

    def _request(self, what: str) -> EngineRequest:
        found = find_endpoint(self._engine.endpoints, what, self._version)
        if found is None:
            raise EngineOptionError(f"{self.name} {self.install.version} cannot be asked to {what}")
        return found

    def kv_event_sources(self, options: EngineOptions, ports: tuple[int, ...]) -> tuple[KvEventSource, ...]:
        """Where each copy publishes: ports one after the other."""
        if not options.get("kv_events"):
            return ()
        first = first_ports(self.port_blocks(options), ports)
        copies = range(whole(options, self._engine.copies_option, 1))
        return tuple(
            KvEventSource(rank, first[KV_EVENTS] + rank, first[KV_REPLAY] + rank, KV_TOPIC) for rank in copies
        )
