"""What a node tells of its accelerators, and of how near they are to one another."""

from __future__ import annotations

from workers.protocol.part import Part


class AcceleratorInfo(Part, frozen=True, kw_only=True):
    """One accelerator as the node's probe found it."""

    uuid: str
    kind: str
    """`cuda`, `rocm`, `xpu` or `cpu`: what the engine will run on, as discovered."""
    name: str
    memory_bytes: int
    """0 where the tool did not say; then `unreadable` has `memory_bytes`."""
    ordinal: int = 0
    """The vendor tool's index. For people; nothing is ever placed by it."""
    parent_uuid: str = ""
    """The card that this slice was cut from; empty for a whole card. Since 1.1, as all below."""
    profile: str = ""
    """What the slice was cut as, such as `3g.40gb`."""
    pci_bus_id: str = ""
    numa_node: int | None = None
    pcie_generation: int | None = None
    """The best that card and slot can do together, as is `pcie_width`."""
    pcie_width: int | None = None
    unreadable: tuple[str, ...] = ()
    """Fields of this struct that the vendor's tool could not tell."""
    pcie_generation_now: int | None = None
    """As negotiated; an idle card goes down to save power. Since 1.3, as `pcie_width_now`."""
    pcie_width_now: int | None = None
    """As negotiated; less than `pcie_width` is lanes that failed, or a slot that has fewer."""
    shares_memory: bool = False
    """Replicas with the same weights hold them on it once. Since 1.4; a CPU's replicas do so anyway."""


class TopologyEndpoint(Part, frozen=True, kw_only=True):
    """One end of links: an accelerator or a network adapter."""

    name: str
    """UUID of the accelerator, or the adapter's device name such as `mlx5_0`."""
    accelerator: bool
    numa_node: int | None = None
    cpus: str = ""
    """Cores next to it, such as `0-31,64-95`."""


class TopologyLink(Part, frozen=True, kw_only=True):
    """The way between two endpoints, by their places in the list."""

    a: int
    b: int
    kind: str
    """`NV#` (# bonded NVLinks), `PIX`, `PXB`, `PHB`, `NODE` or `SYS`."""
    rank: int
    """For comparing: a smaller rank is a shorter way."""


class Topology(Part, frozen=True, kw_only=True):
    """How near accelerators and network adapters of one node are to one another."""

    endpoints: tuple[TopologyEndpoint, ...] = ()
    links: tuple[TopologyLink, ...] = ()
