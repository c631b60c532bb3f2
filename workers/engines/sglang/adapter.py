"""Adapter of SGLang."""

from __future__ import annotations

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
from workers.engines.foreign_launch import KV_EVENTS, KV_REPLAY, KV_TOPIC, first_ports
from workers.engines.sglang import launch
from workers.engines.sglang.metrics import parse_metrics
from workers.protocol.engines.option import read_version, whole
from workers.protocol.engines.sglang import SGLANG


class SglangAdapter:
    """Launches SGLang out of the environment that it was found in."""

    name: str = SGLANG
    port_count: int = 1
    health_path: str = "/health"
    metrics_path: str = "/metrics"

    def __init__(self, install: EngineInstall) -> None:
        self.install = install

    def check_options(self, options: EngineOptions) -> None:
        """Raise `EngineOptionError`, naming the option and what would be right."""
        launch.check_options(options, read_version(self.install.version))

    def port_blocks(self, options: EngineOptions) -> tuple[PortBlock, ...]:
        """What to lease for an engine with these options; the first is for HTTP."""
        return launch.port_blocks(options)

    def build_launch(self, options: EngineOptions, context: LaunchContext) -> Launch:
        """Return the process to start. Raises `EngineOptionError`."""
        return launch.build_launch(options, context, self.install)

    def parse_metrics(self, page: str) -> EngineSample:
        """Read a metrics page. A bad line is dropped and noted; the rest is used."""
        return parse_metrics(page)

    def can_sleep(self, options: EngineOptions) -> bool:
        """Where it was started for it."""
        return bool(options.get("enable_memory_saver"))

    def sleep_request(self) -> EngineRequest:
        """Weights and KV leave the card."""
        return EngineRequest("/release_memory_occupation")

    def wake_request(self) -> EngineRequest:
        """They come back to where they were."""
        return EngineRequest("/resume_memory_occupation")

    def kv_event_sources(self, options: EngineOptions, ports: tuple[int, ...]) -> tuple[KvEventSource, ...]:
        """Where each data-parallel rank publishes: ports one after the other."""
        if not options.get("kv_events"):
            return ()
        first = first_ports(launch.port_blocks(options), ports)
        copies = range(whole(options, "dp_size", 1))
        return tuple(
            KvEventSource(rank, first[KV_EVENTS] + rank, first[KV_REPLAY] + rank, KV_TOPIC) for rank in copies
        )
