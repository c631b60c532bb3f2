"""Writing of roll-ups."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import datetime
from uuid import UUID

from exaserve_ops.telemetry.domain.rollups import MinuteLoad
from exaserve_ops.telemetry.models import ReplicaMinute


def record_minutes(minute: datetime, loads: Mapping[UUID, MinuteLoad]) -> None:
    """Write one minute of many replicas, in one statement. A minute written twice stays as it was."""
    ReplicaMinute.objects.bulk_create(
        [
            ReplicaMinute(replica_id=replica_id, minute=minute, **dataclasses.asdict(load))
            for replica_id, load in loads.items()
        ],
        ignore_conflicts=True,
    )


def delete_minutes_before(moment: datetime) -> int:
    """Forget roll-ups older than the retention."""
    return ReplicaMinute.objects.filter(minute__lt=moment).delete()[0]
