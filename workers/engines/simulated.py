"""Adapter of the simulated engine."""

from __future__ import annotations

from workers.engines.base import (
    EngineOptions,
    EngineRequest,
    EngineSample,
    Launch,
    LaunchContext,
    NodeRank,
)
from workers.engines.own_launch import own_launch, parse_own_metrics
from workers.protocol.engines.option import option_arguments
from workers.protocol.engines.own import SIMULATED_TABLE
from workers.protocol.engines.sleeping import can_sleep


class SimulatedAdapter:
    """Launches `workers.engines.simulated_engine`."""

    name: str = "simulated"
    port_count: int = 1
    health_path: str = "/health"
    metrics_path: str = "/metrics"

    def check_options(self, options: EngineOptions) -> None:
        """Raise `EngineOptionError`, naming the option and what would be right."""
        option_arguments(SIMULATED_TABLE, options)

    def build_launch(self, options: EngineOptions, context: LaunchContext) -> Launch:
        """Return the process to start. Raises `EngineOptionError`."""
        arguments = [*option_arguments(SIMULATED_TABLE, options), *_rank_arguments(context.rank)]
        return own_launch("workers.engines.simulated_engine", context, arguments)

    def can_sleep(self, options: EngineOptions) -> bool:
        """Where it was started for it."""
        return can_sleep(self.name, options)

    def sleep_request(self) -> EngineRequest:
        """It answers nothing any more; there is no memory to give back."""
        return EngineRequest("/sleep")

    def wake_request(self) -> EngineRequest:
        """It answers again."""
        return EngineRequest("/wake_up")

    def parse_metrics(self, page: str) -> EngineSample:
        """Read a metrics page. A bad line is dropped and noted; the rest is used."""
        return parse_own_metrics(page)


def _rank_arguments(rank: NodeRank | None) -> list[str]:
    if rank is None:
        return []
    return [
        f"--rank={rank.rank}",
        f"--nodes={rank.nodes}",
        f"--meet-host={rank.master_host}",
        f"--meet-port={rank.master_port}",
    ]
