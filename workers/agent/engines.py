"""Which engines this node offers: those that come with the agent, and those that its settings lead to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from workers.agent.config import AgentConfig
from workers.engines.base import EngineAdapter, EngineInstall
from workers.engines.registry import ENGINES, INSTALLED
from workers.probes.engines import EngineAbsentError, FoundEngine, find_engine
from workers.protocol.engines.option import read_version

logger = logging.getLogger(__name__)

Find = Callable[[Path, str, tuple[str, ...]], FoundEngine]


@dataclass(frozen=True, slots=True)
class NodeEngines:
    """Engines of one node."""

    adapters: Mapping[str, EngineAdapter]
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of those that do not come with the agent."""
    notes: tuple[str, ...] = ()
    """Why one is not offered, or is newer than what is known of it."""


def find_engines(config: AgentConfig, find: Find = find_engine) -> NodeEngines:
    """Look for what the settings name. An engine that does not answer is not offered, and noted."""
    adapters: dict[str, EngineAdapter] = dict(ENGINES)
    versions: dict[str, str] = {}
    notes: list[str] = []
    pythons = {"vllm": config.vllm_python, "sglang": config.sglang_python}
    for kind in INSTALLED:
        told = pythons[kind.table.engine]
        if not told:
            continue
        try:
            found = find(Path(told), kind.module, kind.distributions)
        except EngineAbsentError as error:
            notes.append(f"{kind.table.title} is not offered: {error}")
            logger.warning("%s", notes[-1])
            continue
        install = EngineInstall(Path(told), found.version, found.distribution)
        adapters[kind.table.engine] = kind.make(install)
        versions[kind.table.engine] = found.version
        newer = kind.table.note_of(read_version(found.version))
        notes += [newer] if newer else []
        logger.info("%s %s is offered, by %s", kind.table.title, found.version, told)
    return NodeEngines(adapters, versions, tuple(notes))
