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
    split: bool = False
    """In MIG mode: used by its slices only, so nothing is placed on the card itself."""
    parent_uuid: str = ""
    """The card that this slice was cut from."""
    profile: str = ""
    pci_bus_id: str = ""
    numa_node: int | None = None
    pcie_generation_max: int | None = None
    pcie_width_max: int | None = None
    pcie_generation_now: int | None = None
    pcie_width_now: int | None = None
    unreadable: tuple[str, ...] = ()
    """Of these, what the vendor's tool could not tell."""
    shares_memory: bool = False
    """Replicas with the same weights hold them on it once."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One end of links: an accelerator, by its UUID, or a network adapter, by its device name."""

    name: str
    accelerator: bool
    numa_node: int | None = None
    cpus: str = ""
    """Cores next to it, such as `0-31,64-95`."""


@dataclass(frozen=True, slots=True)
class Link:
    """The way between two endpoints, by their places in the list; a smaller rank is a shorter way."""

    a: int
    b: int
    kind: str
    """`NV#` (# bonded NVLinks), `PIX`, `PXB`, `PHB`, `NODE` or `SYS`."""
    rank: int


@dataclass(frozen=True, slots=True)
class Topology:
    """How near accelerators and network adapters of one node are to one another."""

    endpoints: tuple[Endpoint, ...] = ()
    links: tuple[Link, ...] = ()


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
    topology: Topology | None = None
    """`None` where no tool tells."""
    probe_notes: tuple[str, ...] = ()
    """What the probes could not find out, for people."""
    mps_ready: bool = False
    """An MPS control daemon answers, so replicas can have MPS shares."""
    mps_note: str = ""
    """What keeps MPS from being used, and what to do."""
    engine_versions: Mapping[str, str] = field(default_factory=dict)
    """Of the engines that are no part of this product."""
    protocol_minor: int = 0
    """What its agent knows of the protocol: fields that came later pass it by."""
