"""What the plan of a deployment is made from: wish, record and bounds, as plain facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.placement import NodeRoom, PlacementRequest

SERVING = "serving"
STANDBY = "standby"


@dataclass(frozen=True, slots=True)
class RollTarget:
    """The release whose replica is to take a replica's place."""

    release_id: str
    name: str
    """For people, such as `release 3`."""
    in_place: bool = False
    """It goes first and its successor follows, since there is no room for both."""


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """One replica of the deployment, as recorded."""

    id: str
    name: str
    status: str
    wanted: str
    reason: str
    active_sessions: int
    created_at: datetime
    role: str = SERVING
    node: NodeRoom | None = None
    """Where it is, or was sent to."""
    replaces: str = ""
    """Id of the replica whose place this one takes."""
    healing_note: str = ""
    """What the record says that its healing waits for."""
    slow_reason: str = ""
    """How it is slower than its peers; empty where it is not."""
    held_since: datetime | None = None
    """Since when processes that are not its own hold the memory that it needs."""
    held_by_pids: tuple[int, ...] = ()
    accelerator_uuids: tuple[str, ...] = ()
    drain_deadline_at: datetime | None = None
    waits_to_start: bool = False
    """It has a place, and its node is not told before it is its turn; the reason says what it waits for."""
    is_handed_over: bool = False
    """While it drains: whether its conversations have left, or are not waited for any more."""
    is_closed: bool = False
    """Ready for its agent, and no gateway can connect to it, or none has yet; or it serves and wakes."""
    sleeps: bool = False
    """A standby that has to be woken before it answers, or one that is on its way there or back."""
    spilled: bool = False
    """It has a whole card, while its deployment asks for slices."""
    release: str = ""
    """Id of what it runs."""
    roll: RollTarget | None = None
    """What a rollout has it make way for; `None`: nothing."""

    others: tuple[NodeRoom, ...] = ()
    """The nodes of its further members, if it runs on several."""

    @property
    def rooms(self) -> tuple[NodeRoom, ...]:
        """All its nodes."""
        return (self.node, *self.others) if self.node is not None else self.others

    @property
    def emptied(self) -> NodeRoom | None:
        """The node of it that is being emptied; of several the one whose time is up first."""
        leaving = [room for room in self.rooms if room.draining]
        return next((room for room in leaving if room.drain_is_over), leaving[0] if leaving else None)

    @property
    def lost_with(self) -> NodeRoom | None:
        """Of one that runs on several nodes, the one that is dead: the rest of it serves nobody."""
        return next((room for room in self.rooms if room.dead), None) if self.others else None

    @property
    def next_release(self) -> str:
        """Id of the release that its replacement is to have."""
        return self.roll.release_id if self.roll is not None else self.release

    @property
    def node_id(self) -> str:
        """Id of its node; empty where it has none."""
        return self.node.node_id if self.node is not None else ""

    @property
    def node_name(self) -> str:
        """Name of its node, for people."""
        return self.node.name if self.node is not None else "no node"

    @property
    def is_kept(self) -> bool:
        """Whether it is meant to run on."""
        return self.wanted == "run" and self.status != states.STOPPED


@dataclass(frozen=True, slots=True)
class HealingPolicy:
    """How much is healed at once, and when healing gives up."""

    window: timedelta = timedelta(minutes=10)
    """Failures and replacements count for so long."""
    failed_nodes_limit: int = 3
    """Replicas that fail on so many nodes have something wrong with themselves."""
    replacements_least: int = 3
    """Replacements in one window that are allowed to the smallest deployment."""
    surge_ratio: float = 0.25
    """Part of the wish that may run twice while what still serves is replaced."""
    held_seconds: float = 60.0
    """Memory that foreign processes hold for longer takes its accelerator out of use."""

    def replacements_limit(self, wanted: int) -> int:
        """Replacements of failed or slow replicas that one window may see."""
        return max(self.replacements_least, wanted)

    def surge(self, wanted: int) -> int:
        """How many serving replicas may run twice at a time; at least one."""
        return max(1, int(wanted * self.surge_ratio))


@dataclass(frozen=True, slots=True)
class HealingFacts:
    """What bounds the healing of one deployment."""

    frozen: str = ""
    """Why nothing may be healed now; empty where it may."""
    drain_slow: bool = False
    failed_nodes: tuple[tuple[str, str], ...] = ()
    """Id and name of nodes where replicas were given up within the window."""
    recent_replacements: int = 0
    """Made within the window because a replica failed, was held up or was slow."""
    failed_releases: frozenset[str] = frozenset()
    """Ids of releases of which replicas were given up within the window."""
    policy: HealingPolicy = field(default_factory=HealingPolicy)


@dataclass(frozen=True, slots=True)
class DeploymentSnapshot:
    """One deployment and everything that its plan depends on."""

    id: str
    name: str
    deleting: bool
    replicas_wanted: int
    request: PlacementRequest
    replicas: tuple[ReplicaFacts, ...]
    nodes: tuple[NodeRoom, ...]
    standbys_wanted: int = 0
    healing: HealingFacts = field(default_factory=HealingFacts)
    release: str = ""
    """Id of the release that new replicas have."""
    requests: Mapping[str, PlacementRequest] = field(default_factory=dict)
    """What replicas of other releases than that of `request` need, by release id."""

    def request_of(self, release: str) -> PlacementRequest:
        """What a replica of a release needs."""
        return self.requests.get(release, self.request)

    def wanted(self, role: str) -> int:
        """How many replicas of a role are wanted; none of a deployment that is being deleted."""
        if self.deleting:
            return 0
        return self.replicas_wanted if role == SERVING else self.standbys_wanted
