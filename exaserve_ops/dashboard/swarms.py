"""A swarm as pages show it: one small tree for each stripe, streams in words, and lines over time. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby

from exaserve_ops.dashboard.figures import Figure, Panel, Series, small_multiples
from exaserve_ops.dashboard.wording import cut_middle, percent
from exaserve_ops.weights.domain.held import FAILED, PullSight
from exaserve_ops.weights.domain.swarms import FLOWING, ORIGIN, STARVED, Feed, MemberHealth, SwarmHealth

MOST_STREAMS = 16
_MIB = 1 << 20
_SHORT = timedelta(minutes=10)
"""Of a line over time: its axis says seconds."""
_CELL, _STEP_X, _STEP_Y = 9, 34, 12
_BAND_GAP = 6
_LETTER, _LONGEST_LABEL = 7, 14
TREE_WORDS = (
    ("origin", "the origin"),
    ("whole", "has all of it"),
    ("flowing", "takes it in"),
    ("starved", "its parent has nothing newer"),
    ("waiting", "waits"),
    ("barred", "nobody pulls from it"),
    ("failed", "failed"),
)
"""What the cells of a tree mean."""
_HELD_UP_BY = {
    "parent": "its parent, which has nothing newer",
    "network": "the network",
    "parent_cap": "its parent's cap",
    "check": "checking pieces",
    "disk": "its disk",
    "cap": "its cap",
}


@dataclass(frozen=True, slots=True)
class TreeCell:
    """One node in the tree of a stripe."""

    x: int
    y: int
    state: str
    """What colours it: `whole`, `flowing`, `starved`, `waiting`, `failed` or `barred`."""
    words: str


@dataclass(frozen=True, slots=True)
class TreeLine:
    """Who feeds whom."""

    path: str
    state: str


@dataclass(frozen=True, slots=True)
class TreeBand:
    """The name of a rack, left of its nodes."""

    y: int
    name: str


@dataclass(frozen=True, slots=True)
class Tree:
    """One stripe: whoever gives stands left of whom it gives to."""

    number: int
    cells: tuple[TreeCell, ...]
    lines: tuple[TreeLine, ...]
    bands: tuple[TreeBand, ...]
    left: int
    """Where the first nodes stand, and the origin: right of the names of racks."""
    origin_y: int | None
    """Of the origin; `None` where it gives nothing of this stripe."""
    width: int
    height: int
    words: str


@dataclass(frozen=True, slots=True)
class Stream:
    """One stripe on its way to one node, in words."""

    node_id: str
    name: str
    stripe: int
    parent_id: str
    """Empty where that is the origin, or nobody."""
    parent: str
    stage: str
    bytes_per_second: float
    held_up_by: str
    why: str


@dataclass(frozen=True, slots=True)
class SwarmPage:
    """All that a page shows of one swarm."""

    health: SwarmHealth
    trees: tuple[Tree, ...]
    streams: tuple[Stream, ...]
    more_streams: int
    peer_ratio: float | None
    """Of all that came; `None` before anything did."""


def swarm_page(health: SwarmHealth) -> SwarmPage:
    """Draw the trees, and put the slowest streams into words."""
    streams = sorted(
        _streams(health), key=lambda s: (s.stage == FLOWING, s.bytes_per_second, s.name, s.stripe)
    )
    came = health.origin_bytes + health.peer_bytes
    return SwarmPage(
        health=health,
        trees=tuple(_tree(health, stripe) for stripe in sorted({feed.stripe for feed in health.feeds})),
        streams=tuple(streams[:MOST_STREAMS]),
        more_streams=max(0, len(streams) - MOST_STREAMS),
        peer_ratio=health.peer_bytes / came if came else None,
    )


def _streams(health: SwarmHealth) -> Iterator[Stream]:
    names = {member.node_id: member.name for member in health.members}
    for member in health.members:
        for pull in member.stripes:
            if not member.whole and pull.stage != "done":
                yield _stream(member, pull, names)


def _stream(member: MemberHealth, pull: PullSight, names: Mapping[str, str]) -> Stream:
    is_node = pull.parent not in ("", ORIGIN)
    parent = names.get(pull.parent, pull.parent[:8]) if is_node else pull.parent and "the origin"
    why = pull.why
    for node_id, name in names.items():
        why = why.replace(node_id, name)
    return Stream(
        node_id=member.node_id,
        name=member.name,
        stripe=pull.stripe + 1,
        parent_id=pull.parent if is_node else "",
        parent=parent,
        stage=pull.stage,
        bytes_per_second=pull.bytes_per_second,
        held_up_by=_HELD_UP_BY.get(pull.bottleneck, ""),
        why=why,
    )


# -- trees ---------------------------------------------------------------------------------------
def _tree(health: SwarmHealth, stripe: int) -> Tree:
    feeds = {feed.child: feed for feed in health.feeds if feed.stripe == stripe}
    depths = {member.node_id: _depth(member.node_id, feeds) for member in health.members}
    names = {member.rack: cut_middle(member.rack, _LONGEST_LABEL) for member in health.members if member.rack}
    left = (max(map(len, names.values())) + 1) * _LETTER if names else 0
    places, bands, height = _places(health.members, depths, left)
    from_origin = [places[child][1] for child, feed in feeds.items() if feed.parent == ORIGIN]
    origin_y = sum(from_origin) // len(from_origin) if from_origin else None
    barred = {trouble.node_id for trouble in health.troubles if trouble.kind == "barred"}
    pulls = {member.node_id: _pull_of(member, stripe) for member in health.members}
    return Tree(
        number=stripe + 1,
        cells=tuple(
            _cell(m, places[m.node_id], pulls[m.node_id], m.node_id in barred) for m in health.members
        ),
        lines=tuple(_lines(feeds, places, pulls, (left, origin_y or 0))),
        bands=tuple(TreeBand(band.y, names[band.name]) for band in bands),
        left=left,
        origin_y=origin_y,
        width=left + (max(depths.values(), default=0) + 1) * _STEP_X,
        height=height,
        words=_tree_words(stripe, health, feeds),
    )


def _depth(node_id: str, feeds: Mapping[str, Feed]) -> int:
    """Hops below a node that is fed by nobody, or the origin, which is the first hop."""
    depth, seen = 0, {node_id}
    feed = feeds.get(node_id)
    while feed is not None:
        depth += 1
        if feed.parent in seen:
            return depth
        seen.add(feed.parent)
        feed = feeds.get(feed.parent)
    return depth


def _places(
    members: Sequence[MemberHealth], depths: Mapping[str, int], left: int
) -> tuple[dict[str, tuple[int, int]], tuple[TreeBand, ...], int]:
    """Where each node stands: racks from top to bottom, depths from left to right."""
    places: dict[str, tuple[int, int]] = {}
    bands: list[TreeBand] = []
    top = 0
    for rack, group in groupby(sorted(members, key=lambda m: (m.rack, m.name)), key=lambda m: m.rack):
        if rack:
            bands.append(TreeBand(top + _CELL, rack))
        rows: dict[int, int] = {}
        for member in group:
            depth = depths[member.node_id]
            row = rows[depth] = rows.get(depth, -1) + 1
            places[member.node_id] = (left + depth * _STEP_X, top + row * _STEP_Y)
        top += (max(rows.values(), default=0) + 1) * _STEP_Y + _BAND_GAP
    return places, tuple(bands), max(top - _BAND_GAP, _STEP_Y)


def _pull_of(member: MemberHealth, stripe: int) -> PullSight | None:
    return next((pull for pull in member.stripes if pull.stripe == stripe), None)


def _cell(member: MemberHealth, place: tuple[int, int], pull: PullSight | None, is_barred: bool) -> TreeCell:  # noqa: FBT001 - of this module
    return TreeCell(place[0], place[1], _cell_state(member, pull, is_barred), _cell_words(member, pull))


def _cell_state(member: MemberHealth, pull: PullSight | None, is_barred: bool) -> str:  # noqa: FBT001 - of this module
    if member.state == FAILED:
        return "failed"
    if is_barred:
        return "barred"
    if member.whole or (pull is not None and pull.stage == "done"):
        return "whole"
    return pull.stage if pull is not None and pull.stage in (FLOWING, STARVED) else "waiting"


def _cell_words(member: MemberHealth, pull: PullSight | None) -> str:
    said = [f"{member.name}: {percent(member.have_ratio)} here"]
    if pull is not None and not member.whole:
        said.append(f"this stripe is {pull.stage}, {_speed(pull.bytes_per_second)}")
        said += [f"held up by {_HELD_UP_BY[pull.bottleneck]}"] if pull.bottleneck in _HELD_UP_BY else []
    if member.gives_to:
        said.append(f"gives {member.gives_to} streams, {_speed(member.gives_bytes_per_second)}")
    return "; ".join(said)


def _lines(
    feeds: Mapping[str, Feed],
    places: Mapping[str, tuple[int, int]],
    pulls: Mapping[str, PullSight | None],
    origin: tuple[int, int],
) -> Iterator[TreeLine]:
    half = _CELL / 2
    for child, feed in feeds.items():
        x, y = places[child]
        if feed.parent == ORIGIN:
            start = (origin[0] + _CELL, origin[1])
        elif feed.parent in places:
            start = (places[feed.parent][0] + _CELL, places[feed.parent][1])
        else:
            continue
        bend = (start[0] + x) / 2
        path = f"M{start[0]} {start[1] + half}C{bend} {start[1] + half} {bend} {y + half} {x} {y + half}"
        pull = pulls[child]
        yield TreeLine(
            path, pull.stage if pull is not None and pull.stage in (FLOWING, STARVED) else "waiting"
        )


def _tree_words(stripe: int, health: SwarmHealth, feeds: Mapping[str, Feed]) -> str:
    racks = {member.node_id: member.rack for member in health.members}
    inner = [feed for feed in feeds.values() if feed.parent in racks]
    crossing = sum(racks[feed.child] != racks[feed.parent] for feed in inner)
    told = f"Stripe {stripe + 1}: {len(feeds)} nodes are fed, {len(feeds) - len(inner)} of them by the origin"
    if not any(racks.values()):
        return told
    return f"{told}; {crossing} stream{'s cross' if crossing != 1 else ' crosses'} from rack to rack"


def _speed(bytes_per_second: float) -> str:
    return f"{bytes_per_second / _MIB:.1f} MiB/s"


# -- over time -----------------------------------------------------------------------------------
def egress_figure(health: SwarmHealth, *, columns: int) -> Figure:
    """Lines of a swarm over time: copies that left the origin, what nodes took in, how many are whole."""
    if len(health.points) < 2 or not health.total_bytes:  # noqa: PLR2004 - a line has two ends
        return {"data": [], "layout": {}}
    at = [datetime.fromtimestamp(point.at_seconds, UTC) for point in health.points]
    copies = [point.origin_bytes / health.total_bytes for point in health.points]
    taken = [point.bytes_per_second / _MIB for point in health.points]
    whole = [float(point.whole_nodes) for point in health.points]
    figure = small_multiples(
        [
            Panel("Copies from the origin", "count", (Series("from the origin", at, copies),)),
            Panel("Taken in by all, MiB/s", "rate", (Series("taken in", at, taken),)),
            Panel("Whole nodes", "count", (Series("whole", at, whole),), top=float(health.nodes) or None),
        ],
        columns=columns,
    )
    if at[-1] - at[0] < _SHORT:
        axes = [name for name in figure["layout"] if name.startswith("xaxis")]
        for axis in axes:
            figure["layout"][axis] |= {"tickformat": "%H:%M:%S", "nticks": 3}
    return figure
