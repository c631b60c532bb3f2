"""The engines this tree can launch, by name."""

from __future__ import annotations

from workers.engines.base import EngineAdapter
from workers.engines.simulated import SimulatedAdapter
from workers.engines.torch_adapter import TorchAdapter

ENGINES: dict[str, EngineAdapter] = {
    adapter.name: adapter for adapter in (TorchAdapter(), SimulatedAdapter())
}
