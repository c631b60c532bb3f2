"""Reading what weights are claimed and held."""

from __future__ import annotations

from collections.abc import Collection
from uuid import UUID

from exaserve_ops.weights.domain.held import READY, WeightsOnNode
from exaserve_ops.weights.domain.wanted import Claim
from exaserve_ops.weights.models import NodeWeights, WeightsClaim


def weights_on(revision: str, node_ids: Collection[UUID]) -> dict[UUID, WeightsOnNode]:
    """How a revision stands on each of these nodes; one query."""
    rows = NodeWeights.objects.filter(revision=revision, node__in=node_ids)
    found = {
        row.node_id: WeightsOnNode(row.state, row.reason, row.have_bytes, row.total_bytes) for row in rows
    }
    return {node_id: found.get(node_id, WeightsOnNode()) for node_id in node_ids}


def nodes_with(revision: str) -> frozenset[UUID]:
    """Nodes on which a replica could start from this revision at once."""
    rows = NodeWeights.objects.filter(revision=revision, state=READY)
    return frozenset(rows.values_list("node", flat=True))


def claims_by_node() -> dict[str, list[Claim]]:
    """Everything that is claimed, in one query."""
    found: dict[str, list[Claim]] = {}
    fields = ("node_id", "revision", "owner", "paused", "bytes_per_second")
    for node_id, *claim in WeightsClaim.objects.order_by("node", "revision", "owner").values_list(*fields):
        found.setdefault(str(node_id), []).append(Claim(*claim))
    return found
