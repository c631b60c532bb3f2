"""Reading of sessions."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from uuid import UUID

from django.db.models import Count, QuerySet

from exaserve_ops.serving.models import Replica
from exaserve_ops.sessions.domain.relocation import ACTIVE_SECONDS
from exaserve_ops.sessions.domain.timeline import read_stays, read_turns
from exaserve_ops.sessions.models import InferenceSession
from exaserve_ops.sessions.selectors.moves import departures as departures

ACTIVE_FOR = timedelta(seconds=ACTIVE_SECONDS)
"""A session counts as live for so long after its last turn."""
_MOVED = ("repinned", "retry", "continued")
"""What gateways give as the reason of such a turn."""


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


def replicas_of_timeline(session: InferenceSession) -> dict[str, Replica]:
    """Replicas that a conversation's timeline names and that are still on record, by id."""
    turns = read_turns(session.latest_turns)
    ids = {replica_id for turn in turns for replica_id in (turn.replica_id, *turn.continued_from)}
    ids |= {stay.replica_id for stay in read_stays(session.stays)}
    return {str(replica.pk): replica for replica in Replica.objects.filter(pk__in=ids - {""})}


def count_moved_sessions(replica_ids: Collection[UUID], *, since: datetime) -> int:
    """Sessions whose last turn went to one of these replicas although another one held their prefix."""
    rows = InferenceSession.objects.filter(replica__in=replica_ids, last_turn_at__gte=since)
    return rows.filter(last_why__in=_MOVED).count()
