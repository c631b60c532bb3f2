"""Where a replica goes, and why not elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


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

    @property
    def is_usable(self) -> bool:
        """Whether anything may be placed on it."""
        return not (self.quarantine or self.split)

    @property
    def free_bytes(self) -> int:
        """Memory that no replica has been promised."""
        return self.memory_bytes - self.reserved_bytes


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

    @property
    def domain(self) -> str:
        """What fails together with it: its rack, or itself where no rack is known."""
        return f"rack {self.rack}" if self.rack else f"node {self.name}"

    def reserve(self, uuids: Iterable[str], bytes_each: int, *, standby: bool = False) -> NodeRoom:
        """Return the node with one more replica of the deployment on it."""
        taken = set(uuids)
        rooms = tuple(
            replace(a, reserved_bytes=a.reserved_bytes + bytes_each) if a.uuid in taken else a
            for a in self.accelerators
        )
        return replace(
            self,
            accelerators=rooms,
            same_deployment=self.same_deployment + (not standby),
            same_standby=self.same_standby + standby,
            replicas=self.replicas + 1,
        )

    def quarantined(self, uuids: Iterable[str], why: str) -> NodeRoom:
        """Return the node without these accelerators to place on."""
        held = set(uuids)
        rooms = tuple(replace(a, quarantine=why) if a.uuid in held else a for a in self.accelerators)
        return replace(self, accelerators=rooms)


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What one replica needs."""

    engine: str
    memory_bytes: int
    """Of all its accelerators together."""
    accelerators: int = 1
    nodes: tuple[str, ...] = ()
    """Names of nodes that it may go to; empty is any."""
    standby: bool = False
    """It stands for the serving ones, so it goes where few of them are lost with it."""
    shun: frozenset[str] = frozenset()
    """Ids of nodes that are taken only if no other will do."""
    avoid: frozenset[str] = frozenset()
    """Ids of nodes that are never taken."""

    @property
    def bytes_each(self) -> int:
        """Memory needed of each accelerator, rounded up."""
        return -(-self.memory_bytes // self.accelerators)


@dataclass(frozen=True, slots=True)
class Placement:
    """A node and its accelerators, and why."""

    node_id: str
    node_name: str
    accelerator_uuids: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """No node will do; one reason a node."""

    reasons: tuple[tuple[str, str], ...]

    def summary(self, *, limit: int = 4) -> str:
        """One line for people: `no nodes`, or the reasons of the first few."""
        if not self.reasons:
            return "no nodes have joined"
        shown = "; ".join(f"{name}: {reason}" for name, reason in self.reasons[:limit])
        more = len(self.reasons) - limit
        return shown + (f"; and {more} more nodes" if more > 0 else "")


def choose_placement(request: PlacementRequest, nodes: Sequence[NodeRoom]) -> Placement | Refusal:
    """Choose the failure domain that has the least of its fair share, then the node, then most free memory.

    A domain's fair share is in proportion to its nodes that may be used; picking the one that lacks
    most of it keeps every domain below its share plus one. Standbys go where the fewest serving ones
    are. Deterministic: ties go to the lower name. A refusal carries one reason for each node.
    """
    refused: list[tuple[str, str]] = []
    fitting: list[tuple[NodeRoom, tuple[str, ...]]] = []
    spread = _Spread(request)
    for node in nodes:
        refusal = _refusal(request, node)
        spread.count(node, usable=not refusal)
        uuids = refusal or _fit(request, node)
        if isinstance(uuids, str):
            refused.append((node.name, uuids))
        else:
            fitting.append((node, uuids))
    if not fitting:
        return Refusal(tuple(sorted(refused)))
    node, uuids = min(fitting, key=lambda candidate: spread.rank(candidate[0]))
    return Placement(node.node_id, node.name, uuids, spread.why(node, len(fitting)))


class _Spread:
    """Counts of the deployment by failure domain, and the order of nodes that follows."""

    def __init__(self, request: PlacementRequest) -> None:
        self._request = request
        self._serving: Counter[str] = Counter()
        self._standbys: Counter[str] = Counter()
        self._usable: Counter[str] = Counter()
        self._total = self._nodes = 0

    def count(self, node: NodeRoom, *, usable: bool) -> None:
        """Take in one node; all before the first rank is asked for."""
        domain = node.domain
        self._serving[domain] += node.same_deployment
        self._standbys[domain] += node.same_standby
        self._usable[domain] += usable
        self._total += node.same_deployment
        self._nodes += usable

    def rank(self, node: NodeRoom) -> tuple[int | str, ...]:
        """Lower is better."""
        free = sum(a.free_bytes for a in node.accelerators if a.is_usable)
        shunned = int(node.node_id in self._request.shun)
        domain = node.domain
        if self._request.standby:
            beside = (self._serving[domain], node.same_deployment)
            return (shunned, *beside, self._standbys[domain], node.same_standby, -free, node.name)
        # What the domain lacks of its share of one more, times the number of nodes: whole numbers.
        lacks = (self._total + 1) * self._usable[domain] - self._serving[domain] * self._nodes
        return (shunned, -lacks, node.same_deployment, -free, node.name)

    def why(self, node: NodeRoom, fitting: int) -> str:
        """Say why this node."""
        count, domain = self._serving[node.domain], node.domain
        if self._request.standby:
            return f"{count} of the serving ones are in its {domain}, the fewest of {fitting} nodes that fit"
        return (
            f"{count} of {self._total} of this deployment in its {domain}, {node.same_deployment} on it: "
            f"the least of its fair share among {fitting} nodes that fit"
        )


def _refusal(request: PlacementRequest, node: NodeRoom) -> str:
    """Why the node will not do however much memory is free; empty where it may do."""
    if request.nodes and node.name not in request.nodes:
        return "not among the deployment's nodes"
    if not node.accepts:
        return node.refusal
    if node.node_id in request.avoid:
        return "a replica of this deployment failed here"
    if request.engine not in node.engines:
        return f"its agent has no engine '{request.engine}'"
    return ""


def _fit(request: PlacementRequest, node: NodeRoom) -> tuple[str, ...] | str:
    """Return the accelerators to use, or why those of the node will not do."""
    usable = [a for a in node.accelerators if a.is_usable]
    if len(usable) < request.accelerators:
        barred = [f"; {a.uuid} is quarantined: {a.quarantine}" for a in node.accelerators if a.quarantine]
        barred += [f"; {a.uuid} is in MIG mode: its slices count" for a in node.accelerators if a.split]
        return f"has {len(usable)} accelerators, needs {request.accelerators}{''.join(barred)}"
    free = sorted(usable, key=lambda a: (-a.free_bytes, a.uuid))
    chosen = [a for a in free if a.free_bytes >= request.bytes_each][: request.accelerators]
    if len(chosen) < request.accelerators:
        most = free[0].free_bytes
        return f"needs {_mib(request.bytes_each)} MiB an accelerator, at most {_mib(most)} MiB is free"
    return tuple(a.uuid for a in chosen)


def _mib(count: int) -> int:
    return max(0, count) // (1 << 20)
