"""Reading of sessions."""

from __future__ import annotations

from datetime import datetime, timedelta
from uuid import UUID

from django.db.models import Count, QuerySet

from exaserve_ops.sessions.models import InferenceSession

ACTIVE_FOR = timedelta(minutes=10)
"""A session counts as live for so long after its last turn."""


def sessions_with_replica() -> QuerySet[InferenceSession]:
    """Sessions with the replica that holds them, newest turn first."""
    return InferenceSession.objects.select_related("replica")


def count_live_sessions(now: datetime) -> int:
    """Sessions that had a turn lately."""
    return InferenceSession.objects.filter(last_turn_at__gt=now - ACTIVE_FOR).count()


def active_sessions_by_replica(deployment_id: UUID, *, now: datetime) -> dict[str, int]:
    """Live sessions of each replica of a deployment, by replica id."""
    rows = (
        InferenceSession.objects.filter(replica__deployment=deployment_id, last_turn_at__gt=now - ACTIVE_FOR)
        .values_list("replica")
        .annotate(count=Count("pk"))
    )
    return {str(replica): count for replica, count in rows}
