"""What the leader keeps in mind of a swarm, for people: its plan, its verdicts, what the origin gave. Pure.

The plan and the verdicts live in the leader's memory alone; these notes are what pages and REST are told,
and what a new leader goes on counting from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

MOST_POINTS = 240
"""Of the line over time; with more, every other one is left out."""
LEAST_STEP_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class FeedNote:
    """Where one node is to get one stripe, and why there."""

    child: str
    stripe: int
    parent: str
    depth: int
    why: str


@dataclass(frozen=True, slots=True)
class Carried:
    """Verified bytes that came to one node."""

    origin_bytes: int = 0
    peer_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EgressPoint:
    """One moment of a swarm."""

    at_seconds: float
    """Since 1970."""
    origin_bytes: int
    """That left the origin since the swarm began."""
    peer_bytes: int
    whole_nodes: int
    bytes_per_second: float
    """That nodes took in, all together."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What holds of members until the swarm is over, by node id."""

    barred: Mapping[str, str] = field(default_factory=dict)
    """Why nobody is to pull from it."""
    slow_givers: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second that it gave."""
    slow_takers: Mapping[str, float] = field(default_factory=dict)
    parted: tuple[tuple[str, str], ...] = ()
    """(child, parent) that do not reach one another."""


@dataclass(frozen=True, slots=True)
class SwarmNotes:
    """One swarm as the leader sees it."""

    revision: str
    total_bytes: int
    began_at_seconds: float
    """Since 1970."""
    ended_at_seconds: float | None = None
    stripes: int = 0
    pace_bytes_per_second: float = 0.0
    feeds: tuple[FeedNote, ...] = ()
    waiting: tuple[tuple[str, str], ...] = ()
    """(node id, why) of nodes that get nothing now."""
    judged: Judged = field(default_factory=Judged)
    counted: Mapping[str, Carried] = field(default_factory=dict)
    """What each node last said, so that only what came since is added."""
    origin_bytes: int = 0
    peer_bytes: int = 0
    points: tuple[EgressPoint, ...] = ()


@dataclass(frozen=True, slots=True)
class MemberSight:
    """What one node says of its part."""

    carried: Carried
    whole: bool
    bytes_per_second: float


def with_sights(notes: SwarmNotes, sights: Mapping[str, MemberSight], *, now_seconds: float) -> SwarmNotes:
    """Add what came since the last look. A node that was whole when it was first seen adds nothing.

    Counts of a node that begin anew, as after its agent's restart, are added from there on.
    """
    origin = peer = 0
    for node, sight in sights.items():
        before = notes.counted.get(node, sight.carried if sight.whole else Carried())
        origin += _more(sight.carried.origin_bytes, before.origin_bytes)
        peer += _more(sight.carried.peer_bytes, before.peer_bytes)
    added = replace(
        notes,
        counted={**notes.counted, **{node: sight.carried for node, sight in sights.items()}},
        origin_bytes=notes.origin_bytes + origin,
        peer_bytes=notes.peer_bytes + peer,
    )
    point = EgressPoint(
        now_seconds,
        added.origin_bytes,
        added.peer_bytes,
        sum(sight.whole for sight in sights.values()),
        sum(sight.bytes_per_second for sight in sights.values()),
    )
    return replace(added, points=_with_point(added.points, point))


def _more(now: int, before: int) -> int:
    return now - before if now >= before else now


def _with_point(points: tuple[EgressPoint, ...], point: EgressPoint) -> tuple[EgressPoint, ...]:
    """Append a point, or have it stand for the last one where that is too close to the one before it."""
    step = _step_seconds(points)
    if len(points) > 1 and points[-1].at_seconds - points[-2].at_seconds < step:
        points = points[:-1]
    longer = (*points, point)
    return longer if len(longer) <= MOST_POINTS else longer[::2]


def _step_seconds(points: tuple[EgressPoint, ...]) -> float:
    if len(points) < MOST_POINTS // 2:
        return LEAST_STEP_SECONDS
    return max(LEAST_STEP_SECONDS, (points[-1].at_seconds - points[0].at_seconds) / len(points))
