"""What a node's page says of its accelerators and their links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from exaserve_ops.inventory.models import Accelerator, Node, NodeHardware
from exaserve_ops.serving.selectors.rooms import AcceleratorUse, use_of_accelerators

_LINK_WORDS = {
    "PIX": "through one PCIe switch",
    "PXB": "through several PCIe switches",
    "PHB": "through the processor's PCIe host bridge",
    "NODE": "between host bridges of one NUMA node",
    "SYS": "between processors, across NUMA nodes",
}
_NOTE_LABELS = {
    "name": "name",
    "memory_bytes": "memory",
    "pcie_generation_max": "pcie_generation_max",
    "pcie_width_max": "pcie_width_max",
    "pcie_generation_now": "pcie_generation",
    "pcie_width_now": "pcie_width",
}
"""How the probes' notes call what could not be read."""
_CPU = "cpu"
NOBODY = AcceleratorUse()


@dataclass(frozen=True, slots=True)
class Told:
    """A value in words, or why there is none."""

    text: str = ""
    why_unknown: str = ""


@dataclass(frozen=True, slots=True)
class PcieLink:
    """The link as negotiated, against the best that card and slot can do together."""

    now: Told
    best: Told
    warning: str = ""
    remark: str = ""


@dataclass(frozen=True, slots=True)
class CardRow:
    """One accelerator: a card, or a slice of one."""

    accelerator: Accelerator
    name: Told
    has_memory: bool
    memory_unknown: str
    numa: Told
    pcie: PcieLink
    strangers: int = 0
    """Processes on it that are no replica of this fleet."""
    use: AcceleratorUse = NOBODY


@dataclass(frozen=True, slots=True)
class CardGroup:
    """A card with what was cut from it; a whole card has no slices."""

    card: CardRow | None
    parent_uuid: str = ""
    """Of a card that its agent did not describe."""
    slices: tuple[CardRow, ...] = ()


@dataclass(frozen=True, slots=True)
class LinkCell:
    """One way between two endpoints."""

    kind: str
    """Empty where it is not known."""
    words: str
    is_nearest: bool = False
    is_self: bool = False


@dataclass(frozen=True, slots=True)
class LinkRow:
    """The ways from one card."""

    name: str
    uuid: str
    numa_node: int | None
    cpus: str
    cells: tuple[LinkCell, ...]
    nearest: tuple[str, ...] = ()
    """Network adapters that are as near as any."""


@dataclass(frozen=True, slots=True)
class LinkMatrix:
    """Cards against cards and network adapters."""

    columns: tuple[tuple[str, bool], ...] = ()
    """Name of an endpoint, and whether it is a network adapter."""
    rows: tuple[LinkRow, ...] = ()
    legend: tuple[tuple[str, str], ...] = field(default=())
    """Each kind that occurs, nearest first, in words."""


def hardware_of(node: Node) -> dict[str, Any]:
    """What the page of a node needs of its hardware, in five queries."""
    accelerators = list(node.accelerators.all())
    hardware = NodeHardware.objects.filter(node=node).first()
    notes = hardware.probe_notes if hardware is not None else []
    strangers = Counter(str(found.get("accelerator_uuid", "")) for found in node.unknown_processes)
    return {
        "cards": group_cards(accelerators, notes, strangers, use_of_accelerators(accelerators)),
        "links": link_matrix(hardware, accelerators),
        "notes": note_sentences(notes, accelerators),
    }


def group_cards(
    accelerators: Iterable[Accelerator],
    notes: Sequence[str],
    strangers: Mapping[str, int],
    uses: Mapping[str, AcceleratorUse],
) -> tuple[CardGroup, ...]:
    """Whole cards and cards with their slices, in the vendor's order. `strangers`: processes by UUID."""
    rows = [
        replace(_card_row(found, notes, strangers.get(found.uuid, 0)), use=uses.get(found.uuid, NOBODY))
        for found in accelerators
    ]
    cards = {row.accelerator.uuid: row for row in rows if not row.accelerator.parent_uuid}
    slices: dict[str, list[CardRow]] = {}
    for row in rows:
        if row.accelerator.parent_uuid:
            slices.setdefault(row.accelerator.parent_uuid, []).append(row)
    groups = [CardGroup(card, uuid, tuple(slices.get(uuid, ()))) for uuid, card in cards.items()]
    groups += [CardGroup(None, uuid, tuple(cut)) for uuid, cut in slices.items() if uuid not in cards]
    return tuple(groups)


def _card_row(found: Accelerator, notes: Sequence[str], strangers: int) -> CardRow:
    name_is_known = bool(found.name) and "name" not in found.unreadable
    memory_is_known = found.memory_bytes > 0 and "memory_bytes" not in found.unreadable
    return CardRow(
        accelerator=found,
        name=Told(found.name) if name_is_known else Told(why_unknown=_reason(found, "name", notes)),
        has_memory=memory_is_known,
        memory_unknown="" if memory_is_known else _reason(found, "memory_bytes", notes),
        numa=_numa(found),
        pcie=_pcie(found, notes),
        strangers=strangers,
    )


def _numa(found: Accelerator) -> Told:
    if found.numa_node is not None:
        return Told(str(found.numa_node))
    if found.kind == _CPU:
        return Told("all of the host")
    return Told(why_unknown="neither the vendor's tool nor its link matrix named a NUMA node")


def _pcie(found: Accelerator, notes: Sequence[str]) -> PcieLink:
    if found.kind == _CPU:
        return PcieLink(Told("no PCIe link"), Told("none"))
    now = _link(found.pcie_generation_now, found.pcie_width_now)
    best = _link(found.pcie_generation_max, found.pcie_width_max)
    warning = remark = ""
    lanes, most = found.pcie_width_now, found.pcie_width_max
    if lanes is not None and most is not None and lanes < most:
        warning = f"{lanes} of {most} lanes: reseat the card, or look at the slot and its riser"
    elif (found.pcie_generation_now or 99) < (found.pcie_generation_max or 0):
        remark = "an idle card goes down to save power"
    return PcieLink(
        Told(now) if now else Told(why_unknown=_reason(found, "pcie_width_now", notes)),
        Told(best) if best else Told(why_unknown=_reason(found, "pcie_width_max", notes)),
        warning,
        remark,
    )


def _link(generation: int | None, width: int | None) -> str:
    """Such as `gen 5 x16`; what is not known of it is left out."""
    parts = [f"gen {generation}"] if generation is not None else []
    parts += [f"x{width}"] if width is not None else []
    return " ".join(parts)


def _reason(found: Accelerator, field_name: str, notes: Sequence[str]) -> str:
    start = f"{found.uuid} {_NOTE_LABELS[field_name]}:"
    for note in notes:
        if note.startswith(start):
            return f"the vendor's tool said {note[len(start) :].strip()}"
    return "the vendor's tool did not say"


def link_matrix(hardware: NodeHardware | None, accelerators: Iterable[Accelerator]) -> LinkMatrix:
    """Rows for cards, columns for cards and then network adapters; the nearest adapters are marked."""
    if hardware is None or not hardware.topology:
        return LinkMatrix()
    ends: list[dict[str, Any]] = hardware.topology["endpoints"]
    ways = {frozenset((way["a"], way["b"])): way for way in hardware.topology["links"]}
    short = {found.uuid: f"{found.kind} {found.ordinal}" for found in accelerators if not found.parent_uuid}
    names = [short.get(end["name"], end["name"]) for end in ends]
    cards = [place for place, end in enumerate(ends) if end["accelerator"]]
    adapters = [place for place, end in enumerate(ends) if not end["accelerator"]]
    rows = tuple(_link_row(card, [*cards, *adapters], ends, names, ways) for card in cards)
    kinds = {way["kind"]: way["rank"] for way in ways.values()}
    return LinkMatrix(
        tuple((names[place], not ends[place]["accelerator"]) for place in (*cards, *adapters)),
        rows,
        tuple((kind, link_words(kind)) for kind in sorted(kinds, key=lambda kind: (kinds[kind], kind))),
    )


def _link_row(
    card: int,
    columns: Sequence[int],
    ends: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    ways: Mapping[frozenset[int], Mapping[str, Any]],
) -> LinkRow:
    ranks = {
        place: ways[frozenset((card, place))]["rank"]
        for place in columns
        if not ends[place]["accelerator"] and frozenset((card, place)) in ways
    }
    nearest = {place for place, rank in ranks.items() if rank == min(ranks.values())}
    cells = []
    for place in columns:
        way = ways.get(frozenset((card, place)))
        if place == card:
            cells.append(LinkCell("", "itself", is_self=True))
        elif way is None:
            cells.append(LinkCell("", "unknown: the tool's matrix has no entry"))
        else:
            cells.append(LinkCell(way["kind"], link_words(way["kind"]), is_nearest=place in nearest))
    end = ends[card]
    return LinkRow(
        names[card],
        end["name"],
        end["numa_node"],
        end["cpus"],
        tuple(cells),
        tuple(names[place] for place in sorted(nearest)),
    )


def link_words(kind: str) -> str:
    """What a kind of link is, such as `4 NVLinks`."""
    if kind.startswith("NV") and kind[2:].isdecimal():
        return f"{kind[2:]} NVLink{'' if kind == 'NV1' else 's'}, directly"
    return _LINK_WORDS.get(kind, "of a kind that is not known here")


def note_sentences(notes: Iterable[str], accelerators: Iterable[Accelerator]) -> tuple[str, ...]:
    """Probe notes with cards by their short names: `cuda 0: memory could not be read: ERR!`."""
    short = {found.uuid: f"{found.kind} {found.ordinal}" for found in accelerators}
    return tuple(_sentence(note, short) for note in notes)


def _sentence(note: str, short: Mapping[str, str]) -> str:
    uuid, _, rest = note.partition(" ")
    what, colon, why = rest.partition(": ")
    if uuid in short and colon:
        return f"{short[uuid]}: could not read {what.replace('_', ' ')}, because the tool said “{why}”"
    return note
