"""What a simulated node is built of: two sockets, cards with two tiles each, adapters beside them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from workers.protocol.v1 import AcceleratorInfo, Topology, TopologyEndpoint, TopologyLink

_ADAPTERS = 4
_CORES_OF_SOCKET = ("0-51", "52-103")
_RANKS = {"NV4": 95, "PIX": 100, "NODE": 103, "SYS": 104}
"""As the agents' probe ranks them: a smaller one is a shorter way."""
_MOST_ACCELERATORS = 32
"""More of them, and a Hello would be mostly links."""


def make_accelerators(node_id: str, count: int, memory_bytes: int) -> tuple[AcceleratorInfo, ...]:
    """Tiles of one kind, spread over both sockets."""
    return tuple(
        AcceleratorInfo(
            uuid=f"SIM-{node_id}-{ordinal}",
            kind="xpu",
            name="simulated tile",
            memory_bytes=memory_bytes,
            ordinal=ordinal,
            pci_bus_id=f"0000:{0x18 + ordinal // 2 * 0x10:02x}:00.{ordinal % 2}",
            numa_node=_socket(ordinal, count),
            pcie_generation=5,
            pcie_width=16,
            pcie_generation_now=5,
            pcie_width_now=16,
        )
        for ordinal in range(count)
    )


def make_topology(uuids: Sequence[str]) -> Topology | None:
    """Two tiles share a card and four NVLinks; each adapter has a switch with the cards next to it."""
    count = len(uuids)
    if not 0 < count <= _MOST_ACCELERATORS:
        return None
    ends = [_end(uuid, _socket(place, count), accelerator=True) for place, uuid in enumerate(uuids)]
    ends += [_end(f"hsn{i}", _socket(i, _ADAPTERS), accelerator=False) for i in range(_ADAPTERS)]
    links = []
    for b in range(len(ends)):
        for a in range(b):
            kind = _kind(a, b, count)
            links.append(TopologyLink(a=a, b=b, kind=kind, rank=_RANKS[kind]))
    return Topology(endpoints=tuple(ends), links=tuple(links))


def _end(name: str, socket: int, *, accelerator: bool) -> TopologyEndpoint:
    return TopologyEndpoint(
        name=name, accelerator=accelerator, numa_node=socket, cpus=_CORES_OF_SOCKET[socket]
    )


def _socket(place: int, count: int) -> int:
    return place * 2 // count


def _kind(a: int, b: int, tiles: int) -> str:
    """The way between two places; adapters stand behind the tiles."""
    if b < tiles:
        if a // 2 == b // 2:
            return "NV4"
        return "NODE" if _socket(a, tiles) == _socket(b, tiles) else "SYS"
    adapter = b - tiles
    if a >= tiles:
        return "NODE" if _socket(a - tiles, _ADAPTERS) == _socket(adapter, _ADAPTERS) else "SYS"
    if a * _ADAPTERS // tiles == adapter:
        return "PIX"
    return "NODE" if _socket(a, tiles) == _socket(adapter, _ADAPTERS) else "SYS"
