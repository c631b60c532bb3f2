"""Where a replica goes, and why not elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class AcceleratorRoom:
    """One accelerator and what is promised of it already."""

    uuid: str
    kind: str
    memory_bytes: int
    reserved_bytes: int

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
    """Replicas of the deployment in question that are here already."""
    replicas: int

    def reserve(self, uuids: Iterable[str], bytes_each: int) -> NodeRoom:
        """Return the node with one more replica of the deployment on it."""
        taken = set(uuids)
        rooms = tuple(
            replace(a, reserved_bytes=a.reserved_bytes + bytes_each) if a.uuid in taken else a
            for a in self.accelerators
        )
        return replace(
            self,
            accelerators=rooms,
            same_deployment=self.same_deployment + 1,
            replicas=self.replicas + 1,
        )


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What one replica needs."""

    engine: str
    memory_bytes: int
    """Of all its accelerators together."""
    accelerators: int = 1
    nodes: tuple[str, ...] = ()
    """Names of nodes that it may go to; empty is any."""

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
    """Choose the node with the fewest replicas of the deployment, then rack, then most free memory.

    Deterministic: ties go to the lower name. A refusal carries one reason for each node.
    """
    by_rack: dict[str, int] = {}
    for node in nodes:
        by_rack[node.rack] = by_rack.get(node.rack, 0) + node.same_deployment
    refused: list[tuple[str, str]] = []
    fitting: list[tuple[tuple[int, int, int, str], NodeRoom, tuple[str, ...]]] = []
    for node in nodes:
        uuids = _fit(request, node)
        if isinstance(uuids, str):
            refused.append((node.name, uuids))
            continue
        free = sum(a.free_bytes for a in node.accelerators)
        rank = (node.same_deployment, by_rack[node.rack], -free, node.name)
        fitting.append((rank, node, uuids))
    if not fitting:
        return Refusal(tuple(sorted(refused)))
    _, node, uuids = min(fitting, key=lambda candidate: candidate[0])
    why = f"{node.same_deployment} of this deployment here, the fewest of {len(fitting)} nodes that fit"
    return Placement(node.node_id, node.name, uuids, why)


def _fit(request: PlacementRequest, node: NodeRoom) -> tuple[str, ...] | str:
    """Return the accelerators to use, or the reason why the node will not do."""
    if request.nodes and node.name not in request.nodes:
        return "not among the deployment's nodes"
    if not node.accepts:
        return node.refusal
    if request.engine not in node.engines:
        return f"its agent has no engine '{request.engine}'"
    if len(node.accelerators) < request.accelerators:
        return f"has {len(node.accelerators)} accelerators, needs {request.accelerators}"
    free = sorted(node.accelerators, key=lambda a: (-a.free_bytes, a.uuid))
    chosen = [a for a in free if a.free_bytes >= request.bytes_each][: request.accelerators]
    if len(chosen) < request.accelerators:
        most = free[0].free_bytes
        return f"needs {_mib(request.bytes_each)} MiB an accelerator, at most {_mib(most)} MiB is free"
    return tuple(a.uuid for a in chosen)


def _mib(count: int) -> int:
    return max(0, count) // (1 << 20)
