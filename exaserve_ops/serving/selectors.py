"""Reading of deployments and replicas, as domain snapshots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from django.db.models import Count, Q, QuerySet

from exaserve_ops.inventory.domain.liveness import ALIVE
from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.selectors import nodes_with_hardware, rack_of
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.observed import WantedReplica
from exaserve_ops.serving.domain.placement import AcceleratorRoom, NodeRoom, PlacementRequest
from exaserve_ops.serving.domain.reconcile import DeploymentSnapshot, ReplicaFacts
from exaserve_ops.serving.models import Deployment, Replica

_KNOWN_TO_AGENTS = (*states.REPLICA.live[1:],)  # all but pending


def live_deployments() -> QuerySet[Deployment]:
    """Deployments that are not deleted, with their model and counts of replicas by status."""
    return deployments_with_counts().exclude(status=states.DELETED)


def deployments_with_counts() -> QuerySet[Deployment]:
    """All deployments, deleted ones too, with their model and counts of replicas by status."""
    kept = Q(replica_set__wanted=Replica.Wanted.RUN) & ~Q(replica_set__status=states.STOPPED)
    return Deployment.objects.select_related("model").annotate(
        ready_count=Count("replica_set", Q(replica_set__status=states.READY), distinct=True),
        kept_count=Count("replica_set", kept, distinct=True),
        failed_count=Count("replica_set", Q(replica_set__status=states.FAILED), distinct=True),
    )


def live_replicas() -> QuerySet[Replica]:
    """Replicas that are not stopped, with deployment, model and node."""
    return Replica.objects.exclude(status=states.STOPPED).select_related(
        "deployment__model", "node__failure_domain__parent"
    )


def deployment_snapshot(
    deployment_id: UUID, *, active_sessions: Mapping[str, int]
) -> DeploymentSnapshot | None:
    """Everything that a deployment's plan depends on, in seven queries; `None` once it is deleted."""
    deployment = Deployment.objects.exclude(status=states.DELETED).filter(pk=deployment_id).first()
    if deployment is None:
        return None
    replicas = Replica.objects.filter(deployment=deployment).exclude(status=states.STOPPED)
    return DeploymentSnapshot(
        id=str(deployment.pk),
        name=deployment.name,
        deleting=deployment.status == states.DELETING,
        replicas_wanted=deployment.replicas,
        request=placement_request(deployment),
        replicas=tuple(
            ReplicaFacts(
                id=str(replica.pk),
                name=replica.name,
                status=replica.status,
                wanted=replica.wanted,
                reason=replica.reason,
                active_sessions=active_sessions.get(str(replica.pk), 0),
                created_at=replica.created_at,
            )
            for replica in replicas
        ),
        nodes=node_rooms(deployment_id),
    )


def placement_request(deployment: Deployment) -> PlacementRequest:
    """What one replica of a deployment needs of a node."""
    return PlacementRequest(
        engine=deployment.engine,
        memory_bytes=deployment.replica_memory_bytes,
        accelerators=deployment.accelerators_per_replica,
        nodes=tuple(deployment.placement.get("nodes", ())),
    )


def node_rooms(deployment_id: UUID) -> tuple[NodeRoom, ...]:
    """All nodes with what is promised of their accelerators, in five queries."""
    reserved: Counter[str] = Counter()
    same: Counter[UUID] = Counter()
    total: Counter[UUID] = Counter()
    live = Replica.objects.filter(status__in=_KNOWN_TO_AGENTS).prefetch_related("accelerators")
    for replica in live:
        uuids = [accelerator.uuid for accelerator in replica.accelerators.all()]
        for uuid in uuids:
            reserved[uuid] += -(-replica.memory_bytes // len(uuids))
        if replica.node_id is not None:
            total[replica.node_id] += 1
            if replica.deployment_id == deployment_id and replica.wanted == Replica.Wanted.RUN:
                same[replica.node_id] += 1
    return tuple(
        NodeRoom(
            node_id=str(node.pk),
            name=node.name,
            accepts=not refusal_of(node),
            refusal=refusal_of(node),
            engines=frozenset(node.engines),
            rack=rack_of(node),
            accelerators=tuple(
                AcceleratorRoom(a.uuid, a.kind, a.memory_bytes, reserved[a.uuid])
                for a in node.accelerators.all()
            ),
            same_deployment=same[node.pk],
            replicas=total[node.pk],
        )
        for node in nodes_with_hardware()
    )


def refusal_of(node: Node) -> str:
    """Why a node takes nothing new; empty where it does."""
    if node.cordoned:
        return f"cordoned: {node.cordon_reason}" if node.cordon_reason else "cordoned"
    if node.liveness != ALIVE:
        return f"{node.liveness}: {node.liveness_reason}" if node.liveness_reason else node.liveness
    if node.commands_stale_since is not None:
        return "its agent takes no commands in"
    return ""


def wanted_of_node(node_id: UUID) -> tuple[WantedReplica, ...]:
    """The whole wish of one node, ordered by replica, in four queries."""
    replicas = (
        Replica.objects.filter(node=node_id, status__in=_KNOWN_TO_AGENTS)
        .select_related("deployment__model")
        .prefetch_related("deployment__model__files", "accelerators")
        .order_by("pk")
    )
    return tuple(_wanted(replica) for replica in replicas)


def _wanted(replica: Replica) -> WantedReplica:
    deployment = replica.deployment
    model = deployment.model
    options: dict[str, Any] = dict(deployment.engine_options)
    return WantedReplica(
        replica_id=str(replica.pk),
        deployment=deployment.name,
        generation=replica.generation,
        wanted=replica.wanted,
        model_name=deployment.served_name,
        model_digest=model.digest,
        model_source=model.source,
        model_files=tuple((f.path, f.size_bytes, f.sha256) for f in model.files.all()),
        engine=deployment.engine,
        engine_options=options,
        accelerator_uuids=tuple(sorted(a.uuid for a in replica.accelerators.all())),
        memory_bytes=replica.memory_bytes,
        drain_seconds=float(deployment.drain_seconds),
        start_seconds=float(deployment.start_seconds),
    )
