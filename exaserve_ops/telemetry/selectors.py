"""Reading of roll-ups."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from exaserve_ops.telemetry.models import ReplicaMinute


def minutes_of(replica_id: UUID, *, since: datetime) -> list[ReplicaMinute]:
    """One replica's minutes since a moment, oldest first."""
    rows = ReplicaMinute.objects.filter(replica_id=replica_id, minute__gte=since)
    return list(rows.order_by("minute"))
