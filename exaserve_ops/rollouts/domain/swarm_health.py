"""What members of a swarm saw of one another, judged: who may give, how much, and who is apart from whom.

A parent counts as slow only for what it was able to send: a child that waits because the parent itself
waits says nothing about that parent's link. Verdicts hold until the swarm is over, since a node that is
asked for nothing shows nothing new.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from exaserve_ops.rollouts.domain.swarm import ORIGIN, Peer, SwarmPlan


@dataclass(frozen=True, slots=True)
class FeedSeen:
    """One stripe as its child saw it of late."""

    child: str
    stripe: int
    parent: str
    bytes_per_second: float
    starved_ratio: float
    """Share of the time in which the parent had nothing new."""
    lasted_seconds: float
    """Since this parent is pulled from."""
    capped: bool = False
    """Its child's own cap holds it back, which says nothing about any link."""


@dataclass(frozen=True, slots=True)
class Complaint:
    """What a child has to say against a parent."""

    child: str
    parent: str
    bad_pieces: int = 0
    unreachable: bool = False
    """It could not connect, or the connection broke or fell silent, and that was the last it tried."""


@dataclass(frozen=True, slots=True)
class WatchPolicy:
    """When a link counts as slow, and a node as one that gives nothing good."""

    slow_ratio: float = 0.5
    """Of a stripe's share of the pace, or of what streams usually reach where that is less: links that are
    all slower than they were said to be make nobody slow."""
    starved_ratio: float = 0.25
    settle_seconds: float = 4.0
    strikes: int = 2
    """Bad pieces, by all children together, before nobody pulls from it."""
    unreachable_for: int = 2
    """So many children say so before it counts for all of them."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What holds of the members until the swarm is over."""

    barred: Mapping[str, str] = field(default_factory=dict)
    """Why nobody is to pull from a node."""
    sends: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second that a slow node gave."""
    receives: Mapping[str, float] = field(default_factory=dict)
    apart: frozenset[tuple[str, str]] = frozenset()


def judge(
    plan: SwarmPlan,
    feeds: Collection[FeedSeen],
    complaints: Collection[Complaint],
    before: Verdicts | None = None,
    policy: WatchPolicy | None = None,
) -> Verdicts:
    """Add to the verdicts of before what the newest reports show."""
    before, policy = before or Verdicts(), policy or WatchPolicy()
    barred, apart = _complained_of(complaints, policy)
    share = plan.pace_bytes_per_second / plan.stripes
    ripe = [feed for feed in feeds if feed.lasted_seconds >= policy.settle_seconds and feed.parent != ORIGIN]
    busy = [feed for feed in ripe if feed.starved_ratio <= policy.starved_ratio and not feed.capped]
    usual = min(share, _median([feed.bytes_per_second for feed in busy], share))
    slow = {(f.child, f.stripe) for f in busy if f.bytes_per_second < usual * policy.slow_ratio}
    receives = _slow_children(busy, slow)
    sends = _slow_parents(busy, slow, receives)
    return Verdicts(
        barred={**before.barred, **barred},
        sends=_lowest(before.sends, sends),
        receives=_lowest(before.receives, receives),
        apart=before.apart | apart,
    )


def corrected(peer: Peer, verdicts: Verdicts) -> Peer:
    """Return a peer as the verdicts make it: with the rates that were seen, where those are less."""
    return replace(
        peer,
        send_bytes_per_second=min(peer.send_bytes_per_second, verdicts.sends.get(peer.node_id, float("inf"))),
        receive_bytes_per_second=min(
            peer.receive_bytes_per_second, verdicts.receives.get(peer.node_id, float("inf"))
        ),
        gives_nothing=peer.gives_nothing or verdicts.barred.get(peer.node_id, ""),
    )


def _complained_of(
    complaints: Collection[Complaint], policy: WatchPolicy
) -> tuple[dict[str, str], frozenset[tuple[str, str]]]:
    bad: dict[str, int] = defaultdict(int)
    cut: dict[str, list[str]] = defaultdict(list)
    for complaint in sorted(complaints, key=lambda c: (c.parent, c.child)):
        if complaint.parent == ORIGIN:
            continue
        bad[complaint.parent] += complaint.bad_pieces
        if complaint.unreachable:
            cut[complaint.parent].append(complaint.child)
    barred = {p: f"{count} of its pieces were damaged" for p, count in bad.items() if count >= policy.strikes}
    for parent, children in cut.items():
        if len(children) >= policy.unreachable_for:
            barred.setdefault(parent, f"{', '.join(children[:3])} cannot pull from it")
    return barred, frozenset((child, parent) for parent, children in cut.items() for child in children)


def _slow_children(busy: list[FeedSeen], slow: set[tuple[str, int]]) -> dict[str, float]:
    """Nodes for which every stripe is slow, from more than one parent that serves others well."""
    mine: dict[str, list[FeedSeen]] = defaultdict(list)
    good_parents = {feed.parent for feed in busy if (feed.child, feed.stripe) not in slow}
    for feed in busy:
        mine[feed.child].append(feed)
    found = {}
    for child, feeds in mine.items():
        parents = {feed.parent for feed in feeds}
        if len(parents) > 1 and parents <= good_parents and all((f.child, f.stripe) in slow for f in feeds):
            found[child] = sum(feed.bytes_per_second for feed in feeds)
    return found


def _slow_parents(
    busy: list[FeedSeen], slow: set[tuple[str, int]], slow_children: Mapping[str, float]
) -> dict[str, float]:
    """Nodes whose every child that is not slow itself gets its stripe slowly."""
    given: dict[str, list[FeedSeen]] = defaultdict(list)
    for feed in busy:
        if feed.child not in slow_children:
            given[feed.parent].append(feed)
    return {
        parent: sum(feed.bytes_per_second for feed in feeds)
        for parent, feeds in given.items()
        if all((feed.child, feed.stripe) in slow for feed in feeds)
    }


def _median(rates: list[float], default: float) -> float:
    return sorted(rates)[len(rates) // 2] if rates else default


def _lowest(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    inf = float("inf")
    return {node: min(one.get(node, inf), other.get(node, inf)) for node in {*one, *other}}
