"""Granting of leases."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from django.db import transaction

from exaserve_ops.audit.services import record_event
from exaserve_ops.health.models import NodeLease
from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.services import subject_of


@transaction.atomic
def grant_lease(node_id: UUID, *, boot_id: str, renew: bool, now: datetime) -> NodeLease:
    """Return the node's lease; a new epoch where the agent is another one, or `renew` asks for it."""
    node = Node.objects.select_for_update().get(pk=node_id)
    lease, created = NodeLease.objects.get_or_create(
        node=node, defaults={"boot_id": boot_id, "granted_at": now}
    )
    if not created and (renew or lease.boot_id != boot_id):
        lease.epoch += 1
        lease.boot_id = boot_id
        lease.granted_at = now
        lease.save(update_fields=["epoch", "boot_id", "granted_at"])
    if created or lease.granted_at == now:
        record_event(
            subject_of(node),
            "lease_granted",
            actor="controller:health",
            now=now,
            reason=f"epoch {lease.epoch}",
            generation=lease.epoch,
        )
    return lease
