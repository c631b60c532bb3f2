"""Weights ahead of a wave: claimed on its nodes, waited for, and kept there until the rollout has ended.

Weights that are read in place are ready wherever they can be read; those that replicas start from a copy
of are brought by the nodes' stores.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from django.db.models import Q, QuerySet

from exaserve_ops.inventory.models import Node
from exaserve_ops.rollouts.domain.lifecycle import PREWARMING
from exaserve_ops.rollouts.domain.view import WeightsUnderWay
from exaserve_ops.rollouts.models import Rollout
from exaserve_ops.serving.models import Model, Replica, ReplicaMember
from exaserve_ops.weights.domain.held import READY
from exaserve_ops.weights.domain.wanted import ROLLOUT
from exaserve_ops.weights.models import NodeStore, NodeWeights, WeightsClaim
from exaserve_ops.weights.selectors import weights_on
from exaserve_ops.weights.services import claim_weights, release_weights


@dataclass(frozen=True, slots=True)
class WeightsOnNodes:
    """What is still to be brought to which node, by its name."""

    bytes_to_bring: dict[str, int]
    full_disks: tuple[str, ...] = ()


def look_at_weights(model: Model, deployment_id: UUID) -> WeightsOnNodes:
    """What it takes to have a model's weights on all nodes of a deployment."""
    if model.storage == Model.Storage.IN_PLACE:
        return WeightsOnNodes({})
    nodes = _nodes_of(Replica.objects.filter(deployment=deployment_id, wanted=Replica.Wanted.RUN))
    standing = weights_on(model.digest, list(nodes))
    room = _room_on(nodes)
    bring: dict[str, int] = {}
    full = []
    for node_id, name in nodes.items():
        left = model.weights_bytes - standing[node_id].have_bytes
        if standing[node_id].ready or left <= 0:
            continue
        bring[name] = left
        # A disk that nobody has told of is not called full.
        if node_id in room and room[node_id] < left:
            full.append(f"{name} has room for {room[node_id] >> 20} MiB, {left >> 20} MiB are needed")
    return WeightsOnNodes(bring, tuple(sorted(full)))


def _room_on(nodes: Collection[UUID]) -> dict[UUID, int]:
    """What disks have free, and what their stores may remove for it: whole weights that nobody wants."""
    room = dict(NodeStore.objects.filter(pk__in=nodes).values_list("pk", "disk_free_bytes"))
    kept = set(WeightsClaim.objects.filter(node__in=nodes).values_list("node", "revision"))
    whole = NodeWeights.objects.filter(node__in=nodes, state=READY, in_use=False)
    for node_id, revision, size in whole.values_list("node", "revision", "total_bytes"):
        if node_id in room and (node_id, revision) not in kept:
            room[node_id] += size
    return room


def bring_weights(rollout: Rollout, *, actor: str, now: datetime) -> WeightsUnderWay:
    """Have the new weights on the nodes of the wave that is prewarmed; says what is missing.

    Replicas may land elsewhere in the end: those wait for their weights as every replica does.
    """
    wave = rollout.waves.filter(status=PREWARMING).first()
    model = rollout.to_release.model
    if wave is None or model.storage == Model.Storage.IN_PLACE:
        return WeightsUnderWay()
    nodes = _nodes_of(Replica.objects.filter(wave_members__wave=wave))
    claim_weights(model.digest, list(nodes), owner=_owner(rollout), actor=actor, now=now)
    standing = weights_on(model.digest, list(nodes))
    unready = {name: standing[node_id] for node_id, name in nodes.items() if not standing[node_id].ready}
    told = {name: one.reason or one.state for name, one in unready.items()}
    return WeightsUnderWay(told, {name: told[name] for name, one in unready.items() if one.spoilt})


def keep_old_weights(rollout: Rollout, *, actor: str, now: datetime) -> None:
    """Have the old weights stay where they are, so that the way back is short."""
    model = rollout.from_release.model
    if model.storage != Model.Storage.IN_PLACE:
        nodes = _nodes_of(Replica.objects.filter(release=rollout.from_release, wanted=Replica.Wanted.RUN))
        claim_weights(model.digest, list(nodes), owner=_owner(rollout), actor=actor, now=now)


def let_weights_go(rollout: Rollout) -> None:
    """Claim nothing any more: it has ended."""
    release_weights(_owner(rollout))


def _owner(rollout: Rollout) -> str:
    return f"{ROLLOUT}{rollout.pk}"


def _nodes_of(replicas: QuerySet[Replica]) -> dict[UUID, str]:
    """Nodes of all members, not of the heads alone."""
    parts = ReplicaMember.objects.filter(replica__in=replicas, ended_at=None)
    here = Q(replicas__in=replicas) | Q(pk__in=parts.values("node"))
    nodes = Node.objects.filter(here).order_by("name").distinct()
    return dict(nodes.values_list("pk", "name"))
