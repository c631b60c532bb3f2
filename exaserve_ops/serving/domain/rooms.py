"""Nodes and accelerators as placement sees them: what is promised, and what still fits. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from exaserve_ops.serving.domain.accelerator_wish import ANYTHING, MOST_PERCENT, SLICE, WHOLE, AcceleratorWish
from exaserve_ops.serving.domain.closeness import UNKNOWN, Closeness
from exaserve_ops.serving.domain.reservation import PLAIN, AcceleratorSize, Terms

_MPS_KIND = "cuda"

SIZE_UNKNOWN = (
    "how much memory a replica needs is not known, since its model's size is not: "
    "make the deployment with a memory per replica"
)
"""Why nothing is placed by itself: what nobody has weighed would be put anywhere."""
TAKEN = "taken"
"""Objection of a slice that another replica has."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What one replica needs."""

    engine: str
    memory_bytes: int
    """Of all its accelerators together; of one that spans nodes on each of them, as the number below."""
    accelerators: int = 1
    nodes: tuple[str, ...] = ()
    """Names of nodes that it may go to; empty is any."""
    standby: bool = False
    """It stands for the serving ones, so it goes where few of them are lost with it."""
    shun: frozenset[str] = frozenset()
    """Ids of nodes that are taken only if no other will do."""
    avoid: frozenset[str] = frozenset()
    """Ids of nodes that are never taken."""
    terms: Terms = PLAIN
    """How its memory counts."""
    wish: AcceleratorWish = ANYTHING
    """Which accelerators it may use."""
    blocked: str = ""
    """Why it cannot be placed anywhere before somebody acts; empty where it can."""
    opened: str = ""
    """Why it takes whole cards although its deployment asks for slices."""
    stored_on: frozenset[str] | None = None
    """Ids of nodes whose disks have its weights; `None`: nothing has to be fetched for it anywhere."""
    nodes_per_replica: int = 1

    @property
    def spans_nodes(self) -> bool:
        """Whether it runs on several nodes at once."""
        return self.nodes_per_replica > 1

    def lacks_weights(self, node_id: str) -> bool:
        """Whether weights would have to be fetched to that node first."""
        return self.stored_on is not None and node_id not in self.stored_on

    @property
    def bytes_each(self) -> int:
        """Memory needed of each accelerator, rounded up."""
        return -(-self.memory_bytes // self.accelerators)

    def variants(self) -> tuple[PlacementRequest, ...]:
        """The request, then what may be taken instead where nothing fits it."""
        if not self.wish.spill_reason:
            return (self,)
        whole = AcceleratorWish(WHOLE, mps=self.wish.mps)
        why = f"no {self.wish.noun} is free, and whole cards are opened to it: {self.wish.spill_reason}"
        return (self, replace(self, wish=whole, opened=why))


@dataclass(frozen=True, slots=True)
class AcceleratorRoom:
    """One accelerator and what is promised of it already."""

    uuid: str
    kind: str
    memory_bytes: int
    reserved_bytes: int
    quarantine: str = ""
    """Why nothing may be placed on it; empty where something may."""
    split: bool = False
    """Cut into slices: these are used, never the card that they were cut from."""
    margin_bytes: int = 0
    """Never planned with."""
    parent_uuid: str = ""
    """The card that this slice was cut from; empty for a whole card."""
    profile: str = ""
    copies: frozenset[str] = frozenset()
    """Weights that lie there and can be shared."""
    replicas: int = 0
    mps_replicas: int = 0
    mps_percent: int = 0
    """Of its threads, promised to replicas with an MPS share."""
    shares_memory: bool = False
    """Of a card: replicas hold the same weights on it once."""

    @property
    def size(self) -> AcceleratorSize:
        """What decides how replicas count on it."""
        return AcceleratorSize(self.kind, self.memory_bytes, self.shares_memory)

    @property
    def is_usable(self) -> bool:
        """Whether anything may be placed on it."""
        return not (self.quarantine or self.split)

    @property
    def free_bytes(self) -> int:
        """Memory that no replica has been promised and that may be."""
        return self.memory_bytes - self.margin_bytes - self.reserved_bytes

    def suits(self, request: PlacementRequest) -> bool:
        """Whether it is of the sort that is asked for, taken or not."""
        if not self.is_usable or (request.wish.mps is not None and self.kind != _MPS_KIND):
            return False
        if request.wish.kind == SLICE:
            return self._is_wanted_slice(request.wish)
        # A process can use one slice only, so who needs several accelerators needs whole cards.
        return not self.parent_uuid or (request.wish.kind != WHOLE and request.accelerators == 1)

    def _is_wanted_slice(self, wish: AcceleratorWish) -> bool:
        named = not wish.profile or self.profile.lower() == wish.profile
        return bool(self.parent_uuid) and named and self.memory_bytes >= wish.slice_memory_bytes

    def holds_copy(self, request: PlacementRequest) -> bool:
        """Whether the weights that the replica would share lie there already."""
        name, _ = request.terms.copy_on(self.size)
        return bool(name) and name in self.copies

    def cost_bytes(self, request: PlacementRequest) -> int:
        """What one more such replica would add here."""
        terms, size = request.terms, self.size
        own = terms.own_bytes(request.bytes_each, size)
        name, copy_bytes = terms.copy_on(size)
        return own + copy_bytes if name and name not in self.copies else own

    def objection(self, request: PlacementRequest) -> str:
        """Why one more such replica does not fit on what suits it; empty where it does."""
        mps = request.wish.mps
        if self.parent_uuid and self.replicas and (mps is None or not self.mps_replicas):
            return TAKEN
        if mps is None and self.mps_replicas:
            return "it is shared by MPS, and takes replicas with an MPS share only"
        if mps is not None and self.replicas > self.mps_replicas:
            return "a replica without an MPS share is on it"
        if mps is not None and self.mps_percent + mps.thread_percent > MOST_PERCENT:
            return f"{self.mps_percent}% of its threads are promised, {mps.thread_percent}% more are needed"
        return self._objection_of_memory(request)

    def _objection_of_memory(self, request: PlacementRequest) -> str:
        claimed = request.terms.claimed_bytes(self.memory_bytes)
        if 0 < claimed < request.bytes_each and self.kind != "cpu":
            return (
                f"its engine claims {_mib(claimed)} MiB of it, and the replica needs "
                f"{_mib(request.bytes_each)} MiB: raise the share"
            )
        cost = self.cost_bytes(request)
        if cost <= self.free_bytes:
            return ""
        kept = f", {_mib(self.margin_bytes)} MiB are kept free" if self.margin_bytes else ""
        beside = " beside the weights that lie there" if self.holds_copy(request) else ""
        needs = f"needs {_mib(cost)} MiB an accelerator{beside}"
        return f"{needs}, at most {_mib(self.free_bytes)} MiB is free{kept}"

    def emptied(self) -> AcceleratorRoom:
        """Return it with nothing on it."""
        return replace(self, reserved_bytes=0, copies=frozenset(), replicas=0, mps_replicas=0, mps_percent=0)

    def take(self, request: PlacementRequest) -> AcceleratorRoom:
        """Return it with one more such replica on it."""
        mps = request.wish.mps
        name, _ = request.terms.copy_on(self.size)
        return replace(
            self,
            reserved_bytes=self.reserved_bytes + self.cost_bytes(request),
            copies=self.copies | {name} if name else self.copies,
            replicas=self.replicas + 1,
            mps_replicas=self.mps_replicas + (mps is not None),
            mps_percent=self.mps_percent + (mps.thread_percent if mps is not None else 0),
        )


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """One node as placement sees it."""

    node_id: str
    name: str
    accepts: bool
    refusal: str
    """Why it accepts nothing, where it does not: `dead`, `cordoned: kernel update`."""
    engines: frozenset[str]
    rack: str
    accelerators: tuple[AcceleratorRoom, ...]
    same_deployment: int
    """Serving replicas of the deployment in question that are here already, and shall stay."""
    replicas: int
    same_standby: int = 0
    """Its standbys that are here already."""
    draining: str = ""
    """Why everything here shall move away; empty where it shall not."""
    drain_is_over: bool = False
    """The time to move away is up: what is still here goes, replaced or not."""
    simulated: bool = False
    """Nothing real runs there."""
    suspect: bool = False
    """It misses signs of life: what is ready there may be gone already."""
    own_bytes: int = 0
    """Memory that the deployment in question has here; weights that its replicas share count once."""
    mps_problem: str = "its agent has not told of one"
    """Why no replica with an MPS share can run here; empty where one can."""
    dead: bool = False
    supernode: str = ""
    """The group of nodes with a fast fabric that it belongs to; empty where none is known."""
    closeness: Closeness = UNKNOWN
    """Read only for plans of replicas over several nodes."""
    members_problem: str = ""
    """Why no part of such a replica can run here; empty where one can."""
    parts_of: frozenset[str] = frozenset()
    """Ids of the deployment's serving replicas over several nodes that have a part here."""

    @property
    def domain(self) -> str:
        """What fails together with it: its rack, or itself where no rack is known."""
        return f"rack {self.rack}" if self.rack else f"node {self.name}"

    def reserve(self, uuids: Iterable[str], request: PlacementRequest) -> NodeRoom:
        """Return the node with one more replica of the deployment on it, as it was asked for."""
        taken = set(uuids)
        added = sum(a.cost_bytes(request) for a in self.accelerators if a.uuid in taken)
        return replace(
            self,
            accelerators=tuple(a.take(request) if a.uuid in taken else a for a in self.accelerators),
            same_deployment=self.same_deployment + (not request.standby),
            same_standby=self.same_standby + request.standby,
            replicas=self.replicas + 1,
            own_bytes=self.own_bytes + added,
        )

    def quarantined(self, uuids: Iterable[str], why: str) -> NodeRoom:
        """Return the node without these accelerators to place on."""
        held = set(uuids)
        rooms = tuple(replace(a, quarantine=why) if a.uuid in held else a for a in self.accelerators)
        return replace(self, accelerators=rooms)


def _mib(count: int) -> int:
    return max(0, count) // (1 << 20)
