"""Reading of deployments and replicas, as domain snapshots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import Count, F, Q, QuerySet

from exaserve_ops.health.selectors import healing_freeze
from exaserve_ops.inventory.domain.drain import DRAINING
from exaserve_ops.inventory.domain.liveness import ALIVE, DEAD, SUSPECT
from exaserve_ops.inventory.models import Accelerator, Node
from exaserve_ops.inventory.selectors import nodes_with_hardware, rack_of
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.accelerator_wish import AcceleratorWish, read_wish
from exaserve_ops.serving.domain.facts import (
    DeploymentSnapshot,
    HealingFacts,
    HealingPolicy,
    ReplicaFacts,
)
from exaserve_ops.serving.domain.healing import LIMITED_CAUSES
from exaserve_ops.serving.domain.observed import WantedReplica
from exaserve_ops.serving.domain.reach import CLOSED
from exaserve_ops.serving.domain.reservation import (
    NOTHING_PROMISED,
    Holding,
    Promise,
    Terms,
    margin_bytes,
    tally,
    terms_of,
)
from exaserve_ops.serving.domain.rooms import SIZE_UNKNOWN, AcceleratorRoom, NodeRoom, PlacementRequest
from exaserve_ops.serving.models import Deployment, Replica

_KNOWN_TO_AGENTS = (*states.REPLICA.live[1:],)  # all but pending
_ROOM_ROWS = Replica.objects.filter(status__in=_KNOWN_TO_AGENTS, node__isnull=False).order_by()

_SETTLED: dict[str, Any] = {
    "status": states.ACTIVE,
    "ready_count": F("replicas"),
    "kept_count": F("replicas"),
    "standby_ready_count": F("standbys"),
    "standby_kept_count": F("standbys"),
    "failed_count": 0,
}
"""Of `deployments_with_counts`: it has exactly what it wants."""


def live_deployments() -> QuerySet[Deployment]:
    """Deployments that are not deleted, with their model and counts of replicas by status."""
    return deployments_with_counts().exclude(status=states.DELETED)


def deployments_with_counts() -> QuerySet[Deployment]:
    """All deployments, deleted ones too, with their model and counts of replicas by status."""
    kept = Q(replica_set__wanted=Replica.Wanted.RUN) & ~Q(replica_set__status=states.STOPPED)
    ready = Q(replica_set__status=states.READY) & ~Q(replica_set__reach__in=CLOSED)
    serving = Q(replica_set__role=Replica.Role.SERVING)
    standby = Q(replica_set__role=Replica.Role.STANDBY)
    return Deployment.objects.select_related("model").annotate(
        ready_count=Count("replica_set", ready & serving, distinct=True),
        kept_count=Count("replica_set", kept & serving, distinct=True),
        standby_ready_count=Count("replica_set", kept & ready & standby, distinct=True),
        standby_kept_count=Count("replica_set", kept & standby, distinct=True),
        failed_count=Count("replica_set", Q(replica_set__status=states.FAILED), distinct=True),
    )


def unsettled_deployments() -> list[UUID]:
    """Deployments that are on their way somewhere: not all that they want serves or stands by."""
    settled = live_deployments().filter(**_SETTLED)
    known = Deployment.objects.exclude(status=states.DELETED)
    return list(known.exclude(pk__in=settled.values("pk")).values_list("pk", flat=True))


def live_replicas() -> QuerySet[Replica]:
    """Replicas that are not stopped, with deployment, model and node."""
    return Replica.objects.exclude(status=states.STOPPED).select_related(
        "deployment__model", "node__failure_domain__parent"
    )


def broken_replicas() -> QuerySet[Replica]:
    """Replicas that will not serve before somebody acts: failed, or ready where no gateway reaches them."""
    unreached = Q(status=states.READY) & ~Q(unroutable_reason="")
    return Replica.objects.filter(Q(status=states.FAILED) | unreached)


def deployment_snapshot(
    deployment_id: UUID, *, active_sessions: Mapping[str, int], now: datetime
) -> DeploymentSnapshot | None:
    """Everything that a deployment's plan depends on, in ten queries; `None` once it is deleted."""
    known = Deployment.objects.select_related("model").exclude(status=states.DELETED)
    deployment = known.filter(pk=deployment_id).first()
    if deployment is None:
        return None
    nodes = node_rooms(deployment_id, now=now)
    by_id = {node.node_id: node for node in nodes}
    replicas = list(Replica.objects.filter(deployment=deployment).exclude(status=states.STOPPED))
    uuids = _accelerators_of([replica.pk for replica in replicas if replica.held_since is not None])
    return DeploymentSnapshot(
        id=str(deployment.pk),
        name=deployment.name,
        deleting=deployment.status == states.DELETING,
        replicas_wanted=deployment.replicas,
        request=placement_request(deployment),
        replicas=tuple(
            _replica_facts(
                replica,
                by_id.get(str(replica.node_id)),
                sessions=active_sessions.get(str(replica.pk), 0),
                accelerators=uuids.get(replica.pk, ()),
            )
            for replica in replicas
        ),
        nodes=nodes,
        standbys_wanted=deployment.standbys,
        healing=_healing_facts(deployment, now),
    )


def ready_and_slow() -> list[tuple[str, UUID, str]]:
    """Id, deployment and how it is slow (empty: it is not) of every replica that answers requests."""
    rows = Replica.objects.filter(status=states.READY, role=Replica.Role.SERVING).order_by()
    found = rows.values_list("pk", "deployment", "slow_reason")
    return [(str(pk), deployment_id, reason) for pk, deployment_id, reason in found]


def takeover_snapshot(deployment_id: UUID) -> DeploymentSnapshot | None:
    """What decides which standby serves for whom, in three short queries; `None` without a ready standby."""
    kept = Replica.objects.filter(deployment=deployment_id, wanted=Replica.Wanted.RUN)
    standby = Q(role=Replica.Role.STANDBY, status=states.READY)
    if not kept.filter(standby).exists():
        return None
    absent = ~Q(status__in=(states.READY, states.STOPPED))
    rows = kept.filter(standby | absent | Q(replaces__isnull=False)).exclude(status=states.STOPPED)
    rows = rows.select_related("node__failure_domain__parent")
    return DeploymentSnapshot(
        id=str(deployment_id),
        name="",
        deleting=False,
        replicas_wanted=0,
        request=PlacementRequest("", 0),
        replicas=tuple(_replica_facts(row, _whereabouts(row.node)) for row in rows),
        nodes=(),
        healing=HealingFacts(frozen=healing_freeze()),
    )


def _whereabouts(node: Node | None) -> NodeRoom | None:
    """A node without its rooms: enough to tell what fails together with it."""
    if node is None:
        return None
    return NodeRoom(
        node_id=str(node.pk),
        name=node.name,
        accepts=False,
        refusal="not looked at",
        engines=frozenset(),
        rack=rack_of(node),
        accelerators=(),
        same_deployment=0,
        replicas=0,
        draining=_draining_of(node),
        suspect=node.liveness == SUSPECT,
    )


def _replica_facts(
    replica: Replica, node: NodeRoom | None, *, sessions: int = 0, accelerators: tuple[str, ...] = ()
) -> ReplicaFacts:
    return ReplicaFacts(
        id=str(replica.pk),
        name=replica.name,
        status=replica.status,
        wanted=replica.wanted,
        reason=replica.reason,
        active_sessions=sessions,
        created_at=replica.created_at,
        role=replica.role,
        node=node,
        replaces=str(replica.replaces_id or ""),
        healing_note=replica.healing_note,
        slow_reason=replica.slow_reason,
        held_since=replica.held_since,
        held_by_pids=tuple(replica.held_by_pids),
        accelerator_uuids=accelerators,
        drain_deadline_at=replica.drain_deadline_at,
        is_closed=replica.reach in CLOSED,
    )


def _draining_of(node: Node) -> str:
    return (node.drain_reason or "no reason given") if node.drain_status == DRAINING else ""


def _healing_facts(deployment: Deployment, now: datetime) -> HealingFacts:
    policy = HealingPolicy()
    since = now - policy.window
    own = Replica.objects.filter(deployment=deployment)
    failed = own.filter(failed_at__gte=since, node__isnull=False).order_by("node__name")
    limited = own.filter(made_for__in=LIMITED_CAUSES, created_at__gte=since)
    return HealingFacts(
        frozen=healing_freeze(),
        drain_slow=deployment.drain_slow,
        failed_nodes=tuple(
            (str(node_id), name) for node_id, name in failed.values_list("node", "node__name").distinct()
        ),
        recent_replacements=limited.count(),
        policy=policy,
    )


def _accelerators_of(replica_ids: Sequence[UUID]) -> dict[UUID, tuple[str, ...]]:
    found: dict[UUID, tuple[str, ...]] = {}
    if not replica_ids:
        return found
    rows = Replica.accelerators.through.objects.filter(replica__in=replica_ids)
    for replica_id, uuid in rows.order_by("accelerator").values_list("replica", "accelerator"):
        found[replica_id] = (*found.get(replica_id, ()), uuid)
    return found


def placement_request(deployment: Deployment) -> PlacementRequest:
    """What one replica of a deployment needs of a node."""
    return PlacementRequest(
        engine=deployment.engine,
        memory_bytes=deployment.replica_memory_bytes,
        accelerators=deployment.accelerators_per_replica,
        nodes=tuple(deployment.placement.get("nodes", ())),
        terms=_terms_of(deployment),
        wish=wish_of(deployment),
        blocked="" if deployment.replica_memory_bytes else SIZE_UNKNOWN,
    )


def wish_of(deployment: Deployment) -> AcceleratorWish:
    """Which accelerators a deployment asks for, as it was checked when it was recorded."""
    asked = {name: value for name, value in deployment.placement.items() if name != "nodes"}
    return read_wish(**asked)


def _terms_of(deployment: Deployment) -> Terms:
    return terms_of(
        deployment.engine,
        deployment.engine_options,
        digest=deployment.model.digest,
        parameter_count=deployment.model.parameter_count,
        needed_bytes=-(-deployment.replica_memory_bytes // deployment.accelerators_per_replica),
        mps=wish_of(deployment).mps,
    )


def node_rooms(deployment_id: UUID, *, now: datetime) -> tuple[NodeRoom, ...]:
    """All nodes with what is promised of their accelerators, in seven queries.

    Memory is promised until an agent has seen a replica's process group gone. What ails or is being
    replaced does not count for the spread: its successor does.
    """
    nodes = list(nodes_with_hardware())
    leaving = {node.pk for node in nodes if node.drain_status == DRAINING or node.liveness == DEAD}
    sizes = {a.uuid: (a.kind, a.memory_bytes) for node in nodes for a in node.accelerators.all()}
    holdings = live_holdings()
    held = tally((one for _, one in holdings), sizes)
    own = tally((one for holder, one in holdings if holder == deployment_id), sizes)
    total: Counter[UUID] = Counter()
    here: dict[str, Counter[UUID]] = {role: Counter() for role in Replica.Role.values}
    rows = list(_ROOM_ROWS.values_list("pk", "node", "deployment", "wanted", "status", "role", "replaces"))
    replaced = {row[6] for row in rows if row[3] == Replica.Wanted.RUN and row[6]}
    for pk, node_id, deployment, wanted, status, role, _ in rows:
        total[node_id] += 1
        stays = wanted == Replica.Wanted.RUN and status != states.FAILED and pk not in replaced
        if deployment == deployment_id and stays and node_id not in leaving:
            here[role][node_id] += 1
    return tuple(
        NodeRoom(
            node_id=str(node.pk),
            name=node.name,
            accepts=not refusal_of(node),
            refusal=refusal_of(node),
            engines=frozenset(node.engines),
            rack=rack_of(node),
            accelerators=tuple(
                _accelerator_room(a, held.get(a.uuid, NOTHING_PROMISED)) for a in node.accelerators.all()
            ),
            same_deployment=here[Replica.Role.SERVING][node.pk],
            replicas=total[node.pk],
            same_standby=here[Replica.Role.STANDBY][node.pk],
            draining=_draining_of(node),
            drain_is_over=bool(node.drain_deadline_at and node.drain_deadline_at <= now),
            simulated=node.simulated,
            suspect=node.liveness == SUSPECT,
            own_bytes=sum(own[a.uuid].reserved_bytes for a in node.accelerators.all() if a.uuid in own),
            mps_problem=mps_problem_of(node),
        )
        for node in nodes
    )


def mps_problem_of(node: Node) -> str:
    """Why nothing with an MPS share can run on a node; empty where it can."""
    return "" if node.mps_ready else node.mps_note or "its agent found no CUDA card"


def live_holdings() -> list[tuple[UUID, Holding]]:
    """What each live replica holds of each accelerator, with its deployment; in two queries."""
    links = Replica.accelerators.through.objects.filter(replica__status__in=_KNOWN_TO_AGENTS)
    rows = list(
        links.values_list("replica", "accelerator", "replica__memory_bytes", "replica__deployment").order_by()
    )
    shares = Counter(row[0] for row in rows)
    holders = Deployment.objects.filter(pk__in={row[3] for row in rows}).select_related("model")
    terms = {holder.pk: _terms_of(holder) for holder in holders}
    return [
        (deployment, Holding(uuid, -(-memory_bytes // shares[replica]), terms[deployment]))
        for replica, uuid, memory_bytes, deployment in rows
    ]


def _accelerator_room(accelerator: Accelerator, promise: Promise) -> AcceleratorRoom:
    return AcceleratorRoom(
        accelerator.uuid,
        accelerator.kind,
        accelerator.memory_bytes,
        promise.reserved_bytes,
        _quarantine_of(accelerator),
        accelerator.split,
        margin_bytes(accelerator.memory_bytes),
        accelerator.parent_uuid,
        accelerator.profile,
        frozenset(promise.copies),
        promise.replicas,
        promise.mps_replicas,
        promise.mps_percent,
    )


def _quarantine_of(accelerator: Accelerator) -> str:
    if accelerator.quarantined_at is None:
        return ""
    return accelerator.quarantine_reason or "no reason given"


def refusal_of(node: Node) -> str:
    """Why a node takes nothing new; empty where it does."""
    if node.cordoned:
        return f"cordoned: {node.cordon_reason}" if node.cordon_reason else "cordoned"
    if node.liveness != ALIVE:
        return f"{node.liveness}: {node.liveness_reason}" if node.liveness_reason else node.liveness
    if node.commands_stale_since is not None:
        return "its agent takes no commands in"
    if node.address_problem:
        return f"its address cannot be used: {node.address_problem}"
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
        stall_seconds=float(deployment.stall_seconds),
        mps=wish_of(deployment).mps,
    )
