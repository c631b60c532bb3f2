"""Reading of deployments and replicas, as domain snapshots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import Count, F, Q, QuerySet

from exaserve_ops.health.selectors import healing_freeze
from exaserve_ops.inventory.domain.liveness import DEAD, SUSPECT
from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.selectors import rack_of
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.facts import (
    SERVING,
    DeploymentSnapshot,
    HealingFacts,
    HealingPolicy,
    ReplicaFacts,
    RollTarget,
)
from exaserve_ops.serving.domain.healing import LIMITED_CAUSES
from exaserve_ops.serving.domain.reach import CLOSED
from exaserve_ops.serving.domain.rooms import NodeRoom, PlacementRequest
from exaserve_ops.serving.domain.sleep import ASLEEP, AWAKE
from exaserve_ops.serving.models import Deployment, Release, Replica, ReplicaMember
from exaserve_ops.serving.selectors.members import member_nodes
from exaserve_ops.serving.selectors.rooms import (
    draining_of,
    placement_request,
    spilled_replicas,
)
from exaserve_ops.serving.selectors.rooms import node_rooms as node_rooms
from exaserve_ops.serving.selectors.rooms import refusal_of as refusal_of
from exaserve_ops.serving.selectors.wishes import wanted_of_node as wanted_of_node

_SETTLED: dict[str, Any] = {
    "status": states.ACTIVE,
    "ready_count": F("replicas"),
    "kept_count": F("replicas"),
    "standby_ready_count": F("standbys"),
    "standby_kept_count": F("standbys"),
    "failed_count": 0,
}
"""Of `deployments_with_counts`: it has exactly what it wants."""


_PLANNED_WITH = (
    "pk", "name", "status", "wanted", "reason", "created_at", "role", "node_id", "replaces_id",
    "healing_note", "slow_reason", "held_since", "held_by_pids", "drain_deadline_at", "reach",
    "sleep_state", "release_id", "rolls_to_id", "rolls_in_place", "handed_over_at", "start_waits_since",
    "node_count",
)  # fmt: skip
"""Fields of a replica that plans depend on: of thousands of rows each further one is felt."""


def serving_as(name: str) -> QuerySet[Deployment]:
    """Deployments that clients reach by a name: a request goes to the replicas of any of them."""
    return Deployment.objects.filter(served_name=name, status=states.ACTIVE).order_by("name")


def live_deployments() -> QuerySet[Deployment]:
    """Deployments that are not deleted, with their model and counts of replicas by status."""
    return deployments_with_counts().exclude(status=states.DELETED)


def deployments_with_counts() -> QuerySet[Deployment]:
    """All deployments, deleted ones too, with their model and counts of replicas by status."""
    kept = Q(replica_set__wanted=Replica.Wanted.RUN) & ~Q(replica_set__status=states.STOPPED)
    ready = Q(replica_set__status=states.READY) & ~Q(replica_set__reach__in=CLOSED)
    awake = Q(replica_set__sleep_state="")
    serving = Q(replica_set__role=Replica.Role.SERVING)
    standby = Q(replica_set__role=Replica.Role.STANDBY)
    return Deployment.objects.select_related("model").annotate(
        ready_count=Count("replica_set", ready & awake & serving, distinct=True),
        kept_count=Count("replica_set", kept & serving, distinct=True),
        standby_ready_count=Count("replica_set", kept & ready & standby, distinct=True),
        standby_kept_count=Count("replica_set", kept & standby, distinct=True),
        standby_asleep_count=Count(
            "replica_set", kept & standby & Q(replica_set__sleep_state=ASLEEP), distinct=True
        ),
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
    rows = Replica.objects.filter(deployment=deployment).exclude(status=states.STOPPED)
    replicas = list(rows.values_list(*_PLANNED_WITH, named=True))
    uuids = _held_accelerators([replica.pk for replica in replicas if replica.held_since is not None])
    gangs = member_nodes([replica.pk for replica in replicas if replica.node_count > 1])
    releases = releases_in_use(deployment)
    requests = {key: placement_request(release) for key, release in releases.items()}
    own = next(key for key, one in releases.items() if one.number == deployment.release_number)
    request = requests[own]
    spilled = spilled_replicas(deployment_id) if request.wish.wants_slice else set()
    return DeploymentSnapshot(
        id=str(deployment.pk),
        name=deployment.name,
        deleting=deployment.status == states.DELETING,
        replicas_wanted=deployment.replicas,
        request=request,
        replicas=tuple(
            _replica_facts(
                replica,
                by_id.get(str(replica.node_id)),
                sessions=active_sessions.get(str(replica.pk), 0),
                accelerators=uuids.get(replica.pk, ()),
                spilled=replica.pk in spilled,
                roll=_roll_of(replica, releases),
                others=tuple(by_id[str(pk)] for pk in gangs.get(replica.pk, ())[1:] if str(pk) in by_id),
            )
            for replica in replicas
        ),
        nodes=nodes,
        standbys_wanted=deployment.standbys,
        healing=_healing_facts(deployment, now),
        release=own,
        requests=requests,
    )


def request_of_new(deployment: Deployment) -> PlacementRequest:
    """What its next replica needs."""
    releases = Release.objects.select_related("model", "deployment")
    return placement_request(releases.get(deployment=deployment, number=deployment.release_number))


def releases_in_use(deployment: Deployment) -> dict[str, Release]:
    """Releases of new replicas, and those that live ones have or are to have, by id and with their models."""
    live = Replica.objects.filter(deployment=deployment).exclude(status=states.STOPPED).order_by()
    used = Q(pk__in=live.values("release")) | Q(pk__in=live.filter(rolls_to__isnull=False).values("rolls_to"))
    rows = Release.objects.filter(deployment=deployment).select_related("model", "deployment")
    return {str(row.pk): row for row in rows.filter(used | Q(number=deployment.release_number))}


def _roll_of(replica: Any, releases: Mapping[str, Release]) -> RollTarget | None:  # noqa: ANN401 - a row of `_PLANNED_WITH`
    target = releases.get(str(replica.rolls_to_id or ""))
    if target is None or target.pk == replica.release_id:
        return None
    return RollTarget(str(target.pk), f"release {target.number}", in_place=replica.rolls_in_place)


def ready_and_slow() -> list[tuple[str, UUID, str]]:
    """Id, deployment and how it is slow (empty: it is not) of every replica that answers requests."""
    rows = Replica.objects.filter(status=states.READY, role=Replica.Role.SERVING).order_by()
    found = rows.values_list("pk", "deployment", "slow_reason")
    return [(str(pk), deployment_id, reason) for pk, deployment_id, reason in found]


def takeover_snapshot(deployment_id: UUID) -> DeploymentSnapshot | None:
    """What decides which standby serves for whom, in five short queries; `None` without a ready standby.

    Who serves and is well is left out, and of what is wanted as many.
    """
    kept = Replica.objects.filter(deployment=deployment_id, wanted=Replica.Wanted.RUN)
    standby = Q(role=Replica.Role.STANDBY, status=states.READY)
    if not kept.filter(standby).exists():
        return None
    absent = ~Q(status__in=(states.READY, states.STOPPED))
    absent |= Q(role=Replica.Role.SERVING, status=states.READY) & ~Q(sleep_state=AWAKE)
    shown = standby | absent | Q(replaces__isnull=False)
    serving = kept.filter(role=Replica.Role.SERVING).exclude(status=states.STOPPED)
    # One whose replacement is shown is counted with that.
    replaced = Q(pk__in=serving.filter(replaces__isnull=False).values("replaces"))
    left_out = serving.exclude(shown).exclude(replaced)
    wanted = Deployment.objects.filter(pk=deployment_id).values_list("replicas", flat=True).first() or 0
    rows = kept.filter(shown).exclude(status=states.STOPPED)
    rows = rows.select_related("node__failure_domain__parent").prefetch_related(
        "members__node__failure_domain__parent"
    )
    return DeploymentSnapshot(
        id=str(deployment_id),
        name="",
        deleting=False,
        replicas_wanted=wanted - left_out.count(),
        request=PlacementRequest("", 0),
        replicas=tuple(
            _replica_facts(
                row,
                _whereabouts(row.node),
                others=tuple(room for one in row.members.all()[1:] if (room := _whereabouts(one.node))),
            )
            for row in rows
        ),
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
        draining=draining_of(node),
        suspect=node.liveness == SUSPECT,
        dead=node.liveness == DEAD,
    )


def _replica_facts(
    replica: Any,  # noqa: ANN401 - a replica, or a row with the fields of `_PLANNED_WITH`
    node: NodeRoom | None,
    *,
    sessions: int = 0,
    accelerators: tuple[str, ...] = (),
    spilled: bool = False,
    roll: RollTarget | None = None,
    others: tuple[NodeRoom, ...] = (),
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
        waits_to_start=replica.status == states.PLACED and replica.start_waits_since is not None,
        is_handed_over=replica.handed_over_at is not None,
        is_closed=replica.reach in CLOSED or (replica.role == SERVING and bool(replica.sleep_state)),
        sleeps=bool(replica.sleep_state),
        spilled=spilled,
        release=str(replica.release_id),
        roll=roll,
        others=others,
    )


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
        failed_releases=frozenset(str(pk) for pk in failed.order_by().values_list("release", flat=True)),
        policy=policy,
    )


def _held_accelerators(replica_ids: Sequence[UUID]) -> dict[UUID, tuple[str, ...]]:
    """Accelerators of replicas whose memory is held; of those over several nodes the ones where it is."""
    found: dict[UUID, tuple[str, ...]] = {}
    if not replica_ids:
        return found
    for member in ReplicaMember.objects.filter(replica__in=replica_ids).exclude(held_by_pids=[]):
        found[member.replica_id] = (*found.get(member.replica_id, ()), *member.accelerator_uuids)
    rows = Replica.accelerators.through.objects.filter(replica__in=replica_ids, replica__node_count=1)
    for replica_id, uuid in rows.order_by("accelerator").values_list("replica", "accelerator"):
        found[replica_id] = (*found.get(replica_id, ()), uuid)
    return found
