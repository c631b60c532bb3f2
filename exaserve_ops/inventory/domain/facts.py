"""What agents say about their nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class AcceleratorFacts:
    """One accelerator as its agent found it."""

    uuid: str
    kind: str
    name: str
    memory_bytes: int
    ordinal: int = 0


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What an agent says about its node at its Hello."""

    hostname: str
    address: str
    agent_version: str
    boot_id: str
    cpu_count: int = 0
    memory_bytes: int = 0
    engines: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    simulated: bool = False
    accelerators: tuple[AcceleratorFacts, ...] = ()
