"""What a swarm is: nodes that need one revision's weights, and who is to give which part to whom. Pure.

The pieces of a revision are cut into *stripes*, contiguous runs of about equal bytes. In each stripe the
nodes form a tree with the origin, or nodes that have everything, at its roots. A plan names parents by
stripe and never by piece, so its size does not grow with the model.
"""

from __future__ import annotations

from dataclasses import dataclass

ORIGIN = "origin"
"""Stands among parents for where the weights come from in the first place."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A node of a swarm: one that needs the weights, or that has them all."""

    node_id: str
    rack: str
    have_ratio: float
    """Verified bytes over all bytes; 1 means whole."""
    send_bytes_per_second: float
    """What it may give: its link's rate, its cap, or what was measured where that is less."""
    receive_bytes_per_second: float
    gives_nothing: str = ""
    """Why nobody is to pull from it, such as `2 of its pieces were damaged`; empty where that is fine."""

    @property
    def whole(self) -> bool:
        """Whether it needs nothing more."""
        return self.have_ratio >= 1.0


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the weights come from in the first place."""

    bytes_per_second: float
    copies_at_once: int = 1
    """So many full-rate streams at most; nodes that find no parent wait rather than ask it too."""
    reachable: bool = True


@dataclass(frozen=True, slots=True)
class Swarm:
    """All that a plan is made of."""

    total_bytes: int
    piece_bytes: int
    peers: tuple[Peer, ...]
    origin: Origin
    apart: frozenset[tuple[str, str]] = frozenset()
    """Children and parents that do not reach one another, as the children said."""


@dataclass(frozen=True, slots=True)
class SwarmPolicy:
    """How plans are made."""

    stripes: int = 2
    """With two, each node gives in one and only takes in the other: every link is used both ways."""
    most_children: int = 8
    """Of one node in all stripes together, however fast its link."""
    alternatives: int = 3
    """Parents named beside the planned one, for a child that loses it."""
    origin_alternative_depth: int = 2
    """Only nodes so near a root may go to the origin when they lose their parent."""
    lead_ratio: float = 0.05
    """A parent may be so far behind its child."""


@dataclass(frozen=True, slots=True)
class Feed:
    """Where one node gets one stripe."""

    child: str
    stripe: int
    parent: str
    """A node's id, or `ORIGIN`."""
    alternatives: tuple[str, ...]
    """Whom to ask next, in this order, where the parent does not answer."""
    depth: int
    """Hops from where it is whole: 1 is a child of a root."""
    why: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """A node that gets nothing now."""

    node_id: str
    why: str


@dataclass(frozen=True, slots=True)
class SwarmPlan:
    """Who gets which stripe from whom."""

    stripes: int
    feeds: tuple[Feed, ...]
    waiting: tuple[Waiting, ...]
    pace_bytes_per_second: float
    """What most nodes can take in; rates are judged by it."""
    expected_seconds: float
    """Until every node of now is whole, if links give what they promise."""

    def of(self, node_id: str) -> tuple[Feed, ...]:
        """Feeds of one node, by stripe."""
        return tuple(feed for feed in self.feeds if feed.child == node_id)

    def origin_copies(self) -> float:
        """Copies of the weights that the origin gives under this plan."""
        return sum(feed.parent == ORIGIN for feed in self.feeds) / self.stripes

    def crossings(self, racks: dict[str, str]) -> int:
        """Streams that cross from one rack to another, those of the origin aside."""
        inner = (feed for feed in self.feeds if feed.parent != ORIGIN)
        return sum(racks[feed.child] != racks[feed.parent] for feed in inner)
