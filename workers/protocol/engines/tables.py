"""The tables of all engines whose options are known, by name."""

from __future__ import annotations

from workers.protocol.engines import own, sglang, vllm
from workers.protocol.engines.option import EngineTable

TABLES: dict[str, EngineTable] = {
    table.engine: table for table in (own.TORCH_TABLE, vllm.TABLE, sglang.TABLE, own.SIMULATED_TABLE)
}
