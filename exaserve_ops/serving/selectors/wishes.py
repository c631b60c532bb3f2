"""Reading of the wishes of nodes: every replica that an agent is told of, as it is told."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

from django.db.models import F, Q, QuerySet

from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.gang_rules import HEAD, RUN, STOP, order_of
from exaserve_ops.serving.domain.observed import WantedMember, WantedReplica
from exaserve_ops.serving.domain.reach import CLOSED
from exaserve_ops.serving.domain.sleep import AWAKE, SleepWish, is_to_sleep
from exaserve_ops.serving.domain.trials import is_private
from exaserve_ops.serving.models import Model, Replica, ReplicaMember
from exaserve_ops.serving.selectors.handover import hands_over, stands_down
from exaserve_ops.serving.selectors.members import (
    KNOWN_TO_AGENTS,
    ONE_NODE,
    WAITS_TO_START,
    live_members,
    members_problem_of,
)
from exaserve_ops.serving.selectors.rooms import wish_of


def wanted_of_node(node_id: UUID) -> tuple[WantedReplica, ...]:
    """The whole wish of one node, ordered by replica, in five queries; who waits to start is left out.

    A sixth is made where standbys sleep.
    """
    rows = _read(Replica.objects.filter(ONE_NODE, node=node_id, status__in=KNOWN_TO_AGENTS))
    alone = list(rows.exclude(WAITS_TO_START).prefetch_related("accelerators"))
    short = _short_of_answers(alone)
    wanted = [
        _wanted(
            replica,
            replica.wanted,
            tuple(sorted(a.uuid for a in replica.accelerators.all())),
            is_relied_on=replica.deployment_id in short and replica.sleep_state == AWAKE,
        )
        for replica in alone
    ]
    return tuple(sorted([*wanted, *_of_members(node_id)], key=lambda one: one.replica_id))


def _read(replicas: QuerySet[Replica]) -> QuerySet[Replica]:
    return (
        replicas.select_related("deployment", "release__model")
        .defer("release__model__config", "release__model__architecture")
        .annotate(manifest_digest=F("release__model__manifest__digest"))
        .prefetch_related("release__model__files")
    )


def _short_of_answers(replicas: Iterable[Replica]) -> set[UUID]:
    """Deployments of sleeping standbys where one that serves is ready and is sent nothing yet."""
    sleepy = {
        one.deployment_id
        for one in replicas
        if one.role == Replica.Role.STANDBY and one.deployment.standbys_sleep
    }
    if not sleepy:
        return set()
    serving = Replica.objects.filter(
        deployment__in=sleepy, role=Replica.Role.SERVING, wanted=Replica.Wanted.RUN, status=states.READY
    )
    closed = serving.filter(~Q(sleep_state=AWAKE) | Q(reach__in=CLOSED))
    return set(closed.values_list("deployment_id", flat=True))


def _of_members(node_id: UUID) -> Iterable[WantedReplica]:
    """What a node is told of its parts of replicas over several nodes; of those never begun nothing."""
    here = set(live_members().filter(node=node_id).values_list("replica", flat=True))
    if not here:
        return
    members: dict[UUID, list[ReplicaMember]] = {}
    rows = ReplicaMember.objects.filter(replica__in=here).defer("exit_log_tail").select_related("node")
    for row in rows.order_by("number"):
        members.setdefault(row.replica_id, []).append(row)
    for replica in _read(Replica.objects.filter(pk__in=here)):
        if replica.gang_epoch or replica.wanted != Replica.Wanted.RUN:
            gang = members[replica.pk]
            yield _member(replica, gang, next(one for one in gang if one.node_id == node_id))


def _member(replica: Replica, gang: list[ReplicaMember], own: ReplicaMember) -> WantedReplica:
    head = gang[HEAD]
    order = order_of(
        own.number,
        wanted=replica.wanted,
        hands_over=hands_over(replica),
        began=replica.gang_began_at is not None,
        head_ended=head.ended_at is not None,
    )
    if order == RUN and members_problem_of(own.node):
        order = STOP  # its agent would run the part as a replica of its own
    # What the head told of an earlier start leads nowhere now.
    tells = own is not head and head.epoch == replica.gang_epoch
    member = WantedMember(
        number=own.number,
        count=len(gang),
        epoch=replica.gang_epoch,
        head_address=head.address if tells else "",
        rendezvous=head.rendezvous if tells else "",
        hosts=tuple(one.node.address for one in gang),
        adapters=tuple(own.adapters),
    )
    return _wanted(replica, order, tuple(own.accelerator_uuids), member)


def _drain_seconds(replica: Replica) -> float:
    """What is left for open requests once its conversations have left: the deadline stays what it is."""
    if replica.handed_over_at is None or replica.drain_deadline_at is None:
        return float(replica.deployment.drain_seconds)
    return max(0.0, (replica.drain_deadline_at - replica.handed_over_at).total_seconds())


def _wanted(
    replica: Any,  # noqa: ANN401 - a replica with the digest of its manifest
    wanted: str,
    accelerator_uuids: tuple[str, ...],
    member: WantedMember | None = None,
    *,
    is_relied_on: bool = False,
) -> WantedReplica:
    deployment = replica.deployment
    release = replica.release
    model = release.model
    options: dict[str, Any] = dict(release.engine_options)
    return WantedReplica(
        replica_id=str(replica.pk),
        deployment=deployment.name,
        generation=replica.generation,
        wanted=Replica.Wanted.RUN if member is None and hands_over(replica) else wanted,
        model_name=deployment.served_name,
        model_digest=model.digest,
        model_source=model.source,
        model_files=tuple((f.path, f.size_bytes, f.sha256) for f in model.files.all()),
        engine=release.engine,
        engine_options=options,
        accelerator_uuids=accelerator_uuids,
        memory_bytes=replica.memory_bytes,
        drain_seconds=_drain_seconds(replica),
        start_seconds=float(deployment.start_seconds),
        stall_seconds=float(deployment.stall_seconds),
        mps=wish_of(deployment).mps,
        manifest_digest=replica.manifest_digest if model.storage == Model.Storage.NODE else "",
        member=member,
        asleep=member is None
        and is_to_sleep(
            SleepWish(
                deployment.standbys_sleep,
                # A trial stands by all the time: it answers nobody but its validation.
                (replica.role == Replica.Role.STANDBY or is_private(deployment.served_name))
                and replica.wanted == Replica.Wanted.RUN
                and not stands_down(replica),
                release.engine,
                options,
                is_relied_on,
            )
        ),
    )
