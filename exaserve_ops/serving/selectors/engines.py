"""Which engines there are, and which versions of them nodes have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from exaserve_ops.inventory.selectors import nodes_in_service
from workers.protocol.engines.option import EngineOption
from workers.protocol.engines.tables import TABLES


@dataclass(frozen=True, slots=True)
class KnownEngine:
    """One engine whose options are known."""

    engine: str
    title: str
    options: Sequence[EngineOption]
    environment_prefixes: Sequence[str]
    versions: dict[str, int]
    """Nodes that offer it, by version."""


def known_engines() -> list[KnownEngine]:
    """All of them, whether a node offers them or not. One query."""
    rows = list(nodes_in_service().values_list("engines", "engine_versions"))
    return [
        KnownEngine(
            table.engine,
            table.title,
            table.options,
            table.environment_prefixes,
            dict(
                sorted(
                    Counter(
                        versions.get(table.engine, "") for names, versions in rows if table.engine in names
                    ).items()
                )
            ),
        )
        for table in TABLES.values()
    ]
