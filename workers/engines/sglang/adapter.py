"""Adapter of SGLang."""

from __future__ import annotations

from workers.engines.base import EngineInstall
from workers.engines.foreign_adapter import ForeignAdapter, ForeignEngine
from workers.engines.sglang import launch
from workers.engines.sglang.endpoints import ENDPOINTS
from workers.engines.sglang.metrics import parse_metrics
from workers.protocol.engines.sglang import SGLANG

ENGINE = ForeignEngine(
    name=SGLANG,
    endpoints=ENDPOINTS,
    check_options=launch.check_options,
    port_blocks=launch.port_blocks,
    build_launch=launch.build_launch,
    parse_metrics=parse_metrics,
    copies_option="dp_size",
)


class SglangAdapter(ForeignAdapter):
    """Launches SGLang out of the environment that it was found in."""

    def __init__(self, install: EngineInstall) -> None:
        super().__init__(ENGINE, install)
