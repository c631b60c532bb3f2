"""Writing of roll-ups."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import datetime
from uuid import UUID

from exaserve_ops.telemetry.domain.node_minutes import NodeMinuteLoad
from exaserve_ops.telemetry.domain.rollups import MinuteLoad
from exaserve_ops.telemetry.models import NodeMinute, ReplicaMinute


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


def record_node_minutes(minute: datetime, loads: Mapping[UUID, NodeMinuteLoad]) -> None:
    """Write one minute of many nodes, in one statement. A minute written twice stays as it was."""
    NodeMinute.objects.bulk_create(
        [
            NodeMinute(
                node_id=node_id,
                minute=minute,
                card_ordinals=list(load.card_ordinals),
                **load.plain,
                **load.cards,
            )
            for node_id, load in loads.items()
        ],
        ignore_conflicts=True,
    )


def delete_node_minutes_before(moment: datetime) -> int:
    """Forget roll-ups of nodes older than the retention."""
    return NodeMinute.objects.filter(minute__lt=moment).delete()[0]
