"""A swarm in virtual time: links are shared, nodes die, join and spoil pieces, the origin comes and goes.

The planner, the verdicts on members and the choice of parents are the product's own; what is made here is
only what moves: pieces over links, reports to the control plane, and plans back.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from exaserve_ops.rollouts.domain.swarm import ORIGIN, Feed, Origin, Peer, Swarm, SwarmPlan, SwarmPolicy
from exaserve_ops.rollouts.domain.swarm_health import Complaint, FeedSeen, Verdicts, corrected, judge
from exaserve_ops.rollouts.domain.swarm_planning import plan_swarm
from workers.weights.swarm.parents import Parent, ParentChoice, Standing

PIECE_BYTES = 1 << 20
STEP_SECONDS = 0.05
REPORT_SECONDS = 1.0
SILENT_SECONDS = 5.0
STARVED_SECONDS = 20.0
WINDOW_SECONDS = 4.0


@dataclass(slots=True)
class Link:
    """What of one stripe is on its way to one node."""

    choice: ParentChoice
    parent: Parent | None = None
    piece: int = -1
    done_bytes: float = 0.0
    quiet_since: float = 0.0
    since: float = 0.0
    moved: list[tuple[float, float, bool]] = field(default_factory=list)
    """Time, bytes, and whether the parent had nothing, of the last few seconds."""


@dataclass(slots=True)
class SimNode:
    """One node."""

    name: str
    rack: str
    rate: float
    spoils_every: int = 0
    alive: bool = True
    here: set[int] = field(default_factory=set)
    links: list[Link] = field(default_factory=list)
    standings: dict[str, Standing] = field(default_factory=dict)


class SwarmWorld:
    """Everything, and the time."""

    def __init__(self, pieces: int, origin_rate: float) -> None:
        self.pieces = pieces
        self.now = 0.0
        self.nodes: dict[str, SimNode] = {}
        self.origin_rate = origin_rate
        self.origin_away = False
        self.control_away = False
        self.origin_bytes = 0.0
        self.most_at_origin = 0
        self.spoilt_sent = 0
        self.most_streams = 12
        """That one node gives at once, as its server's limits have it."""
        self.turned_away = 0
        self.plan: SwarmPlan | None = None
        self.verdicts = Verdicts()
        self.policy = SwarmPolicy()
        self._report_due = 0.0

    # -- what happens ----------------------------------------------------------------------------
    def join(self, node: SimNode) -> None:
        """A node comes, with whatever it has."""
        node.links = [
            Link(ParentChoice(node.standings, strikes=2, origin_patience_seconds=5.0, clock=lambda: self.now))
            for _ in range(self.policy.stripes)
        ]
        self.nodes[node.name] = node

    def kill(self, name: str) -> None:
        """A node is gone; its disk with it."""
        self.nodes[name].alive = False

    def restart_control(self) -> None:
        """Another control plane: it knows what nodes report, and nothing else."""
        feeds = tuple(
            Feed(node.name, stripe, link.parent.node_id, (), 0, "as it was")
            for node in self.living()
            for stripe, link in enumerate(node.links)
            if link.parent is not None
        )
        pace = max(node.rate for node in self.living())
        self.plan = SwarmPlan(self.policy.stripes, feeds, (), pace, 0.0)
        self.verdicts = Verdicts()
        self.control_away = False

    def living(self) -> list[SimNode]:
        return [node for node in self.nodes.values() if node.alive]

    @property
    def done(self) -> bool:
        return all(len(node.here) == self.pieces for node in self.living())

    def run(self, seconds: float) -> None:
        """Let time pass until all is done, or so long."""
        until = self.now + seconds
        while self.now < until and not self.done:
            self.step()

    def step(self) -> None:
        if self.now >= self._report_due and not self.control_away:
            self._report_due = self.now + REPORT_SECONDS
            self._direct()
        links = [(n, s, link) for n in self.living() for s, link in enumerate(n.links)]
        for node, stripe, link in links:
            self._choose(node, stripe, link)
        asking = [(n, link) for n, _, link in links if link.parent and link.parent.node_id == ORIGIN]
        self.most_at_origin = max(self.most_at_origin, len(asking))
        rates = self._rates(links)
        for node, _, link in links:
            self._move(node, link, rates.get(id(link), 0.0))
        self.now += STEP_SECONDS

    # -- the control plane -----------------------------------------------------------------------
    def _direct(self) -> None:
        if self.plan is not None:
            complaints = [
                Complaint(n.name, parent, s.bad_pieces, unreachable=s.failures > 0 and not s.lives)
                for n in self.living()
                for parent, s in n.standings.items()
            ]
            self.verdicts = judge(self.plan, self._seen(), complaints, self.verdicts)
        peers = tuple(
            corrected(Peer(n.name, n.rack, len(n.here) / self.pieces, n.rate, n.rate), self.verdicts)
            for n in self.living()
        )
        origin = Origin(self.origin_rate)
        swarm = Swarm(self.pieces * PIECE_BYTES, PIECE_BYTES, peers, origin, self.verdicts.apart)
        self.plan = plan_swarm(swarm, self.plan, self.policy)
        for feed in self.plan.feeds:
            link = self.nodes[feed.child].links[feed.stripe]
            link.choice.set([Parent(name) for name in (feed.parent, *feed.alternatives)])
            if link.parent is not None and link.parent.node_id != feed.parent:
                self._leave(link)

    def _seen(self) -> list[FeedSeen]:
        seen = []
        for node in self.living():
            for stripe, link in enumerate(node.links):
                if link.parent is None or not link.moved:
                    continue
                span = max(self.now - link.moved[0][0], STEP_SECONDS)
                moved = sum(count for _, count, _ in link.moved)
                starved = sum(idle for _, _, idle in link.moved) / len(link.moved)
                lasted = self.now - link.since
                seen.append(FeedSeen(node.name, stripe, link.parent.node_id, moved / span, starved, lasted))
        return seen

    # -- nodes -----------------------------------------------------------------------------------
    def stripe(self, stripe: int) -> range:
        return range(
            self.pieces * stripe // self.policy.stripes, self.pieces * (stripe + 1) // self.policy.stripes
        )

    def _choose(self, node: SimNode, stripe: int, link: Link) -> None:
        missing = [p for p in self.stripe(stripe) if p not in node.here]
        if not missing:
            self._leave(link)
            return
        if link.parent is None:
            link.parent = link.choice.next()
            link.quiet_since = link.since = self.now
            if link.parent is not None and self._is_busy(link.parent, link):
                self.turned_away += 1
                link.choice.busy(link.parent)
                link.parent = None
        if link.parent is None or link.piece >= 0:
            return
        parent = self.nodes.get(link.parent.node_id)
        if parent is None:
            link.piece = missing[0]
        elif parent.alive:
            link.piece = next((p for p in missing if p in parent.here), -1)
        link.done_bytes = 0.0

    def _is_busy(self, parent: Parent, asking: Link) -> bool:
        """Whether all streams of a node are taken; the origin has as many as are asked for."""
        if parent.node_id == ORIGIN:
            return False
        taken = sum(
            link.parent == parent for node in self.living() for link in node.links if link is not asking
        )
        return taken >= self.most_streams

    def _leave(self, link: Link) -> None:
        link.parent, link.piece, link.done_bytes = None, -1, 0.0
        link.moved.clear()

    def _rates(self, links: list[tuple[SimNode, int, Link]]) -> dict[int, float]:
        up: dict[str, int] = defaultdict(int)
        down: dict[str, int] = defaultdict(int)
        busy = [(node, link) for node, _, link in links if link.parent is not None and link.piece >= 0]
        for node, link in busy:
            assert link.parent is not None
            up[link.parent.node_id] += 1
            down[node.name] += 1
        rates = {}
        for node, link in busy:
            assert link.parent is not None
            name = link.parent.node_id
            parent = self.nodes.get(name)
            gives = self.origin_rate if parent is None else parent.rate * parent.alive
            if parent is None and self.origin_away:
                gives = 0.0
            rates[id(link)] = min(gives / up[name], node.rate / down[node.name])
        return rates

    def _move(self, node: SimNode, link: Link, rate: float) -> None:
        if link.parent is None:
            return
        moved = rate * STEP_SECONDS
        link.moved.append((self.now, moved, link.piece < 0))
        while self.now - link.moved[0][0] > WINDOW_SECONDS:
            link.moved.pop(0)
        if moved:
            link.quiet_since = self.now
            link.done_bytes += moved
            self.origin_bytes += moved * (link.parent.node_id == ORIGIN)
        parent = self.nodes.get(link.parent.node_id)
        silent = self.origin_away if parent is None else not parent.alive
        patience = SILENT_SECONDS if silent else STARVED_SECONDS
        if self.now - link.quiet_since > patience:
            link.choice.failed(link.parent, "silent" if silent else "it had nothing new")
            self._leave(link)
        elif link.piece >= 0 and link.done_bytes >= PIECE_BYTES:
            self._arrived(node, link, parent)

    def _arrived(self, node: SimNode, link: Link, parent: SimNode | None) -> None:
        assert link.parent is not None
        spoils = parent is not None and parent.spoils_every and link.piece % parent.spoils_every == 0
        if spoils:
            self.spoilt_sent += 1
            link.choice.bad_piece(link.parent)
            self._leave(link)
            return
        link.choice.went_well(link.parent)
        node.here.add(link.piece)
        link.piece, link.done_bytes = -1, 0.0
