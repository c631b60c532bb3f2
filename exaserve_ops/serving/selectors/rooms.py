"""Reading of what is promised of nodes and accelerators, and what still fits on them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from uuid import UUID

from exaserve_ops.inventory.domain.drain import DRAINING
from exaserve_ops.inventory.domain.liveness import ALIVE, DEAD, RETIRED, SUSPECT
from exaserve_ops.inventory.models import Accelerator, Node
from exaserve_ops.inventory.selectors import nodes_with_hardware, rack_of, supernode_of
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.accelerator_wish import ANY, WHOLE, AcceleratorWish, read_wish
from exaserve_ops.serving.domain.closeness import UNKNOWN
from exaserve_ops.serving.domain.reservation import (
    NOTHING_PROMISED,
    AcceleratorSize,
    Holding,
    Promise,
    Terms,
    margin_bytes,
    tally,
)
from exaserve_ops.serving.domain.rooms import SIZE_UNKNOWN, AcceleratorRoom, NodeRoom, PlacementRequest
from exaserve_ops.serving.domain.terms import terms_of
from exaserve_ops.serving.models import Deployment, Model, Release, Replica
from exaserve_ops.serving.selectors.members import (
    KNOWN_TO_AGENTS,
    ONE_NODE,
    closeness_of_nodes,
    live_members,
    member_places,
    members_problem_of,
)
from exaserve_ops.weights.selectors import nodes_with

_ROOM_ROWS = Replica.objects.filter(ONE_NODE, status__in=KNOWN_TO_AGENTS, node__isnull=False).order_by()
_ROOM_COLUMNS = ("pk", "node", "deployment", "wanted", "status", "role", "replaces")

_TERMS_READ = (
    *("engine", "engine_options", "replica_memory_bytes"),
    *("deployment__accelerators_per_replica", "deployment__nodes_per_replica", "deployment__placement"),
    *("model__digest", "model__parameter_count", "model__weights_bytes"),
)
"""What `_terms_of` reads of a release: every plan does so for all of them."""


def placement_request(release: Release) -> PlacementRequest:
    """What one replica of a release needs of a node."""
    deployment = release.deployment
    return PlacementRequest(
        engine=release.engine,
        memory_bytes=release.replica_memory_bytes,
        accelerators=deployment.accelerators_per_replica,
        nodes_per_replica=deployment.nodes_per_replica,
        nodes=tuple(deployment.placement.get("nodes", ())),
        terms=_terms_of(release),
        wish=_wish_where(deployment),
        blocked="" if release.replica_memory_bytes else SIZE_UNKNOWN,
        stored_on=_nodes_with_weights(release.model),
    )


def _nodes_with_weights(model: Model) -> frozenset[str] | None:
    """Ids of nodes whose disks have a model; `None` where that makes no difference."""
    if model.storage == Model.Storage.IN_PLACE:
        return None
    return frozenset(map(str, nodes_with(model.digest)))


def wish_of(deployment: Deployment) -> AcceleratorWish:
    """Which accelerators a deployment asks for, as it was checked when it was recorded."""
    asked = {name: value for name, value in deployment.placement.items() if name != "nodes"}
    return read_wish(**asked)


def _wish_where(deployment: Deployment) -> AcceleratorWish:
    """What is asked for, as it is placed: a member of a replica over several nodes gets whole cards."""
    wish = wish_of(deployment)
    is_open = deployment.nodes_per_replica > 1 and wish.kind == ANY
    return replace(wish, kind=WHOLE) if is_open else wish


def _terms_of(release: Release) -> Terms:
    deployment = release.deployment
    return terms_of(
        release.engine,
        release.engine_options,
        digest=release.model.digest,
        parameter_count=release.model.parameter_count,
        weights_bytes=release.model.weights_bytes,
        # Each node of one that spans nodes has a part of the weights, which nobody shares.
        accelerators=deployment.accelerators_per_replica * deployment.nodes_per_replica,
        needed_bytes=-(-release.replica_memory_bytes // deployment.accelerators_per_replica),
        mps=wish_of(deployment).mps,
    )


def node_rooms(deployment_id: UUID, *, now: datetime) -> tuple[NodeRoom, ...]:
    """All nodes in service with what is promised of their accelerators, in nine queries.

    Memory is promised until an agent has seen a replica's process group gone. What ails or is being
    replaced does not count for the spread: its successor does. A replica over several nodes counts on each.
    """
    nodes = list(nodes_with_hardware().exclude(liveness=RETIRED))
    leaving = {node.pk for node in nodes if node.drain_status == DRAINING or node.liveness == DEAD}
    sizes = {a.uuid: _size_of(a) for node in nodes for a in node.accelerators.all()}
    holdings = live_holdings()
    held = tally((one for _, one in holdings), sizes)
    own = tally((one for holder, one in holdings if holder == deployment_id), sizes)
    total: Counter[UUID] = Counter()
    here: dict[str, Counter[UUID]] = {role: Counter() for role in Replica.Role.values}
    of_members = ("replica", "node", *(f"replica__{name}" for name in _ROOM_COLUMNS[2:]))
    rows = [*_ROOM_ROWS.values_list(*_ROOM_COLUMNS), *live_members().values_list(*of_members)]
    spans = Deployment.objects.filter(pk=deployment_id, nodes_per_replica__gt=1).exists()
    # How parts of nodes are linked is much to read, and other plans need none of it.
    closeness = closeness_of_nodes() if spans else {}
    parts: dict[UUID, set[str]] = defaultdict(set)
    replaced = {row[6] for row in rows if row[3] == Replica.Wanted.RUN and row[6]}
    for pk, node_id, deployment, wanted, status, role, _ in rows:
        total[node_id] += 1
        stays = wanted == Replica.Wanted.RUN and status != states.FAILED and pk not in replaced
        if deployment == deployment_id and stays and node_id not in leaving:
            here[role][node_id] += 1
            if spans and role == Replica.Role.SERVING:
                parts[node_id].add(str(pk))
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
            draining=draining_of(node),
            drain_is_over=bool(node.drain_deadline_at and node.drain_deadline_at <= now),
            simulated=node.simulated,
            suspect=node.liveness == SUSPECT,
            own_bytes=sum(own[a.uuid].reserved_bytes for a in node.accelerators.all() if a.uuid in own),
            mps_problem=mps_problem_of(node),
            dead=node.liveness == DEAD,
            supernode=supernode_of(node),
            closeness=closeness.get(node.pk, UNKNOWN),
            members_problem=members_problem_of(node),
            parts_of=frozenset(parts[node.pk]),
        )
        for node in nodes
    )


def mps_problem_of(node: Node) -> str:
    """Why nothing with an MPS share can run on a node; empty where it can."""
    return "" if node.mps_ready else node.mps_note or "its agent found no CUDA card"


def live_holdings(
    replicas: Collection[UUID] | None = None, *, spans_nodes: bool = True
) -> list[tuple[UUID, Holding]]:
    """What each live replica, or each of these, holds of each accelerator, with its deployment.

    `spans_nodes` false: none of these is known to run on several nodes, so no member is asked for.
    """
    links = Replica.accelerators.through.objects.filter(
        replica__status__in=KNOWN_TO_AGENTS, replica__node_count=1
    )
    if replicas is not None:
        links = links.filter(replica__in=replicas)
    rows = list(
        links.values_list("replica", "accelerator", "replica__memory_bytes", "replica__release").order_by()
    )
    shares = Counter(row[0] for row in rows)
    held = [(uuid, -(-size // shares[pk]), release) for pk, uuid, size, release in rows]
    held += [
        (uuid, -(-place.memory_bytes // len(place.accelerator_uuids)), place.release_id)
        for place in (member_places(replicas) if spans_nodes else ())
        for uuid in place.accelerator_uuids
    ]
    holders = Release.objects.filter(pk__in={row[2] for row in held}).select_related("model", "deployment")
    terms = {holder.pk: (holder.deployment_id, _terms_of(holder)) for holder in holders.only(*_TERMS_READ)}
    return [(terms[release][0], Holding(uuid, size, terms[release][1])) for uuid, size, release in held]


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
        accelerator.shares_memory,
    )


def _size_of(accelerator: Accelerator) -> AcceleratorSize:
    return AcceleratorSize(accelerator.kind, accelerator.memory_bytes, accelerator.shares_memory)


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


def spilled_replicas(deployment_id: UUID) -> set[UUID]:
    """Live replicas of a deployment that have a whole card."""
    links = Replica.accelerators.through.objects.filter(
        replica__deployment=deployment_id, replica__status__in=KNOWN_TO_AGENTS, accelerator__parent_uuid=""
    )
    return set(links.values_list("replica", flat=True))


def draining_of(node: Node) -> str:
    """Why everything on a node shall move away; empty where it shall not."""
    return (node.drain_reason or "no reason given") if node.drain_status == DRAINING else ""


@dataclass(frozen=True, slots=True)
class AcceleratorUse:
    """Who uses one accelerator, and what is promised of it."""

    reserved_bytes: int = 0
    margin_bytes: int = 0
    """Never planned with."""
    replicas: tuple[tuple[UUID, str], ...] = ()
    """Id and name of the live replicas on it, by name."""
    mps_percent: int = 0
    """Of its threads, promised to replicas with an MPS share."""


def use_of_accelerators(accelerators: Iterable[Accelerator]) -> dict[str, AcceleratorUse]:
    """Who uses each of these, by UUID; in five queries."""
    known = {a.uuid: a for a in accelerators}
    users: dict[str, list[tuple[UUID, str]]] = {}
    members = _members_on(known)
    for name, uuid, replica_id in sorted([*_users_of(known), *members]):
        users.setdefault(uuid, []).append((replica_id, name))
    holders = {replica_id for pairs in users.values() for replica_id, _ in pairs}
    sizes = {uuid: _size_of(a) for uuid, a in known.items()}
    holdings = live_holdings(holders, spans_nodes=bool(members))
    promises = tally((one for _, one in holdings), sizes)
    return {
        uuid: AcceleratorUse(
            promise.reserved_bytes,
            margin_bytes(a.memory_bytes),
            tuple(users.get(uuid, ())),
            promise.mps_percent,
        )
        for uuid, a in known.items()
        for promise in (promises.get(uuid, NOTHING_PROMISED),)
    }


def _users_of(uuids: Collection[str]) -> list[tuple[str, str, UUID]]:
    """Name, accelerator and id of replicas on one node that use these."""
    links = Replica.accelerators.through.objects.filter(
        accelerator__in=uuids, replica__status__in=KNOWN_TO_AGENTS, replica__node_count=1
    )
    return list(links.order_by().values_list("replica__name", "accelerator", "replica"))


def _members_on(uuids: Collection[str]) -> list[tuple[str, str, UUID]]:
    """The same of members of replicas over several nodes."""
    members = live_members().filter(accelerator_uuids__overlap=list(uuids))
    rows = members.values_list("replica__name", "accelerator_uuids", "replica")
    return [(name, uuid, pk) for name, many, pk in rows for uuid in many if uuid in uuids]
