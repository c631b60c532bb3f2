"""Where a replica goes, and why not elsewhere."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from exaserve_ops.serving.domain.fitting import (
    NOT_NAMED,
    find_room,
    free_accelerators,
    mib,
    node_refusal,
    slices_taken,
    why_never,
)
from exaserve_ops.serving.domain.gangs import Gang, Member, Seat, plan_gang
from exaserve_ops.serving.domain.rooms import TAKEN, AcceleratorRoom, NodeRoom, PlacementRequest

__all__ = [
    "AcceleratorRoom",
    "NodeRoom",
    "Placement",
    "PlacementBoard",
    "PlacementRequest",
    "Refusal",
    "choose_placement",
    "find_room",
    "reserve",
]


@dataclass(frozen=True, slots=True)
class Placement:
    """A node and its accelerators, and why."""

    node_id: str
    node_name: str
    accelerator_uuids: tuple[str, ...]
    why: str
    reserved_bytes: int = 0
    """What is promised for it of all its accelerators; a copy of weights that lies there costs nothing."""
    shares_weights: bool = False
    opened: str = ""
    """Why it takes whole cards although its deployment asks for slices."""
    members: tuple[Member, ...] = ()
    """Of a replica over several nodes all its parts: the first is what is said above. Else empty."""

    @property
    def where(self) -> str:
        """The names of all its nodes, for people."""
        return ", ".join(member.node_name for member in self.members) or self.node_name

    @property
    def node_ids(self) -> tuple[str, ...]:
        """Ids of all its nodes."""
        return tuple(member.node_id for member in self.members) or (self.node_id,)


@dataclass(frozen=True, slots=True)
class Refusal:
    """No node will do; one reason a node."""

    reasons: tuple[tuple[str, str], ...]
    fleet: str = ""
    """What is the same for all nodes and says it all; empty where each has its own reason."""

    def summary(self, *, limit: int = 4) -> str:
        """One line for people: `no nodes`, each node's reason, or of many nodes the one that most give.

        It stays the same while single nodes of many come and go: each new text is an event.
        """
        if self.fleet:
            return self.fleet
        if not self.reasons:
            return "no nodes have joined"
        told = [pair for pair in self.reasons if pair[1] != NOT_NAMED] or self.reasons
        if len(told) <= limit:
            return "; ".join(f"{name}: {reason}" for name, reason in told)
        counts = Counter(reason for _, reason in told)
        return f"no node of many will do, mostly: {max(counts, key=lambda reason: (counts[reason], reason))}"


@dataclass(frozen=True, slots=True)
class _Fit:
    """Accelerators of one node that will do, and what they are promised for it."""

    uuids: tuple[str, ...]
    reserved_bytes: int
    shares_weights: bool


def choose_placement(request: PlacementRequest, nodes: Sequence[NodeRoom]) -> Placement | Refusal:
    """Choose the failure domain that has the least of its fair share, then the node, then most free memory.

    A domain's fair share is in proportion to its nodes that may be used; picking the one that lacks
    most of it keeps every domain below its share plus one. Standbys go where the fewest serving ones
    are. Deterministic: ties go to the lower name. A refusal carries one reason for each node. Where no
    slice fits a request that may spill over, whole cards are tried.
    """
    if request.spans_nodes:
        return place_gang(request, nodes)
    refused: list[Refusal] = []
    for variant in request.variants():
        choice = _choose(variant, nodes)
        if isinstance(choice, Placement):
            return choice
        refused.append(choice)
    return _joined(refused)


def place_gang(request: PlacementRequest, nodes: Iterable[NodeRoom]) -> Placement | Refusal:
    """Choose places for all members of a replica over several nodes, or say of each supernode why not."""
    if request.blocked:
        return Refusal((), request.blocked)
    seats = [Seat(room, room.supernode, room.closeness) for room in nodes]
    gang = plan_gang(request, request.nodes_per_replica, seats)
    if not isinstance(gang, Gang):
        return Refusal(gang.reasons, gang.summary())
    head = gang.members[0]
    return Placement(
        head.node_id,
        head.node_name,
        head.accelerator_uuids,
        gang.why,
        sum(member.reserved_bytes for member in gang.members),
        members=gang.members,
    )


def reserve(request: PlacementRequest, placement: Placement, room: NodeRoom) -> NodeRoom:
    """Return the node with a placement of this request, or its part of one, on it."""
    taken = next(v for v in request.variants() if v.opened == placement.opened)
    part = next((m for m in placement.members if m.node_id == room.node_id), placement)
    return room.reserve(part.accelerator_uuids, taken)


def _choose(request: PlacementRequest, nodes: Sequence[NodeRoom]) -> Placement | Refusal:
    refused: list[tuple[str, str]] = []
    fitting: list[tuple[NodeRoom, _Fit]] = []
    spread = _Spread(request)
    for node in nodes:
        fit = node_refusal(request, node) or _fit(request, node)
        spread.count(node, usable=not isinstance(fit, str) or not why_never(request, node))
        if isinstance(fit, str):
            refused.append((node.name, fit))
        else:
            fitting.append((node, fit))
    if not fitting:
        return Refusal(tuple(sorted(refused)), request.blocked or _slices_of_fleet(request, nodes))
    node, fit = min(fitting, key=lambda candidate: spread.rank(candidate[0], _free_bytes(candidate[0])))
    return _placement(request, node, fit, spread.why(node, len(fitting)))


class PlacementBoard:
    """Rooms of all nodes, for placing many replicas of one deployment, one after the other.

    Each is placed as `choose_placement` would place it with the rooms as they are by then, at the cost of
    a look at the best node of each failure domain instead of one at every node. Who asks for the same as
    somebody before gets the same refusal: rooms only shrink.
    """

    def __init__(self, request: PlacementRequest, rooms: Iterable[NodeRoom]) -> None:
        self._request = request
        self._rooms = {room.node_id: room for room in rooms}
        self._queues: dict[PlacementRequest, _Queue] = {}
        self._no_gang: dict[PlacementRequest, Refusal] = {}

    def place(self, *, standby: bool) -> Placement | Refusal:
        """Choose a place for one more replica and reserve it."""
        return self.place_as(replace(self._request, standby=standby))

    def place_as(self, request: PlacementRequest) -> Placement | Refusal:
        """Choose a place for a replica that needs something of its own, such as another release."""
        if request.spans_nodes:
            return self._place_gang(request)
        refused: list[Refusal] = []
        for variant in request.variants():
            choice = self._queue(variant).first()
            if isinstance(choice, Placement):
                self._take(variant, choice)
                return choice
            refused.append(choice)
        return _joined(refused)

    def _place_gang(self, request: PlacementRequest) -> Placement | Refusal:
        if request in self._no_gang:
            return self._no_gang[request]
        choice = place_gang(request, self._rooms.values())
        if isinstance(choice, Refusal):
            self._no_gang[request] = choice
        else:
            self._take(request, choice)
        return choice

    def _queue(self, request: PlacementRequest) -> _Queue:
        if request not in self._queues:
            self._queues[request] = _Queue(request, self._rooms.values())
        return self._queues[request]

    def _take(self, request: PlacementRequest, choice: Placement) -> None:
        for node_id in choice.node_ids:
            before = self._rooms[node_id]
            room = self._rooms[node_id] = reserve(request, choice, before)
            for queue in self._queues.values():
                queue.replace(before, room)


class _Queue:
    """Nodes that fit one request: of each failure domain the best first, as a heap."""

    def __init__(self, request: PlacementRequest, rooms: Iterable[NodeRoom]) -> None:
        self._request = request
        self._rooms: dict[str, NodeRoom] = {}
        self._fitting: dict[str, _Fit] = {}
        self._heaps: dict[tuple[bool, str], list[tuple[tuple[int | str, ...], int, int, NodeRoom]]] = {}
        """What orders nodes of one domain; a number that no two share, the node's free bytes, and itself."""
        self._taken_in = 0
        self._spread = _Spread(request)
        self._refusal: Refusal | None = None
        for room in rooms:
            self._take_in(room)
            is_usable = room.node_id in self._fitting or not why_never(request, room)
            self._spread.count(room, usable=is_usable)

    def first(self) -> Placement | Refusal:
        """The node that is to be taken next, and which of its accelerators."""
        if not self._fitting:
            if self._refusal is None:
                refused = _choose(self._request, tuple(self._rooms.values()))
                self._refusal = refused if isinstance(refused, Refusal) else Refusal(())
            return self._refusal
        _, node = min(self._best_of_each(), key=lambda best: self._spread.rank(best[1], best[0]))
        why = self._spread.why(node, len(self._fitting))
        return _placement(self._request, node, self._fitting[node.node_id], why)

    def replace(self, before: NodeRoom, room: NodeRoom) -> None:
        """Take note of what a node has become by a reservation."""
        self._spread.recount(before, room)
        self._take_in(room)

    def _take_in(self, room: NodeRoom) -> None:
        self._rooms[room.node_id] = room
        fit = node_refusal(self._request, room) or _fit(self._request, room)
        if isinstance(fit, str):
            self._fitting.pop(room.node_id, None)
            return
        self._fitting[room.node_id] = fit
        heap = self._heaps.setdefault((room.node_id in self._request.shun, room.domain), [])
        free_bytes = _free_bytes(room)
        self._taken_in += 1
        heapq.heappush(heap, (self._spread.rank_within(room, free_bytes), self._taken_in, free_bytes, room))

    def _best_of_each(self) -> Iterator[tuple[int, NodeRoom]]:
        """The best node of each failure domain, and its free bytes."""
        for heap in self._heaps.values():
            while heap and not self._is_current(heap[0][3]):
                heapq.heappop(heap)
            if heap:
                yield heap[0][2], heap[0][3]

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

    def rank(self, node: NodeRoom, free: int) -> tuple[int | str, ...]:
        """Lower is better. `free`: bytes of the node that nobody was promised."""
        shunned = int(node.node_id in self._request.shun)
        domain = node.domain
        if self._request.standby:
            beside = (self._serving[domain], node.same_deployment)
            fetches = int(self._request.lacks_weights(node.node_id))
            return (shunned, *beside, self._standbys[domain], node.same_standby, fetches, -free, node.name)
        # What the domain lacks of its share of one more, times the number of nodes: whole numbers.
        lacks = (self._total + 1) * self._usable[domain] - self._serving[domain] * self._nodes
        fetches = int(self._request.lacks_weights(node.node_id))
        return (shunned, -lacks, node.same_deployment, fetches, -free, node.name)

    def rank_within(self, node: NodeRoom, free: int) -> tuple[int | str, ...]:
        """What orders nodes of one failure domain, of which all or none are shunned, as `rank` does."""
        same_standby = node.same_standby if self._request.standby else 0
        fetches = int(self._request.lacks_weights(node.node_id))
        return (node.same_deployment, same_standby, fetches, -free, node.name)

    def why(self, node: NodeRoom, fitting: int) -> str:
        """Say why this node."""
        count, domain = self._serving[node.domain], node.domain
        of_these = f"of {fitting} {'node that fits' if fitting == 1 else 'nodes that fit'}"
        if self._request.standby:
            return f"{count} of the serving ones are in its {domain}, the fewest {of_these}"
        if not self._total:
            return f"the first of this deployment: most nodes and memory beside it, {of_these}"
        return (
            f"{count} of {self._total} replicas of this deployment are in its {domain}, "
            f"{node.same_deployment} on the node itself: furthest below a fair share, {of_these}"
        )


def _free_bytes(node: NodeRoom) -> int:
    return sum(a.free_bytes for a in node.accelerators if a.is_usable)


def _fit(request: PlacementRequest, node: NodeRoom) -> _Fit | str:
    """Return the accelerators to use, or why those of the node will not do."""
    fitting = free_accelerators(request, node)
    if isinstance(fitting, str):
        return fitting
    chosen = fitting[: request.accelerators]
    return _Fit(
        tuple(a.uuid for a in chosen),
        sum(a.cost_bytes(request) for a in chosen),
        all(a.holds_copy(request) for a in chosen),
    )


def _joined(refused: Sequence[Refusal]) -> Refusal:
    """What is said where neither what is asked for nor what may be taken instead has room."""
    first, *others = refused
    if not others:
        return first
    instead = "; ".join(f"opened, too: {refusal.summary()}" for refusal in others)
    return replace(first, fleet=f"{first.summary()}; {instead}")


def _slices_of_fleet(request: PlacementRequest, nodes: Sequence[NodeRoom]) -> str:
    """What is to be said once for all nodes: there is no such slice, or all are taken. Else empty."""
    wish = request.wish
    if not wish.wants_slice:
        return ""
    slices = [
        a for node in nodes if not node_refusal(request, node) for a in node.accelerators if a.suits(request)
    ]
    if not slices:
        return f"no node that may be used has a {wish.noun}" if nodes else ""
    if all(a.objection(request) == TAKEN for a in slices):
        return slices_taken(len(slices), request, " in the fleet")
    return ""


def _placement(request: PlacementRequest, node: NodeRoom, fit: _Fit, spread_why: str) -> Placement:
    words = [request.opened] if request.opened else []
    if request.stored_on is not None:
        lacks = request.lacks_weights(node.node_id)
        words.append("its weights are fetched first" if lacks else "its weights are on that node's disk")
    if fit.shares_weights:
        words.append(f"its weights lie there already, it adds {mib(fit.reserved_bytes)} MiB")
    if fit.reserved_bytes > request.memory_bytes:
        by = "its engine's share" if request.terms.claimed_millionths else "its MPS limit"
        told = f"{mib(fit.reserved_bytes)} MiB are promised to it by {by}"
        words.append(f"{told}, and it needs {mib(request.memory_bytes)} MiB")
    why = "; ".join([spread_why, *words])
    return Placement(
        node.node_id, node.name, fit.uuids, why, fit.reserved_bytes, fit.shares_weights, request.opened
    )
