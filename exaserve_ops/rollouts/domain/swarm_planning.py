"""Who gets which stripe of a revision from whom. Pure and deterministic.

A node's uplink has room for a few *slots*, each one stripe's share of the swarm's pace. Every node needs
one slot in each stripe and brings as many, so trees whose inner nodes differ by stripe use every link both
ways, and the last node is done one copy and a few pieces after the first byte left the origin. Into a rack
goes one stream a stripe: its *head* is attached first, and gives half of its slots to other racks.

What was planned before and still holds stays, so that a death moves only the orphans of the dead.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator

from exaserve_ops.rollouts.domain.swarm import (
    ORIGIN,
    Feed,
    Peer,
    Swarm,
    SwarmPlan,
    SwarmPolicy,
    Waiting,
)

_ROUNDING = 0.02
"""A link that is so little short of a slot has it."""
_UNKNOWN_PACE = 1.0


def plan_swarm(swarm: Swarm, before: SwarmPlan | None = None, policy: SwarmPolicy | None = None) -> SwarmPlan:
    """Plan every stripe for every node that is not whole; keep of the plan before what still holds."""
    trees = _Trees(swarm, before, policy or SwarmPolicy())
    trees.keep()
    trees.grow()
    return trees.plan()


class _Trees:
    """One plan in the making: for each stripe a tree of parents, by node id."""

    def __init__(self, swarm: Swarm, before: SwarmPlan | None, policy: SwarmPolicy) -> None:
        self.swarm = swarm
        self.before = before if before is not None and before.stripes == policy.stripes else None
        self.policy = policy
        self.stripes = range(policy.stripes)
        self.peers = {peer.node_id: peer for peer in sorted(swarm.peers, key=lambda p: p.node_id)}
        self.needy = [peer for peer in self.peers.values() if not peer.whole]
        self.pace = _pace(self.needy)
        self.seeded = any(peer.whole and not peer.gives_nothing for peer in self.peers.values())
        self.slots = {peer.node_id: self._slots_of(peer) for peer in self.peers.values()}
        self.rack_needs: dict[str, int] = defaultdict(int)
        for peer in self.needy:
            self.rack_needs[peer.rack] += 1
        self.parent: list[dict[str, str]] = [{} for _ in self.stripes]
        self.children: list[dict[str, list[str]]] = [defaultdict(list) for _ in self.stripes]
        self.depth: list[dict[str, int]] = [{} for _ in self.stripes]
        """Of nodes that hang on a root; a whole node is one, at depth 0."""
        self.open: list[dict[str, None]] = [{} for _ in self.stripes]
        """Of those, the ones whose uplink has a free slot."""
        self.why: list[dict[str, str]] = [{} for _ in self.stripes]
        self.load: dict[str, int] = defaultdict(int)
        self.abroad: dict[str, int] = defaultdict(int)
        """Children in other racks."""
        self.home = self._homes()
        for stripe in self.stripes:
            self._measure(stripe)

    # -- what a link has room for ----------------------------------------------------------------
    def _slots_of(self, peer: Peer) -> int:
        if peer.gives_nothing:
            return 0
        share = self.pace / self.policy.stripes
        # A node that takes in slowly has nothing new to give fast.
        rate = peer.send_bytes_per_second
        if not peer.whole:
            rate = min(rate, peer.receive_bytes_per_second * self.policy.stripes)
            if peer.receive_bytes_per_second < self.pace * (0.5 + _ROUNDING):
                return 0
        return min(self.policy.most_children, int(rate / share + _ROUNDING))

    def _homes(self) -> dict[str, int]:
        """The stripe in which each needy node gives: where it gave before, else where its rack has least."""
        homes: dict[str, int] = {}
        here: dict[tuple[str, int], int] = defaultdict(int)
        fleet = [0] * self.policy.stripes
        gave = {feed.parent: feed.stripe for feed in self.before.feeds} if self.before else {}
        for peer in sorted(self.needy, key=lambda p: (p.node_id not in gave, p.rack, p.node_id)):
            stripe = gave.get(peer.node_id)
            if stripe is None:
                stripe = min(self.stripes, key=lambda s: (here[peer.rack, s], fleet[s], s))
            homes[peer.node_id] = stripe
            here[peer.rack, stripe] += self.slots[peer.node_id]
            fleet[stripe] += self.slots[peer.node_id]
        return homes

    def _origin_gives(self, stripe: int) -> bool:
        """Whether the origin may be asked for this stripe once more."""
        origin = self.swarm.origin
        fed = len(self.children[stripe][ORIGIN])
        return origin.reachable and not self.seeded and fed < max(1, origin.copies_at_once)

    # -- what stays ------------------------------------------------------------------------------
    def keep(self) -> None:
        """Take over feeds of the plan before whose two ends are still fit for them."""
        for feed in sorted(self.before.feeds, key=_by_depth) if self.before else ():
            child = self.peers.get(feed.child)
            if child is not None and not child.whole and self._may_stay(feed):
                self._attach(feed.stripe, feed.child, feed.parent, feed.why)

    def _may_stay(self, feed: Feed) -> bool:
        if feed.parent == ORIGIN:
            fed = len(self.children[feed.stripe][ORIGIN])
            # Who gives nothing on must not be the one that the origin gives to.
            fit = not self.peers[feed.child].gives_nothing
            return fit and fed < max(1, self.swarm.origin.copies_at_once)
        parent = self.peers.get(feed.parent)
        if parent is None or parent.gives_nothing or (feed.child, feed.parent) in self.swarm.apart:
            return False
        return self.load[feed.parent] < self.slots[feed.parent]

    # -- what is new -----------------------------------------------------------------------------
    def grow(self) -> None:
        """Attach every node to a tree of every stripe: heads of racks first, then givers, then the rest."""
        for stripe in self.stripes:
            self._measure(stripe)  # feeds were kept in any order
            for child, is_head in self._order(stripe):
                self._place(stripe, child, head=is_head)

    def _order(self, stripe: int) -> Iterator[tuple[str, bool]]:
        loose = [p for p in self.needy if p.node_id not in self.parent[stripe]]
        fed_racks = {
            self.peers[child].rack for child in self.parent[stripe] if child in self.depth[stripe]
        } | {p.rack for p in self.peers.values() if p.whole and self.slots[p.node_id]}

        def worth(peer: Peer) -> tuple[bool, bool, int, float, float, str]:
            """Order in which nodes of a rack are attached: who gives in this stripe, much and soon."""
            gives = self.home[peer.node_id] == stripe and self.slots[peer.node_id] > 0
            hangs_on_it = len(self.children[stripe][peer.node_id])
            rate = -peer.send_bytes_per_second
            return (bool(peer.gives_nothing), not gives, -hangs_on_it, -peer.have_ratio, rate, peer.node_id)

        ranked = sorted(loose, key=worth)
        heads: dict[str, Peer] = {}
        for peer in ranked:
            if peer.rack not in fed_racks:
                heads.setdefault(peer.rack, peer)
        first = {peer.node_id for peer in heads.values()}
        yield from ((p.node_id, True) for p in sorted(heads.values(), key=lambda p: (worth(p)[:3], p.rack)))
        yield from ((p.node_id, False) for p in ranked if p.node_id not in first)

    def _place(self, stripe: int, child: str, *, head: bool) -> None:
        if self._origin_gives(stripe) and not self.children[stripe][ORIGIN]:
            self._attach(stripe, child, ORIGIN, "the first of its stripe takes it from the origin")
            return
        free = [p for p in self.open[stripe] if self._spares(stripe, p, child, head=head)]
        if free:
            best = min(free, key=lambda p: self._cost(stripe, p, child))
            self._attach(stripe, child, best, self._reason(best, child, head=head))
        elif self._origin_gives(stripe):
            self._attach(stripe, child, ORIGIN, "no peer has room, and the origin has")
        else:
            self._crowd_in(stripe, child)

    def _crowd_in(self, stripe: int, child: str) -> None:
        """Attach it where it costs others least; with nobody to attach it to, it waits."""
        rooted = [
            p
            for p in self.depth[stripe]
            if not self.peers[p].gives_nothing and (child, p) not in self.swarm.apart
        ]
        if rooted:
            best = min(rooted, key=lambda p: (self._crowding(p), self._cost(stripe, p, child)))
            why = f"no uplink is free; it shares that of {best} with {self.load[best]} others"
            self._attach(stripe, child, best, why)

    def _spares(self, stripe: int, parent: str, child: str, *, head: bool) -> bool:
        """Whether one of a parent's free slots may be this child's."""
        peer, slots = self.peers[parent], self.slots[parent]
        if (child, parent) in self.swarm.apart:
            return False
        if peer.whole and len(self.children[stripe][parent]) >= max(1, slots // self.policy.stripes):
            return False  # its other slots are for the other stripes
        if not head or peer.rack == self.peers[child].rack or self.rack_needs[peer.rack] <= 1:
            return True
        # It is likely the only one of its rack that has this stripe.
        return self.abroad[parent] < slots - slots // 2

    def _cost(self, stripe: int, parent: str, child: str) -> tuple[bool, bool, bool, int, int, str]:
        giver, taker = self.peers[parent], self.peers[child]
        behind = giver.have_ratio + self.policy.lead_ratio < taker.have_ratio
        foreign = not giver.whole and self.home[parent] != stripe
        return (
            behind,
            foreign,
            giver.rack != taker.rack,
            self.depth[stripe][parent],
            self.load[parent],
            parent,
        )

    def _crowding(self, parent: str) -> float:
        return (self.load[parent] + 1) / max(self.peers[parent].send_bytes_per_second, _UNKNOWN_PACE)

    def _reason(self, parent: str, child: str, *, head: bool) -> str:
        rack = self.peers[child].rack
        if self.peers[parent].rack == rack:
            return "the nearest in its rack with a free uplink" if rack else "the nearest with a free uplink"
        if head:
            return f"brings the stripe into rack {rack}"
        return "no uplink in its rack is free"

    # -- the trees -------------------------------------------------------------------------------
    def _attach(self, stripe: int, child: str, parent: str, why: str) -> None:
        self.parent[stripe][child] = parent
        self.why[stripe][child] = why
        self.children[stripe][parent].append(child)
        self.load[parent] += 1
        if parent == ORIGIN:
            self._root(stripe, child, 1)
            return
        if self.peers[parent].rack != self.peers[child].rack:
            self.abroad[parent] += 1
        if self.load[parent] >= self.slots[parent]:
            for nodes in self.open:
                nodes.pop(parent, None)
        if parent in self.depth[stripe]:
            self._root(stripe, child, self.depth[stripe][parent] + 1)

    def _measure(self, stripe: int) -> None:
        """Note anew who hangs on a root, and how deep."""
        self.depth[stripe].clear()
        self.open[stripe].clear()
        for peer in self.peers.values():
            if peer.whole:
                self._root(stripe, peer.node_id, 0)
        for child in self.children[stripe].get(ORIGIN, ()):
            self._root(stripe, child, 1)

    def _root(self, stripe: int, top: str, depth: int) -> None:
        level = [top]
        while level:
            self.depth[stripe].update(dict.fromkeys(level, depth))
            self.open[stripe].update({p: None for p in level if self.load[p] < self.slots[p]})
            level = [child for node in level for child in self.children[stripe].get(node, ())]
            depth += 1

    # -- the plan --------------------------------------------------------------------------------
    def plan(self) -> SwarmPlan:
        """All feeds, by child and stripe."""
        feeds = sorted(
            (feed for stripe in self.stripes for feed in self._feeds(stripe)),
            key=lambda feed: (feed.child, feed.stripe),
        )
        return SwarmPlan(
            stripes=self.policy.stripes,
            feeds=tuple(feeds),
            waiting=tuple(self._waiting()),
            pace_bytes_per_second=self.pace,
            expected_seconds=self._expected_seconds(feeds),
        )

    def _feeds(self, stripe: int) -> Iterator[Feed]:
        depths = self.depth[stripe]
        givers = sorted((p for p in depths if self.slots[p] > 0), key=lambda p: (self.load[p], depths[p], p))
        near: dict[str, list[str]] = defaultdict(list)
        for giver in givers:
            near[self.peers[giver].rack].append(giver)
        for child, parent in self.parent[stripe].items():
            beside = itertools.chain(near[self.peers[child].rack], givers)
            others = self._alternatives(stripe, child, beside)
            yield Feed(child, stripe, parent, others, depths.get(child, 0), self.why[stripe][child])

    def _waiting(self) -> Iterator[Waiting]:
        for peer in self.needy:
            if any(peer.node_id not in self.depth[stripe] for stripe in self.stripes):
                yield Waiting(peer.node_id, self._why_waiting())

    def _why_waiting(self) -> str:
        if not self.swarm.origin.reachable and not self.seeded:
            return "the origin does not answer, and no node has the weights"
        return "the origin gives to as many as it may, and none of them may pass it on"

    def _alternatives(self, stripe: int, child: str, beside: Iterable[str]) -> tuple[str, ...]:
        """Others above it: they have what its parent has, and none of them waits for this child."""
        parents, depths = self.parent[stripe], self.depth[stripe]
        parent = parents[child]
        own = depths.get(child, 0)
        above = parents.get(parent, ORIGIN)
        found = {} if above == ORIGIN else {above: None}
        nearest = (p for p in beside if depths[p] < own and p != parent)
        for other in nearest:
            if len(found) >= self.policy.alternatives:
                break
            found[other] = None
        if own <= self.policy.origin_alternative_depth and not self.seeded and parent != ORIGIN:
            found[ORIGIN] = None
        return tuple(found)

    def _expected_seconds(self, feeds: list[Feed]) -> float:
        if not self.needy:
            return 0.0
        slowest = min(peer.receive_bytes_per_second for peer in self.needy)
        missing = max(1.0 - peer.have_ratio for peer in self.needy) * self.swarm.total_bytes
        hops = max((feed.depth for feed in feeds), default=1)
        piece_seconds = self.swarm.piece_bytes * self.policy.stripes / self.pace
        return missing / max(slowest, _UNKNOWN_PACE) + hops * piece_seconds


def _by_depth(feed: Feed) -> tuple[int, str, int]:
    return feed.depth, feed.child, feed.stripe


def _pace(needy: list[Peer]) -> float:
    """What the faster half of the nodes can take in."""
    rates = sorted(peer.receive_bytes_per_second for peer in needy)
    return max(rates[len(rates) // 2], _UNKNOWN_PACE) if rates else _UNKNOWN_PACE
