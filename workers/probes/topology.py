"""How near accelerators and network adapters are to one another, by `nvidia-smi topo -m`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workers.probes.values import clean_text, is_absent

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_ENDPOINT = re.compile(r"GPU([0-9]{1,3})|NIC[0-9]{1,3}|[a-z][a-z0-9_]{2,40}")
_LINK = re.compile(r"NV[0-9]{1,3}|PIX|PXB|PHB|NODE|SYS")
_CAPTION = re.compile(r"CPU Affinity|NUMA Affinity|GPU NUMA ID")
_LEGEND = re.compile(r"^\s*(NIC[0-9]{1,3}):\s*(\S{1,60})\s*$", re.MULTILINE)
_NEAREST_FIRST = ("PIX", "PXB", "PHB", "NODE", "SYS")
_FARTHEST = 1000
_MOST_ENDPOINTS = 64
"""More than any host has; the number of links grows with its square, and a message is bounded."""
_MOST_NOTES = 8


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One accelerator or network adapter."""

    name: str
    """UUID of the accelerator, or the adapter's device name such as `mlx5_0`."""
    accelerator: bool
    numa_node: int | None = None
    cpus: str = ""
    """The cores next to it, such as `0-31,64-95`."""


@dataclass(frozen=True, slots=True)
class Link:
    """The way between two endpoints, by their places in the topology's list; `a` < `b`."""

    a: int
    b: int
    kind: str
    """`NV#` (# bonded NVLinks), `PIX`, `PXB`, `PHB`, `NODE` or `SYS`."""

    @property
    def rank(self) -> int:
        """0 is the best; a smaller rank is a shorter way."""
        return link_rank(self.kind)


@dataclass(frozen=True, slots=True)
class Topology:
    """Endpoints and the ways between them."""

    endpoints: tuple[Endpoint, ...] = ()
    links: tuple[Link, ...] = ()
    notes: tuple[str, ...] = ()


def link_rank(kind: str) -> int:
    """Order of links: many NVLinks before few, these before PCIe, unknown kinds last. 0 is the best."""
    if kind.startswith("NV") and kind[2:].isdecimal():
        return max(0, 99 - int(kind[2:]))
    return 100 + _NEAREST_FIRST.index(kind) if kind in _NEAREST_FIRST else _FARTHEST


def parse_topology(page: str, uuids: Mapping[int, str]) -> Topology:
    """Read the matrix; `uuids` names the GPUs by the tool's own index. Never raises.

    A cell that is no link leaves out this link alone, with a note.
    """
    lines = _ANSI.sub("", page).splitlines()
    start = next((number for number, line in enumerate(lines) if _header(line)), None)
    if start is None:
        return Topology(notes=("nvidia-smi topo -m: no matrix on the page",))
    columns = _header(lines[start])
    if len(columns) > _MOST_ENDPOINTS:
        return Topology(notes=(f"nvidia-smi topo -m: {len(columns)} columns",))
    captions = _CAPTION.findall(lines[start])
    rows: dict[str, _Row] = {}
    for line in lines[start + 1 :]:
        row = _row(line, columns, captions)
        if row is not None:
            rows.setdefault(row.name, row)
    return _assemble(columns, rows, uuids, dict(_LEGEND.findall("\n".join(lines))))


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    cells: tuple[str, ...]
    beside: Mapping[str, str]
    """What stands in the columns after the matrix, by their captions."""


def _header(line: str) -> list[str]:
    """The names above the matrix; empty for any other line."""
    names: list[str] = []
    for word in line.split():
        if _ENDPOINT.fullmatch(word) is None:
            break
        names.append(word)
    if not line[:1].isspace():
        return []  # a row or prose; the header starts with the empty corner
    return names if any(name.startswith("GPU") for name in names) else []


def _row(line: str, columns: Sequence[str], captions: Sequence[str]) -> _Row | None:
    # The tool separates by tabs, and then an empty column is one; text that went through a terminal has none.
    words = [word.strip() for word in line.split("\t")] if "\t" in line else line.split()
    if not words or words[0] not in columns:
        return None
    rest = words[1 + len(columns) :]
    return _Row(words[0], tuple(words[1 : 1 + len(columns)]), dict(zip(captions, rest, strict=False)))


def _assemble(
    columns: Sequence[str], rows: Mapping[str, _Row], uuids: Mapping[int, str], legend: Mapping[str, str]
) -> Topology:
    endpoints: list[Endpoint] = []
    links: list[Link] = []
    notes: list[str] = []
    for number, name in enumerate(columns):
        endpoints.append(_endpoint(name, rows.get(name), uuids, legend))
        for other in range(number):
            kind = _cell(rows, columns, other, number)
            if _LINK.fullmatch(kind):
                links.append(Link(other, number, kind))
            elif len(notes) < _MOST_NOTES:
                notes.append(f"link {columns[other]}-{name}: {kind or 'missing'}")
    return Topology(tuple(endpoints), tuple(links), tuple(notes))


def _cell(rows: Mapping[str, _Row], columns: Sequence[str], a: int, b: int) -> str:
    """The link as either row says it; a row may be cut off, or one direction unreadable."""
    seen = ""
    for row, column in ((rows.get(columns[a]), b), (rows.get(columns[b]), a)):
        word = row.cells[column] if row is not None and column < len(row.cells) else ""
        if _LINK.fullmatch(word):
            return word
        seen = seen or clean_text(word)[:20]
    return seen


def _endpoint(name: str, row: _Row | None, uuids: Mapping[int, str], legend: Mapping[str, str]) -> Endpoint:
    beside = row.beside if row is not None else {}
    numa, cpus = beside.get("NUMA Affinity", ""), beside.get("CPU Affinity", "")
    accelerator = name.startswith("GPU")
    known = uuids.get(int(name[3:]), name) if accelerator else legend.get(name, name)
    return Endpoint(
        known,
        accelerator,
        # A range (a card between two nodes) and `N/A` (a host with a single one) name no node.
        int(numa) if re.fullmatch("[0-9]{1,4}", numa) else None,
        "" if is_absent(cpus) else cpus[:200],
    )
