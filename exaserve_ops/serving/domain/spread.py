"""What the loss of each failure domain would cost a deployment, and whether it is spread well."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from exaserve_ops.serving.domain.fitting import Ability, find_able
from exaserve_ops.serving.domain.rooms import NodeRoom, PlacementRequest


@dataclass(frozen=True, slots=True)
class DomainLoss:
    """One failure domain, and what of the deployment is gone with it."""

    kind: str
    """`rack` or `node`."""
    name: str
    serving: int
    standbys: int
    lost_ratio: float
    """Part of all serving replicas that is lost."""
    fair_share: float
    """Serving replicas that an even spread over the nodes that can run them would put here."""
    simulated: bool = False
    """Whether none of its nodes is real."""
    memory_bytes: int = 0
    """What it takes elsewhere to have them again; weights that replicas of a node share count once."""

    @property
    def is_crowded(self) -> bool:
        """Whether it holds more than its fair share plus one."""
        return self.serving > math.ceil(self.fair_share) + 1


@dataclass(frozen=True, slots=True)
class SpreadView:
    """The losses, greatest first, and what people could do about a skewed spread."""

    losses: tuple[DomainLoss, ...]
    advice: tuple[str, ...]
    able_nodes: int
    """Nodes that can run its replicas, full or not: shares are of these."""
    nodes: int
    unable: tuple[tuple[str, int], ...]
    """Why the others cannot, each reason with its number of nodes."""

    @property
    def worst_ratio(self) -> float:
        """Part of the serving replicas that the worst single loss costs."""
        return max((loss.lost_ratio for loss in self.losses), default=0.0)


def view_spread(nodes: Sequence[NodeRoom], request: PlacementRequest) -> SpreadView:
    """Judge where a deployment's replicas are. Domains that hold none of it are left out."""
    total = _serving(nodes)
    able = find_able(request, nodes)
    racks = [_loss("rack", name, group, total, able) for name, group in _racks(nodes)]
    hosts = [_loss("node", node.name, (node,), total, able) for node in nodes]
    losses = [loss for loss in (*racks, *hosts) if loss.serving or loss.standbys]
    losses.sort(key=lambda loss: (-loss.serving, loss.kind != "rack", loss.name))
    return SpreadView(
        losses=tuple(losses),
        advice=tuple(_advice(losses, nodes, able)),
        able_nodes=len(able.node_ids),
        nodes=len(nodes),
        unable=able.others,
    )


def _racks(nodes: Sequence[NodeRoom]) -> list[tuple[str, tuple[NodeRoom, ...]]]:
    names = sorted({node.rack for node in nodes if node.rack})
    return [(name, tuple(node for node in nodes if node.rack == name)) for name in names]


def _serving(nodes: Sequence[NodeRoom]) -> int:
    """Serving replicas that are lost with any of these nodes; one over several nodes is one."""
    parts = frozenset[str]().union(*(node.parts_of for node in nodes))
    return len(parts) or sum(node.same_deployment for node in nodes)


def _loss(kind: str, name: str, group: Sequence[NodeRoom], total: int, able: Ability) -> DomainLoss:
    serving, count = _serving(group), len(able.node_ids)
    here = sum(node.node_id in able.node_ids for node in group)
    return DomainLoss(
        kind=kind,
        name=name,
        serving=serving,
        standbys=sum(node.same_standby for node in group),
        lost_ratio=serving / total if total else 0.0,
        fair_share=total * here / count if count else 0.0,
        simulated=all(node.simulated for node in group),
        memory_bytes=sum(node.own_bytes for node in group),
    )


def _advice(losses: Sequence[DomainLoss], nodes: Sequence[NodeRoom], able: Ability) -> list[str]:
    """One sentence a crowded domain. Nothing is moved by itself: a move costs open sessions.

    Where replicas over several nodes go is up to their fabric, so there is none about those.
    """
    if any(node.parts_of for node in nodes):
        return []
    by_domain: Counter[str] = Counter()
    for node in nodes:
        by_domain[node.domain] += node.same_deployment
    accepting = {node.domain for node in nodes if node.node_id in able.node_ids}
    emptiest = min(accepting, key=lambda name: (by_domain[name], name), default="")
    return [
        f"{loss.kind} {loss.name} holds {loss.serving} serving replicas, an even spread would put "
        f"{loss.fair_share:.1f} there: replace one of them, and its successor goes where fewer are"
        + (f", such as {emptiest}" if emptiest and emptiest != f"{loss.kind} {loss.name}" else "")
        for loss in losses
        if loss.is_crowded
    ]
