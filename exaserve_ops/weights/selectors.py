"""Reading what weights are claimed and held."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from uuid import UUID

from exaserve_ops.inventory.domain.drain import DRAINING
from exaserve_ops.inventory.domain.liveness import ALIVE
from exaserve_ops.inventory.selectors import nodes_in_service
from exaserve_ops.weights.domain.held import ABSENT, READY, WeightsOnNode
from exaserve_ops.weights.domain.prewarm import PrewarmNode, PrewarmRules
from exaserve_ops.weights.domain.wanted import PREWARM, Claim
from exaserve_ops.weights.models import NodeWeights, PrewarmPolicy, WeightsClaim


def weights_on(revision: str, node_ids: Collection[UUID]) -> dict[UUID, WeightsOnNode]:
    """How a revision stands on each of these nodes; one query."""
    rows = NodeWeights.objects.filter(revision=revision, node__in=node_ids)
    found = {
        row.node_id: WeightsOnNode(row.state, row.reason, row.have_bytes, row.total_bytes, spoilt=row.spoilt)
        for row in rows
    }
    return {node_id: found.get(node_id, WeightsOnNode()) for node_id in node_ids}


def nodes_with(revision: str) -> frozenset[UUID]:
    """Nodes on which a replica could start from this revision at once."""
    rows = NodeWeights.objects.filter(revision=revision, state=READY)
    return frozenset(rows.values_list("node", flat=True))


def rules_of(policy: PrewarmPolicy) -> PrewarmRules:
    """What a policy says."""
    return PrewarmRules(
        revision=policy.revision,
        node_names=tuple(policy.node_names),
        busiest_ratio=policy.busiest_ratio,
        from_minute=policy.from_minute,
        until_minute=policy.until_minute,
        bytes_per_second=policy.bytes_per_second,
        at_once=policy.at_once,
    )


def enabled_policies() -> list[PrewarmRules]:
    """Every policy that is in force."""
    return [rules_of(policy) for policy in PrewarmPolicy.objects.filter(enabled=True)]


def prewarm_nodes(revision: str, *, busy: Mapping[str, float], able: Collection[str]) -> list[PrewarmNode]:
    """All nodes in service, for one policy. `busy`: by node id; `able`: ids of nodes whose store works."""
    states = dict(NodeWeights.objects.filter(revision=revision).values_list("node", "state"))
    claims = dict(WeightsClaim.objects.filter(revision=revision, owner=PREWARM).values_list("node", "paused"))
    rows = nodes_in_service().values_list("pk", "name", "liveness", "cordoned", "drain_status")
    return [
        PrewarmNode(
            node_id=str(pk),
            name=name,
            accepts=liveness == ALIVE and not cordoned and drain != DRAINING and str(pk) in able,
            busy_ratio=busy.get(str(pk)),
            state=states.get(pk, ABSENT),
            claimed=pk in claims,
            paused=claims.get(pk, False),
        )
        for pk, name, liveness, cordoned, drain in rows
    ]


def claims_by_node() -> dict[str, list[Claim]]:
    """Everything that is claimed, in one query."""
    found: dict[str, list[Claim]] = {}
    fields = ("node_id", "revision", "owner", "paused", "bytes_per_second")
    for node_id, *claim in WeightsClaim.objects.order_by("node", "revision", "owner").values_list(*fields):
        found.setdefault(str(node_id), []).append(Claim(*claim))
    return found
