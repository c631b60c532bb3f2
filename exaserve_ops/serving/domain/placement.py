"""Where a replica goes, and why not elsewhere."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

_NOT_NAMED = "not among the deployment's nodes"


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
    suspect: bool = False
    """It misses signs of life: what is ready there may be gone already."""

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
        """One line for people: `no nodes`, each node's reason, or of many nodes the one that most give.

        It stays the same while single nodes of many come and go: each new text is an event.
        """
        if not self.reasons:
            return "no nodes have joined"
        told = [pair for pair in self.reasons if pair[1] != _NOT_NAMED] or self.reasons
        if len(told) <= limit:
            return "; ".join(f"{name}: {reason}" for name, reason in told)
        counts = Counter(reason for _, reason in told)
        return f"no node of many will do, mostly: {max(counts, key=lambda reason: (counts[reason], reason))}"


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


class PlacementBoard:
    """Rooms of all nodes, for placing many replicas of one deployment, one after the other.

    Each is placed as `choose_placement` would place it with the rooms as they are by then, at the cost of
    a look at the best node of each failure domain instead of one at every node.
    """

    def __init__(self, request: PlacementRequest, rooms: Iterable[NodeRoom]) -> None:
        self._request = request
        self._rooms = {room.node_id: room for room in rooms}
        self._queues: dict[bool, _Queue] = {}

    def place(self, *, standby: bool) -> Placement | Refusal:
        """Choose a place for one more replica and reserve it."""
        if standby not in self._queues:
            request = replace(self._request, standby=standby)
            self._queues[standby] = _Queue(request, self._rooms.values())
        choice = self._queues[standby].first()
        if isinstance(choice, Placement):
            before, bytes_each = self._rooms[choice.node_id], self._request.bytes_each
            room = before.reserve(choice.accelerator_uuids, bytes_each, standby=standby)
            self._rooms[choice.node_id] = room
            for queue in self._queues.values():
                queue.replace(before, room)
        return choice


class _Queue:
    """Nodes that fit one request: of each failure domain the best first, as a heap."""

    def __init__(self, request: PlacementRequest, rooms: Iterable[NodeRoom]) -> None:
        self._request = request
        self._rooms: dict[str, NodeRoom] = {}
        self._fitting: dict[str, tuple[str, ...]] = {}
        self._heaps: dict[tuple[bool, str], list[tuple[tuple[int | str, ...], str, NodeRoom]]] = {}
        self._spread = _Spread(request)
        self._refusal: Refusal | None = None
        for room in rooms:
            self._spread.count(room, usable=not _refusal(request, room))
            self._take_in(room)

    def first(self) -> Placement | Refusal:
        """The node that is to be taken next, and which of its accelerators."""
        if not self._fitting:
            if self._refusal is None:
                refused = choose_placement(self._request, tuple(self._rooms.values()))
                self._refusal = refused if isinstance(refused, Refusal) else Refusal(())
            return self._refusal
        node = min(self._best_of_each(), key=self._spread.rank)
        why = self._spread.why(node, len(self._fitting))
        return Placement(node.node_id, node.name, self._fitting[node.node_id], why)

    def replace(self, before: NodeRoom, room: NodeRoom) -> None:
        """Take note of what a node has become by a reservation."""
        self._spread.recount(before, room)
        self._take_in(room)

    def _take_in(self, room: NodeRoom) -> None:
        self._rooms[room.node_id], self._refusal = room, None
        uuids = _refusal(self._request, room) or _fit(self._request, room)
        if isinstance(uuids, str):
            self._fitting.pop(room.node_id, None)
            return
        self._fitting[room.node_id] = uuids
        heap = self._heaps.setdefault((room.node_id in self._request.shun, room.domain), [])
        heapq.heappush(heap, (self._spread.rank_within(room), room.node_id, room))

    def _best_of_each(self) -> Iterator[NodeRoom]:
        for heap in self._heaps.values():
            while heap and not self._is_current(heap[0][2]):
                heapq.heappop(heap)
            if heap:
                yield heap[0][2]

    def _is_current(self, room: NodeRoom) -> bool:
        return self._rooms[room.node_id] is room and room.node_id in self._fitting


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

    def recount(self, before: NodeRoom, after: NodeRoom) -> None:
        """Take in what changed on one node that was counted."""
        more = after.same_deployment - before.same_deployment
        self._serving[after.domain] += more
        self._total += more
        self._standbys[after.domain] += after.same_standby - before.same_standby

    def rank(self, node: NodeRoom) -> tuple[int | str, ...]:
        """Lower is better."""
        free = _free_bytes(node)
        shunned = int(node.node_id in self._request.shun)
        domain = node.domain
        if self._request.standby:
            beside = (self._serving[domain], node.same_deployment)
            return (shunned, *beside, self._standbys[domain], node.same_standby, -free, node.name)
        # What the domain lacks of its share of one more, times the number of nodes: whole numbers.
        lacks = (self._total + 1) * self._usable[domain] - self._serving[domain] * self._nodes
        return (shunned, -lacks, node.same_deployment, -free, node.name)

    def rank_within(self, node: NodeRoom) -> tuple[int | str, ...]:
        """What orders nodes of one failure domain, of which all or none are shunned, as `rank` does."""
        same_standby = node.same_standby if self._request.standby else 0
        return (node.same_deployment, same_standby, -_free_bytes(node), node.name)

    def why(self, node: NodeRoom, fitting: int) -> str:
        """Say why this node."""
        count, domain = self._serving[node.domain], node.domain
        if self._request.standby:
            return f"{count} of the serving ones are in its {domain}, the fewest of {fitting} nodes that fit"
        return (
            f"{count} of {self._total} of this deployment in its {domain}, {node.same_deployment} on it: "
            f"the least of its fair share among {fitting} nodes that fit"
        )


def _free_bytes(node: NodeRoom) -> int:
    return sum(a.free_bytes for a in node.accelerators if a.is_usable)


def _refusal(request: PlacementRequest, node: NodeRoom) -> str:
    """Why the node will not do however much memory is free; empty where it may do."""
    if request.nodes and node.name not in request.nodes:
        return _NOT_NAMED
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
