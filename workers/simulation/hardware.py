"""What a simulated node is built of: two sockets, cards with two tiles each, adapters beside them. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from workers.protocol.hardware import AcceleratorInfo, Topology, TopologyEndpoint, TopologyLink

_ADAPTERS = 4
_CORES_OF_SOCKET = ("0-51", "52-103")
_RANKS = {"NV4": 95, "PIX": 100, "NODE": 103, "SYS": 104}
"""As the agents' probe ranks them: a smaller one is a shorter way."""
_MOST_ACCELERATORS = 32
"""More of them, and a Hello would be mostly links."""
_MOST_CUT_CARDS = 8
_UNITS_OF_CARD = 7
_GIGABYTES_OF_CARD = 80
_BYTES_OF_GIGABYTE = 1008 << 20
"""As the tools tell of real slices: a little less than they are called by."""


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


@dataclass(frozen=True, slots=True)
class CutCards:
    """Cards on each node, beside its tiles, that are cut into slices."""

    count: int = 0
    profiles: tuple[str, ...] = ("3g.40gb", "3g.40gb")
    """Slices of each card."""

    @property
    def slices(self) -> int:
        """On a whole node."""
        return self.count * len(self.profiles)


NONE_CUT = CutCards()


def read_cut_cards(text: str) -> CutCards:
    """Read `2` or `2:3g.40gb+2g.20gb+1g.10gb`. Raises `ValueError` for what a card cannot be cut into."""
    count, colon, layout = text.partition(":")
    profiles = tuple(layout.split("+")) if colon else CutCards().profiles
    if not count.isdecimal() or not 0 <= int(count) <= _MOST_CUT_CARDS:
        raise ValueError(f"'{count}' is no number of cards from 0 to {_MOST_CUT_CARDS}")
    sizes = [re.fullmatch(r"([1-7])g\.([1-9][0-9]?)gb", profile) for profile in profiles]
    for profile, size in zip(profiles, sizes, strict=True):
        if size is None:
            raise ValueError(f"'{profile}' is no profile such as 3g.40gb")
    units, gigabytes = (sum(int(size[part]) for size in sizes if size) for part in (1, 2))
    if units > _UNITS_OF_CARD or gigabytes > _GIGABYTES_OF_CARD:
        room = f"a card has {_UNITS_OF_CARD} units and {_GIGABYTES_OF_CARD} GB"
        raise ValueError(f"{room}; these slices need {units} and {gigabytes}")
    return CutCards(int(count), profiles)


def make_cut_cards(
    node_id: str, cut: CutCards, *, first_ordinal: int
) -> tuple[tuple[AcceleratorInfo, ...], tuple[AcceleratorInfo, ...]]:
    """Cards in MIG mode, and what they are cut into."""
    cards = tuple(_cut_card(node_id, number, first_ordinal + number) for number in range(cut.count))
    slices = tuple(
        _slice(card, place, profile) for card in cards for place, profile in enumerate(cut.profiles)
    )
    return cards, slices


def _cut_card(node_id: str, number: int, ordinal: int) -> AcceleratorInfo:
    return AcceleratorInfo(
        uuid=f"SIM-{node_id}-cut-{number}",
        kind="cuda",
        name="simulated card 80GB",
        memory_bytes=_GIGABYTES_OF_CARD * _BYTES_OF_GIGABYTE,
        ordinal=ordinal,
        pci_bus_id=f"0000:{0xC0 + number:02x}:00.0",
        numa_node=number % 2,
        pcie_generation=5,
        pcie_width=16,
        pcie_generation_now=5,
        pcie_width_now=16,
    )


def _slice(card: AcceleratorInfo, place: int, profile: str) -> AcceleratorInfo:
    gigabytes = int(profile.partition(".")[2].removesuffix("gb"))
    return msgspec.structs.replace(
        card,
        uuid=f"{card.uuid}-mig-{place}",
        name=f"simulated card 80GB MIG {profile}",
        memory_bytes=gigabytes * _BYTES_OF_GIGABYTE,
        parent_uuid=card.uuid,
        profile=profile,
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
