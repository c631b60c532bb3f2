"""Which of the replicas that have a place start now, and what the others wait for. Pure.

A start takes its part of a node's disk, of the place that weights come from, and of the network. So no more
begin at once than these carry; whoever is ready gives its place to the next. Nothing is remembered between
two looks: who starts and who waits is read off the record, so another controller goes on in the middle.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from exaserve_ops.serving.domain import lifecycle as states

_PATIENCE = timedelta(minutes=5)
"""Whoever has waited for longer goes before all that came later."""
_GRACE = timedelta(seconds=30)
"""For words to get to a node and back."""
_FETCH = timedelta(hours=1)
"""Weights that are not there after so long do not hold others up any more."""
_ON_THEIR_WAY = (states.STARTING, states.LOADING)

_CAUSES = (
    (" start in the fleet", "others in the fleet to start"),
    ("waits its turn: ", "others on their node to start"),
    (" nodes read theirs in place", "other nodes to read weights in place"),
    (" fetch from an origin", "others to have fetched from an origin"),
    ("waits for weights: ", "others in their rack to have fetched"),
    (" is offline", "their node to come back"),
)
"""What the reasons below have in common, the longest part first; each is about one replica."""


@dataclass(frozen=True, slots=True)
class StartLimits:
    """How much may start at once. 0: any number."""

    per_node: int = 4
    """Replicas of one node: they share its disk and its processors."""
    per_fleet: int = 1024
    from_origins: int = 16
    """Copies of weights that leave their origins. Nodes that pass a revision on to one another count once."""
    in_place: int = 64
    """Nodes that read weights where their source lies, such as on one file server."""
    per_rack: int = 32
    """Nodes of a rack that fetch weights."""


@dataclass(frozen=True, slots=True)
class Starter:
    """A replica that waits for its turn, or that has it and is not ready yet."""

    id: str
    name: str
    deployment: str
    node_id: str
    revision: str
    """Digest of its weights."""
    status: str
    status_since: datetime
    waits_since: datetime | None
    """`None`: it may start, or has started."""
    allowed_at: datetime | None = None
    start_seconds: float = 300.0
    in_place: bool = False
    """Its weights are read where their source lies, and not from a copy on the node's disk."""
    standby: bool = False
    takes_over: bool = False
    """It takes the place of one that goes or is gone: somebody waits for it."""
    others: tuple[str, ...] = ()
    """Ids of its further nodes, where it runs on several: it starts on all of them or on none."""

    @property
    def node_ids(self) -> tuple[str, ...]:
        """Ids of all its nodes."""
        return (self.node_id, *self.others)

    @property
    def source(self) -> tuple[str, str]:
        """The same of its first node alone."""
        return self.node_id, self.revision

    @property
    def sources(self) -> frozenset[tuple[str, str]]:
        """Whose reading of which weights it is: replicas of a node share it."""
        return frozenset((node_id, self.revision) for node_id in self.node_ids)


@dataclass(frozen=True, slots=True)
class StartNode:
    """A node that replicas wait for or start on."""

    name: str
    rack: str = ""
    offline: bool = False
    swarms: bool = False
    """It takes weights from other nodes, and passes them on."""


@dataclass(frozen=True, slots=True)
class WeightsAtHand:
    """Where weights are, as (node, revision)."""

    here: frozenset[tuple[str, str]] = frozenset()
    """On the node's disk; of those read in place, in its memory: a replica there has read them."""
    fetching: frozenset[tuple[str, str]] = frozenset()
    failed: frozenset[tuple[str, str]] = frozenset()
    """The node cannot have them now, and says why: nobody else waits for that."""
    seeded: frozenset[str] = frozenset()
    """Revisions that a node has whole and passes on."""


@dataclass(frozen=True, slots=True)
class StartFacts:
    """All that is decided from."""

    starters: tuple[Starter, ...]
    nodes: Mapping[str, StartNode]
    weights: WeightsAtHand = field(default_factory=WeightsAtHand)
    ready: Mapping[str, int] = field(default_factory=dict)
    """Ready replicas by deployment."""
    limits: StartLimits = field(default_factory=StartLimits)


@dataclass(frozen=True, slots=True)
class Waits:
    """A replica that does not start yet."""

    replica_id: str
    why: str
    for_others: bool = True
    """It waits for a limit, and so for others that start; else for its node to come back."""


@dataclass(frozen=True, slots=True)
class StartPlan:
    """Who may start now, in the order in which they were let go, and who waits."""

    go: tuple[str, ...]
    waits: tuple[Waits, ...]
    starting: tuple[Starter, ...]
    """Those that had their turn before and are not ready yet."""

    @property
    def held_up(self) -> int:
        """How many wait for others."""
        return sum(one.for_others for one in self.waits)


def plan_starts(facts: StartFacts, *, now: datetime) -> StartPlan:
    """Let as many start as the limits leave room for.

    Whoever waited for too long is first; standbys come last; those that take somebody's place come before
    others. Then deployments take turns: each gets its first replica before another gets its hundredth, and
    begins with those whose weights are there. One that finds no room lets those behind it pass.
    """
    waiting = [one for one in facts.starters if one.waits_since is not None]
    starting = [one for one in facts.starters if one.waits_since is None and _holds(one, facts, now)]
    room = _Room(facts, starting)
    go: list[str] = []
    waits: list[Waits] = []
    for one in _in_order(waiting, starting, facts, now):
        if offline := _offline(one, facts):
            waits.append(Waits(one.id, offline, for_others=False))
        elif why := room.refusal(one):
            waits.append(Waits(one.id, why))
        else:
            room.take(one)
            go.append(one.id)
    return StartPlan(tuple(go), tuple(waits), tuple(starting))


def cause_of(why: str) -> str:
    """What a replica waits for, in words that fit others, too: `others on their node to start`."""
    return next((words for part, words in _CAUSES if part in why), "a decision, within a second or two")


def _offline(one: Starter, facts: StartFacts) -> str:
    """What keeps its node from being told anything; empty: nothing."""
    for node_id in one.node_ids:
        node = facts.nodes.get(node_id)
        if node is None:
            return "its node is not known"
        if node.offline:
            return f"{node.name} is offline"
    return ""


def _holds(one: Starter, facts: StartFacts, now: datetime) -> bool:
    """Whether it still takes its part: a start that hangs frees it when its time is up."""
    if _offline(one, facts):
        return False
    limit = timedelta(seconds=one.start_seconds) + _GRACE
    if one.status in _ON_THEIR_WAY:
        return now < one.status_since + limit
    if one.status != states.PLACED or one.allowed_at is None:
        return False
    if one.sources & facts.weights.failed:
        return now < one.allowed_at + _GRACE
    return now < one.allowed_at + (_FETCH if one.sources & facts.weights.fetching else limit)


def _is_overdue(one: Starter, now: datetime) -> bool:
    return one.waits_since is not None and now - one.waits_since > _PATIENCE


def _in_order(
    waiting: Sequence[Starter], starting: Iterable[Starter], facts: StartFacts, now: datetime
) -> list[Starter]:
    here = facts.weights.here
    level = Counter(facts.ready)
    level.update(one.deployment for one in starting)
    ranked = sorted(
        waiting,
        key=lambda one: (one.standby, not one.takes_over, not one.sources <= here, one.waits_since, one.name),
    )
    keys: dict[str, tuple[object, ...]] = {}
    for one in ranked:
        if _is_overdue(one, now):
            keys[one.id] = (0, one.waits_since, one.name)
        else:
            keys[one.id] = (
                1,
                one.standby,
                not one.takes_over,
                level[one.deployment],
                one.waits_since,
                one.name,
            )
            level[one.deployment] += 1
    return sorted(ranked, key=lambda one: keys[one.id])


class _Room:
    """What is left of every limit while a plan is made."""

    def __init__(self, facts: StartFacts, starting: Iterable[Starter]) -> None:
        self._facts = facts
        self._limits = facts.limits
        self._fleet = 0
        self._on_node: Counter[str] = Counter()
        self._origins: set[tuple[str, str]] = set()
        self._in_place: set[tuple[str, str]] = set()
        self._in_rack: dict[str, set[str]] = defaultdict(set)
        for node_id, revision in facts.weights.fetching:
            node = facts.nodes.get(node_id)
            if node is not None and not node.offline:
                self._fetch(node_id, revision)
        for one in starting:
            self.take(one)

    def take(self, one: Starter) -> None:
        """Count a replica that starts."""
        self._fleet += 1
        self._on_node.update(one.node_ids)
        for source in one.sources - self._facts.weights.here:
            if one.in_place:
                self._in_place.add(source)
            else:
                self._fetch(*source)

    def refusal(self, one: Starter) -> str:
        """Why it does not start now; empty: it may."""
        refusals = (self._no_turn(pk) or self._no_weights(one, pk) for pk in one.node_ids)
        return next(filter(None, refusals), "")

    def _no_turn(self, node_id: str) -> str:
        limits, node = self._limits, self._facts.nodes[node_id]
        here = self._on_node[node_id]
        if limits.per_node and here >= limits.per_node:
            return f"waits its turn: {here:,} of {limits.per_node:,} start on {node.name}"
        if limits.per_fleet and self._fleet >= limits.per_fleet:
            return f"waits its turn: {self._fleet:,} of {limits.per_fleet:,} start in the fleet"
        return ""

    def _no_weights(self, one: Starter, node_id: str) -> str:
        limits, node = self._limits, self._facts.nodes[node_id]
        source = (node_id, one.revision)
        if source in self._facts.weights.here:
            return ""
        if one.in_place:
            reading = len(self._in_place)
            if source in self._in_place or not limits.in_place or reading < limits.in_place:
                return ""
            return f"waits for weights: {reading:,} of {limits.in_place:,} nodes read theirs in place"
        origin = self._origin_of(*source)
        taking = len(self._origins)
        if origin and origin not in self._origins and limits.from_origins and taking >= limits.from_origins:
            seeds = "; who has them seeds the next" if node.swarms else ""
            return f"waits for weights: {taking:,} of {limits.from_origins:,} fetch from an origin{seeds}"
        fetching = self._in_rack[node.rack]
        if node.rack and node_id not in fetching and 0 < limits.per_rack <= len(fetching):
            return f"waits for weights: {len(fetching):,} of {limits.per_rack:,} nodes of {node.rack} fetch"
        return ""

    def _fetch(self, node_id: str, revision: str) -> None:
        origin = self._origin_of(node_id, revision)
        if origin:
            self._origins.add(origin)
        self._in_rack[self._facts.nodes[node_id].rack].add(node_id)

    def _origin_of(self, node_id: str, revision: str) -> tuple[str, str] | None:
        """What a fetch counts as at the origins: the node by itself, or its swarm as one; `None`: nothing."""
        if not self._facts.nodes[node_id].swarms:
            return node_id, revision
        return None if revision in self._facts.weights.seeded else ("", revision)
