"""Taking accelerators out of use, and back into it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from django.db import transaction

from exaserve_ops.audit.services import Subject, record_event
from exaserve_ops.inventory.models import Accelerator
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.lib.hints import ring


@transaction.atomic
def quarantine_accelerators(uuids: Sequence[str], *, reason: str, actor: str, now: datetime) -> None:
    """Place nothing more on these; what runs there stays. Those that are quarantined already keep why."""
    for accelerator in Accelerator.objects.select_for_update().filter(
        pk__in=uuids, quarantined_at__isnull=True
    ):
        accelerator.quarantined_at, accelerator.quarantine_reason = now, reason[:500]
        accelerator.save(update_fields=["quarantined_at", "quarantine_reason"])
        record_event(subject_of(accelerator), "quarantined", actor=actor, now=now, reason=reason)
        ring("node", accelerator.node_id)


@transaction.atomic
def lift_quarantine(uuid: str, *, reason: str, actor: str, now: datetime) -> Accelerator:
    """Let an accelerator take replicas again. Raises `ConflictError` where it is not quarantined."""
    accelerator = Accelerator.objects.select_for_update().get(pk=uuid)
    if accelerator.quarantined_at is None:
        raise ConflictError(f"accelerator {uuid} is not quarantined")
    accelerator.quarantined_at, accelerator.quarantine_reason = None, ""
    accelerator.save(update_fields=["quarantined_at", "quarantine_reason"])
    record_event(subject_of(accelerator), "quarantine_lifted", actor=actor, now=now, reason=reason)
    ring("node", accelerator.node_id)
    return accelerator


def subject_of(accelerator: Accelerator) -> Subject:
    """Return the audit subject of an accelerator."""
    return Subject("accelerator", accelerator.uuid, f"{accelerator.kind} {accelerator.ordinal}")
