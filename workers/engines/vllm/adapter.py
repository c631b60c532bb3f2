"""Adapter of vLLM."""

from __future__ import annotations

from workers.engines.base import EngineInstall
from workers.engines.foreign_adapter import ForeignAdapter, ForeignEngine
from workers.engines.vllm import launch
from workers.engines.vllm.endpoints import ENDPOINTS
from workers.engines.vllm.metrics import parse_metrics
from workers.protocol.engines.vllm import VLLM

ENGINE = ForeignEngine(
    name=VLLM,
    endpoints=ENDPOINTS,
    check_options=launch.check_options,
    port_blocks=launch.port_blocks,
    build_launch=launch.build_launch,
    parse_metrics=parse_metrics,
    copies_option="data_parallel_size",
)


class VllmAdapter(ForeignAdapter):
    """Launches vLLM out of the environment that it was found in."""

    def __init__(self, install: EngineInstall) -> None:
        super().__init__(ENGINE, install)
