"""Where a request goes: first the node, then the replica on it.

Nothing here is looked up or counted: callers pass live objects that expose a load, a `usable`
predicate that says which replicas may be tried now, and a `draw` for chance. A choice names its
reason.

Load is compared by what *both* sides know. A fact that one of them lacks takes no part, so that an
unknown queue is neither an empty nor a full one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from exaserve_ops.routing.domain import hashing

DRAWN = "new"
HASHED = "hash"
LAST_RESORT = "retry"
_LEAST_CAPACITY = 1e-6
"""Of what is to get nothing new: it is taken when it is drawn against its like only."""

Draw = Callable[[int], int]
"""`draw(n)` returns an integer in `[0, n)`, evenly."""


class Loaded(Protocol):
    """Something that work can be given to."""

    @property
    def name(self) -> str:
        """Identity, stable for hashing."""

    @property
    def in_flight(self) -> int:
        """Requests that this gateway has open there, to the last byte."""

    @property
    def capacity(self) -> float:
        """Relative size: a replica's weight, 1 for a well one; the sum of them for a node."""

    @property
    def reported_requests(self) -> int | None:
        """Running and waiting as the engines reported, or `None` if unknown or stale."""

    @property
    def kv_used_ratio(self) -> float | None:
        """Share of KV blocks in use, or `None` if unknown or stale."""


class Replica(Loaded, Protocol):
    """A replica that the caller may be asked about by `usable`."""

    @property
    def failed_at_seconds(self) -> float:
        """Monotonic time of the last failure, 0 if there was none."""


R = TypeVar("R", bound=Replica)
R_co = TypeVar("R_co", bound=Replica, covariant=True)
L = TypeVar("L", bound=Loaded)


class Node(Loaded, Protocol[R_co]):
    """Summary of a node's replicas of one model."""

    @property
    def replicas(self) -> Sequence[R_co]:
        """The replicas themselves, looked at only once their node is chosen."""


@dataclass(frozen=True, slots=True)
class Choice(Generic[R]):
    """A replica, and why this one."""

    replica: R
    why: str


def is_lighter(one: Loaded, other: Loaded) -> bool:
    """Whether `one` carries less work for its size than `other`, by what is known of both."""
    first, second = float(one.in_flight), float(other.in_flight)
    if one.reported_requests is not None and other.reported_requests is not None:
        # Reports are a second or two old and include our own requests: a busier engine cannot
        # look idle because we sent nothing, nor our newest requests be missed.
        first = max(first, one.reported_requests)
        second = max(second, other.reported_requests)
    # The request that is to be placed counts, too: where nothing is open, the weights decide.
    first = (first + 1.0) / max(one.capacity, _LEAST_CAPACITY)
    second = (second + 1.0) / max(other.capacity, _LEAST_CAPACITY)
    if first == second and one.kv_used_ratio is not None and other.kv_used_ratio is not None:
        return one.kv_used_ratio < other.kv_used_ratio
    return first < second


def draw_lighter(candidates: Sequence[L], draw: Draw) -> L:
    """Power of two choices: the lighter of two different candidates drawn by chance.

    Raises `IndexError` if there is no candidate.
    """
    count = len(candidates)
    if count <= 1:
        return candidates[0]
    first = draw(count)
    second = draw(count - 1)
    if second >= first:
        second += 1
    one, other = candidates[first], candidates[second]
    return other if is_lighter(other, one) else one


def choose_node(nodes: Sequence[L], draw: Draw) -> L:
    """Pick a node by the summaries alone. Raises `IndexError` if there is none."""
    return draw_lighter(nodes, draw)


def choose_replica(replicas: Sequence[R], draw: Draw) -> R:
    """Pick a replica of the chosen node. Raises `IndexError` if there is none."""
    return draw_lighter(replicas, draw)


def choose(
    nodes: Sequence[Node[R]],
    draw: Draw,
    usable: Callable[[R], bool],
    *,
    avoid_node: str = "",
) -> Choice[R] | None:
    """Pick by load: a node, then a replica of it. `None` if no replica is usable.

    The draw looks at two nodes and two replicas whatever the size of the fleet; only if it hits one
    that is not usable are the usable ones listed. `avoid_node` is a node that just failed: it is
    taken only when no other has a usable replica.
    """
    if not nodes:
        return None
    node = choose_node(nodes, draw)
    if node.replicas and node.name != avoid_node:
        replica = choose_replica(node.replicas, draw)
        if usable(replica):
            return Choice(replica, DRAWN)
    listed = [(node, [r for r in node.replicas if usable(r)]) for node in nodes]
    remaining = [(node, replicas) for node, replicas in listed if replicas]
    elsewhere = [pair for pair in remaining if pair[0].name != avoid_node]
    remaining = elsewhere or remaining
    if not remaining:
        return None
    node = choose_node([node for node, _ in remaining], draw)
    replicas = next(replicas for candidate, replicas in remaining if candidate is node)
    return Choice(choose_replica(replicas, draw), DRAWN)


def choose_by_hash(
    key: str,
    nodes: Sequence[Node[R]],
    usable: Callable[[R], bool],
    *,
    avoid_node: str = "",
) -> Choice[R] | None:
    """Pick by rendezvous rank, so that every gateway picks alike. `None` if none is usable.

    The order is fixed by the key: the best replica of each node in the nodes' order, then the
    second best of each. So a dead node costs one attempt, not one for each of its replicas.
    """
    seed = hashing.key_seed(key)
    if (replica := _first_by_hash(seed, nodes, avoid_node)) is not None and usable(replica):
        return Choice(replica, HASHED)
    ordered = hashing.rank(seed, nodes, lambda node: node.name)
    ordered.sort(key=lambda node: node.name == avoid_node)  # stable: the rest keeps its order
    for replica in _by_depth(seed, ordered):
        if usable(replica):
            return Choice(replica, HASHED)
    return None


def _first_by_hash(seed: int, nodes: Sequence[Node[R]], avoid_node: str) -> R | None:
    """The one at the head of the order, which mostly will do: ordering all of a large fleet takes longer."""
    node = hashing.first(seed, nodes, lambda node: node.name) if nodes else None
    if node is None or node.name == avoid_node or not node.replicas:
        return None
    return hashing.first(seed, node.replicas, lambda replica: replica.name)


def _by_depth(seed: int, ordered: Sequence[Node[R]]) -> Iterator[R]:
    """The best replica of each node, then the second best of each; ranked only as far as asked."""
    ranked: list[list[R]] = []
    for node in ordered:
        replicas = hashing.rank(seed, node.replicas, lambda replica: replica.name)
        ranked.append(replicas)
        yield from replicas[:1]
    for depth in range(1, max(map(len, ranked), default=0)):
        yield from (replicas[depth] for replicas in ranked if depth < len(replicas))


def choose_last_resort(nodes: Sequence[Node[R]], possible: Callable[[R], bool]) -> Choice[R] | None:
    """When all are marked down: the one whose failure is longest ago, so that never all are out."""
    candidates = [replica for node in nodes for replica in node.replicas if possible(replica)]
    if not candidates:
        return None
    replica = min(candidates, key=lambda replica: (replica.failed_at_seconds, replica.name))
    return Choice(replica, LAST_RESORT)
