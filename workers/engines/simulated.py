"""Adapter of the simulated engine."""

from __future__ import annotations

from workers.engines.base import EngineOptions, EngineSample, Launch, LaunchContext
from workers.engines.options import (
    IntegerOption,
    NumberOption,
    Option,
    SwitchOption,
    option_arguments,
)
from workers.engines.own_launch import own_launch, parse_own_metrics

_MILLISECONDS = NumberOption(0.0, 600_000.0)
_SECONDS = NumberOption(0.0, 86_400.0)

_OPTIONS: dict[str, Option] = {
    "ttft_ms": _MILLISECONDS,
    "itl_ms": _MILLISECONDS,
    "jitter_ratio": NumberOption(0.0, 1.0),
    "kv_blocks": IntegerOption(1, 10_000_000),
    "max_model_len": IntegerOption(16, 10_000_000),
    "max_num_seqs": IntegerOption(1, 4096),
    "load_seconds": _SECONDS,
    "seed": IntegerOption(0, (1 << 31) - 1),
    "drain_seconds": _SECONDS,
    "fail_after": IntegerOption(0, 1_000_000_000),
    "fail_loading": SwitchOption(),
    "exit_after_seconds": _SECONDS,
    "exit_code": IntegerOption(0, 255),
    "hang_after_seconds": _SECONDS,
    "hang": SwitchOption(),
    "ignore_sigterm": SwitchOption(),
}


class SimulatedAdapter:
    """Launches `workers.engines.simulated_engine`."""

    name: str = "simulated"
    port_count: int = 1
    health_path: str = "/health"
    metrics_path: str = "/metrics"

    def check_options(self, options: EngineOptions) -> None:
        """Raise `EngineOptionError`, naming the option and what would be right."""
        option_arguments(_OPTIONS, options)

    def build_launch(self, options: EngineOptions, context: LaunchContext) -> Launch:
        """Return the process to start. Raises `EngineOptionError`."""
        arguments = option_arguments(_OPTIONS, options)
        return own_launch("workers.engines.simulated_engine", context, arguments)

    def parse_metrics(self, page: str) -> EngineSample:
        """Read a metrics page. A bad line is dropped and noted; the rest is used."""
        return parse_own_metrics(page)
