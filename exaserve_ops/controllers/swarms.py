"""Plans who gives which part of a revision to whom, from what nodes want, have, and say of one another.

A plan goes to nodes as a part of their wish of weights, so it is told until it is taken in. Nothing of it
is recorded: a new leader goes on from what nodes report, whom they pull from among it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from exaserve_ops.controllers.fleet_state import NodeView
from exaserve_ops.inventory.domain.liveness import DEAD
from exaserve_ops.inventory.selectors import nodes_in_service, rack_of
from exaserve_ops.lib import clock
from exaserve_ops.rollouts.domain.swarm import ORIGIN, Feed, Origin, Peer, Swarm, SwarmPlan, SwarmPolicy
from exaserve_ops.rollouts.domain.swarm_health import Complaint, FeedSeen, Verdicts, corrected, judge
from exaserve_ops.rollouts.domain.swarm_planning import plan_swarm
from exaserve_ops.weights.domain.held import FETCHING, READY, HeldWeights, StoreSight
from exaserve_ops.weights.domain.wanted import SwarmAddress, SwarmPart, WantedWeights

LEAST_NODES = 2
"""From so many nodes on that want a revision, pieces go from node to node."""
KEY_EPOCH_SECONDS = 1800
LINK_LABEL = "link_gbits"
"""Label of a node that says what its network link carries, both ways."""
DEFAULT_LINK_GBITS = 10.0
PIECE_BYTES = 4 * 1024 * 1024
_BYTES_PER_GBIT = 125e6
_PLACES_SECONDS = 5.0
_PULLING = ("flowing", "starved")
_CAP = "cap"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a node is reached, and what its link carries."""

    address: str
    rack: str
    bytes_per_second: float
    simulated: bool = False
    """It has no bytes to give."""


@dataclass(slots=True)
class _Direction:
    """What is in mind of one swarm."""

    plan: SwarmPlan | None = None
    verdicts: Verdicts = field(default_factory=Verdicts)
    members: frozenset[str] = frozenset()
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Member:
    """One node in one swarm."""

    view: NodeView
    port: int
    held: HeldWeights | None
    place: _Place


@dataclass(frozen=True, slots=True)
class SwarmLook:
    """One swarm as it was directed last."""

    total_bytes: int
    members: frozenset[str]
    """Node ids."""
    plan: SwarmPlan
    verdicts: Verdicts


Wishes = Mapping[str, tuple[WantedWeights, ...]]


class SwarmDirector:
    """One look at all swarms a step."""

    def __init__(self, policy: SwarmPolicy | None = None) -> None:
        self._policy = policy or SwarmPolicy()
        self._directions: dict[str, _Direction] = {}
        self._places: dict[str, _Place] = {}
        self._places_read = -1e9

    @property
    def plans(self) -> dict[str, SwarmPlan]:
        """The newest plan of each swarm, by revision."""
        return {key: d.plan for key, d in self._directions.items() if d.plan is not None}

    @property
    def looks(self) -> dict[str, SwarmLook]:
        """Each swarm of the last step, by revision."""
        return {
            key: SwarmLook(d.total_bytes, d.members, d.plan, d.verdicts)
            for key, d in self._directions.items()
            if d.plan is not None
        }

    def direct(self, wanted: Wishes, views: Collection[NodeView]) -> dict[str, tuple[WantedWeights, ...]]:
        """Add its part in each swarm to every wish of a node that can take one."""
        swarms = self._swarms(wanted, views)
        self._directions = {key: self._directions.get(key, _Direction()) for key in swarms}
        parts = {
            (node_id, revision): part
            for revision, members in swarms.items()
            for node_id, part in self._direct_one(revision, members, wanted).items()
        }
        return {
            node_id: tuple(replace(one, swarm=parts.get((node_id, one.revision.digest))) for one in each)
            for node_id, each in wanted.items()
        }

    # -- who is in which -------------------------------------------------------------------------
    def _swarms(self, wanted: Wishes, views: Collection[NodeView]) -> dict[str, dict[str, _Member]]:
        able = {v.node_id: v for v in views if v.liveness != DEAD and _is_able(v)}
        together: dict[str, list[str]] = {}
        for node_id in able.keys() & wanted.keys():
            for one in wanted[node_id]:
                if not one.paused:
                    together.setdefault(one.revision.digest, []).append(node_id)
        found: dict[str, dict[str, _Member]] = {}
        for revision, nodes in together.items():
            if len(nodes) >= LEAST_NODES:
                members = self._members(revision, [able[node_id] for node_id in sorted(nodes)])
                if len(members) >= LEAST_NODES and any(not _is_ready(m) for m in members.values()):
                    found[revision] = members
        return found

    def _members(self, revision: str, views: Sequence[NodeView]) -> dict[str, _Member]:
        places = self._read_places(view.node_id for view in views)
        known = [view for view in views if view.node_id in places]
        real = [view for view in known if not places[view.node_id].simulated]
        # Simulated nodes are a swarm of their own, and in none where a real one wants the same.
        return {
            view.node_id: _Member(view, _piece_port(view), _held(view, revision), places[view.node_id])
            for view in real or known
        }

    def _read_places(self, node_ids: Iterable[str]) -> Mapping[str, _Place]:
        now = time.monotonic()
        # A node that is not known yet must not be told to fetch by itself for a while.
        if now - self._places_read >= _PLACES_SECONDS or not self._places.keys() >= set(node_ids):
            rows = nodes_in_service().exclude(address="").select_related("failure_domain__parent__parent")
            self._places = {
                str(node.pk): _Place(
                    node.address, rack_of(node), _link_bytes(node.labels), simulated=node.simulated
                )
                for node in rows
            }
            self._places_read = now
        return self._places

    # -- one swarm -------------------------------------------------------------------------------
    def _direct_one(
        self, revision: str, members: Mapping[str, _Member], wanted: Wishes
    ) -> dict[str, SwarmPart]:
        direction = self._directions[revision]
        total = next(
            one.revision.total_bytes
            for node_id in members
            for one in wanted[node_id]
            if one.revision.digest == revision
        )
        direction.members, direction.total_bytes = frozenset(members), total
        before = direction.plan or _plan_of(members, self._policy.stripes)
        feeds = [feed for node_id, member in members.items() for feed in _feeds(node_id, member)]
        complaints = [c for node_id, member in members.items() for c in _complaints(node_id, member)]
        direction.verdicts = judge(before, feeds, complaints, direction.verdicts)
        swarm = self._swarm(total, members, direction.verdicts)
        direction.plan = plan = plan_swarm(swarm, before, self._policy)
        # Who has not said yet where it gives pieces is told of the swarm, and planned with a moment later.
        epoch = int(clock.now().timestamp()) // KEY_EPOCH_SECONDS
        return {node_id: SwarmPart(epoch, _stripes(node_id, plan, members)) for node_id in members}

    def _swarm(self, total: int, members: Mapping[str, _Member], verdicts: Verdicts) -> Swarm:
        peers = tuple(
            corrected(
                Peer(
                    node_id,
                    member.place.rack,
                    _have_ratio(member, total),
                    member.place.bytes_per_second,
                    member.place.bytes_per_second,
                ),
                verdicts,
            )
            for node_id, member in members.items()
            if member.port
        )
        fastest = max((peer.send_bytes_per_second for peer in peers), default=1.0)
        return Swarm(total, PIECE_BYTES, peers, Origin(fastest), verdicts.apart)


def _is_able(view: NodeView) -> bool:
    sight = _sight(view)
    # A store that is not open yet, after an agent's start, must not be told to fetch by itself meanwhile.
    return sight is not None and (sight.in_swarms or bool(sight.problem))


def _piece_port(view: NodeView) -> int:
    sight = _sight(view)
    return sight.piece_port if sight is not None else 0


def _sight(view: NodeView) -> StoreSight | None:
    return view.heartbeat.weights if view.heartbeat is not None else None


def _held(view: NodeView, revision: str) -> HeldWeights | None:
    sight = _sight(view)
    return next((one for one in sight.held if one.revision == revision), None) if sight is not None else None


def _is_ready(member: _Member) -> bool:
    return member.held is not None and member.held.state == READY


def _have_ratio(member: _Member, total: int) -> float:
    """Of what may be given: a node counts as whole only once its copy is in its place."""
    if member.held is None or not total:
        return 0.0
    ratio = member.held.have_bytes / total
    return 1.0 if _is_ready(member) else min(ratio, 0.999)


def _link_bytes(labels: Mapping[str, object]) -> float:
    text = str(labels.get(LINK_LABEL, ""))
    try:
        gbits = float(text)
    except ValueError:
        gbits = 0.0
    return (gbits if gbits > 0 else DEFAULT_LINK_GBITS) * _BYTES_PER_GBIT


def _feeds(child: str, member: _Member) -> list[FeedSeen]:
    held = member.held
    if held is None or held.swarm is None or held.state != FETCHING:
        return []
    return [
        FeedSeen(
            child,
            pull.stripe,
            pull.parent,
            pull.bytes_per_second,
            pull.starved_ratio,
            pull.lasted_seconds,
            pull.bottleneck == _CAP,
        )
        for pull in held.swarm.pulls
        if pull.stage in _PULLING
    ]


def _complaints(child: str, member: _Member) -> list[Complaint]:
    if member.held is None or member.held.swarm is None:
        return []
    return [Complaint(child, c.parent, c.bad_pieces, c.unreachable) for c in member.held.swarm.complaints]


def _plan_of(members: Mapping[str, _Member], stripes: int) -> SwarmPlan:
    """What nodes do by themselves, or as an earlier leader told them, as a plan to go on from."""
    feeds = tuple(
        Feed(seen.child, seen.stripe, seen.parent, (), 0, "as it was when this leader began")
        for node_id, member in members.items()
        for seen in _feeds(node_id, member)
        if seen.stripe < stripes
    )
    pace = max(member.place.bytes_per_second for member in members.values())
    return SwarmPlan(stripes, feeds, (), pace, 0.0)


def _stripes(
    node_id: str, plan: SwarmPlan, members: Mapping[str, _Member]
) -> tuple[tuple[SwarmAddress, ...], ...]:
    feeds = sorted(plan.of(node_id), key=lambda feed: feed.stripe)
    if len(feeds) < plan.stripes:
        return ()
    return tuple(
        tuple(
            SwarmAddress(ORIGIN)
            if parent == ORIGIN
            else SwarmAddress(parent, members[parent].place.address, members[parent].port)
            for parent in (feed.parent, *feed.alternatives)
        )
        for feed in feeds
    )
