"""What the weights pages show: cells of nodes, where bytes came from, and rules in words. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from exaserve_ops.dashboard.wording import byte_size
from exaserve_ops.serving.selectors.weights import LiveNodes, NodeRow
from exaserve_ops.weights.domain.held import ABSENT, FAILED, FETCHING, PAUSED, READY, WAITING
from exaserve_ops.weights.domain.prewarm import MINUTES_OF_A_DAY
from exaserve_ops.weights.models import PrewarmPolicy

COLUMNS = 32
_CELL = 11
_PEER = "peer"


@dataclass(frozen=True, slots=True)
class Cell:
    """One node in the picture of a model."""

    x: int
    y: int
    state: str
    words: str


@dataclass(frozen=True, slots=True)
class Picture:
    """All nodes of a model, in rows."""

    cells: tuple[Cell, ...]
    width: int
    height: int
    ready: int
    wanted: int
    failed: int
    origin_bytes: int
    peer_bytes: int


class LiveOnce:
    """Live telemetry, each node read once however many models ask."""

    def __init__(self, read: LiveNodes) -> None:
        self._read = read
        self._known: dict[str, Mapping[str, Any]] = {}

    def __call__(self, node_ids: Collection[str]) -> dict[str, Mapping[str, Any]]:
        """Newest telemetry of these nodes; without those that have reported nothing."""
        missing = [node_id for node_id in node_ids if node_id not in self._known]
        if missing:
            self._known |= {key: {} for key in missing} | dict(self._read(missing))
        return {node_id: told for node_id in node_ids if (told := self._known[node_id])}


_NEED = (FAILED, FETCHING, WAITING, PAUSED, ABSENT, READY)


def in_order_of_need(rows: Iterable[NodeRow]) -> list[NodeRow]:
    """What somebody should look at first, then what moves; by name among equals."""
    return sorted(rows, key=lambda row: (_NEED.index(row.state), row.name))


@dataclass(frozen=True, slots=True)
class Mix:
    """Where a node's bytes came from, in few words."""

    parts: tuple[tuple[str, int], ...]
    """Each origin, and all peers together, with bytes."""
    peers: str
    """Each peer with its share, for whoever wants to know."""


def mix_of(row: NodeRow) -> Mix:
    """Tell many peers by their number."""
    peers, parts = [], []
    for source, count in row.sources.items():
        kind, _, name = source.partition(" ")
        if kind == _PEER:
            peers.append((name, count))
        else:
            parts.append((source, count))
    if peers:
        word = f"{_PEER} {peers[0][0]}" if len(peers) == 1 else f"{len(peers)} peers"
        parts.append((word, sum(count for _, count in peers)))
    return Mix(tuple(parts), ", ".join(f"{name} {byte_size(count)}" for name, count in peers))


def picture_of(rows: Sequence[NodeRow]) -> Picture:
    """Lay out the cells, and count."""
    cells = tuple(
        Cell(index % COLUMNS * _CELL, index // COLUMNS * _CELL, row.state, _words(row))
        for index, row in enumerate(rows)
    )
    peers, origins = _by_distance(row.sources for row in rows)
    return Picture(
        cells,
        width=min(len(rows), COLUMNS) * _CELL,
        height=-(-len(rows) // COLUMNS) * _CELL,
        ready=sum(row.state == READY for row in rows),
        wanted=sum(row.state != ABSENT or bool(row.owners) for row in rows),
        failed=sum(row.state == FAILED for row in rows),
        origin_bytes=origins,
        peer_bytes=peers,
    )


def _by_distance(mixes: Iterable[Mapping[str, int]]) -> tuple[int, int]:
    """Bytes from peers, and from origins."""
    peers = origins = 0
    for mix in mixes:
        for source, count in mix.items():
            if source.partition(" ")[0] == _PEER:
                peers += count
            else:
                origins += count
    return peers, origins


def with_names(row: NodeRow, names: Mapping[str, str]) -> NodeRow:
    """Put names of nodes for their ids among the sources."""

    def named(source: str) -> str:
        kind, _, name = source.partition(" ")
        return f"{kind} {names.get(name, name)}".strip()

    return replace(row, sources={named(source): count for source, count in row.sources.items()})


def _words(row: NodeRow) -> str:
    if row.state == READY:
        return f"{row.name}: ready, {byte_size(row.total_bytes)}"
    if row.total_bytes and row.have_bytes:
        return f"{row.name}: {row.state}, {byte_size(row.have_bytes)} of {byte_size(row.total_bytes)}"
    return f"{row.name}: {row.state}"


def policy_words(policy: PrewarmPolicy | None) -> str:
    """Say when and where a model is fetched ahead."""
    if policy is None:
        return "not fetched ahead"
    named = len(policy.node_names)
    where = f"{named} node{'' if named == 1 else 's'}" if named else "every node"
    always = policy.from_minute == 0 and policy.until_minute == MINUTES_OF_A_DAY
    when = (
        "at any hour" if always else f"{clock_of(policy.from_minute)} to {clock_of(policy.until_minute)} UTC"
    )
    cap = f", {byte_size(policy.bytes_per_second)}/s each" if policy.bytes_per_second else ""
    busy = f"{policy.busiest_ratio:.0%}"
    paused = "" if policy.enabled else "paused; "
    return f"{paused}{where}, {when}, up to {busy} busy, {policy.at_once} at once{cap}"


def clock_of(minute: int) -> str:
    """A minute of the day as people write it."""
    return f"{minute // 60:02}:{minute % 60:02}"
