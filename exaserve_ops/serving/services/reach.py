"""Recording what gateways can connect to."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from uuid import UUID

from django.db import transaction

from exaserve_ops.audit.services import Happening, record_events
from exaserve_ops.lib.hints import ring, ring_all
from exaserve_ops.serving.domain.lifecycle import READY
from exaserve_ops.serving.domain.reach import CLOSED, ReachVerdict
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.services.replicas import subject_of
from exaserve_ops.serving.services.sleep import nodes_of_awake_standbys


@transaction.atomic
def record_reach(verdicts: Mapping[UUID, ReachVerdict], *, actor: str, now: datetime) -> None:
    """Record whether gateways reach each of these replicas; one that is no longer ready is passed over."""
    rows = list(Replica.objects.select_for_update().filter(pk__in=verdicts, status=READY).order_by("pk"))
    happenings = []
    changed: set[UUID] = set()
    for row in rows:
        verdict = verdicts[row.pk]
        if (row.reach in CLOSED) != (verdict.reach in CLOSED):
            changed.add(row.deployment_id)
        row.reach, row.unroutable_reason = verdict.reach, verdict.reason[:500]
        if verdict.event:
            happenings.append(
                Happening(subject_of(row), verdict.event, ("", ""), verdict.reason, row.generation)
            )
    Replica.objects.bulk_update(rows, ["reach", "unroutable_reason"])
    record_events(happenings, actor=actor, now=now)
    ring_all([("deployment", pk) for pk in changed])
    ring_all(nodes_of_awake_standbys(changed))
    if rows:
        ring("routes", "all")
