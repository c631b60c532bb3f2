"""The last look before a slice is given away: whatever a plan saw, no slice gets a second replica."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from uuid import UUID

from exaserve_ops.inventory.models import Accelerator
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.accelerator_wish import read_wish
from exaserve_ops.serving.models import Deployment, Replica


def lock_slices(wanted: Mapping[UUID, Iterable[str]]) -> None:
    """Lock the slices among these accelerators, by replica, until the transaction ends.

    Raises `ConflictError` where one is taken, unless all its replicas are clients of MPS. Plans are made
    by one leader, and one that has just lost the lead may still be carrying out its last.
    """
    uuids = {uuid for many in wanted.values() for uuid in many}
    slices = Accelerator.objects.filter(pk__in=uuids).exclude(parent_uuid="").order_by("pk")
    locked = list(slices.select_for_update().values_list("pk", flat=True))
    if not locked:
        return
    users: dict[str, set[UUID]] = {uuid: set() for uuid in locked}
    links = Replica.accelerators.through.objects.filter(accelerator__in=locked)
    for replica_id, uuid in links.exclude(replica__status__in=(states.PENDING, states.STOPPED)).values_list(
        "replica", "accelerator"
    ):
        users[uuid].add(replica_id)
    for replica_id, many in wanted.items():
        for uuid in users.keys() & set(many):
            users[uuid].add(replica_id)
    shared = {uuid: replicas for uuid, replicas in users.items() if len(replicas) > 1}
    alone = _without_mps({replica_id for replicas in shared.values() for replica_id in replicas})
    for uuid, replicas in sorted(shared.items()):
        if replicas & alone:
            raise ConflictError(f"slice {uuid} was taken meanwhile")


def _without_mps(replica_ids: set[UUID]) -> set[UUID]:
    """Those of these that have no MPS share."""
    rows = Replica.objects.filter(pk__in=replica_ids).values_list("pk", "deployment")
    deployments = Deployment.objects.in_bulk({deployment for _, deployment in rows})
    return {pk for pk, deployment in rows if not _has_mps(deployments[deployment])}


def _has_mps(deployment: Deployment) -> bool:
    asked = {name: value for name, value in deployment.placement.items() if name != "nodes"}
    return read_wish(**asked).mps is not None
