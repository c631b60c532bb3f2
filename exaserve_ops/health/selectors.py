"""Reading of incidents: what healing consults before it acts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime, timedelta

from django.db.models import Q, QuerySet

from exaserve_ops.audit.models import Event
from exaserve_ops.health.domain.incident import CONFIRMED, DISMISSED, OPEN
from exaserve_ops.health.models import Incident


def healing_freeze() -> str:
    """Why healing must not act now; empty where it may. One short query."""
    incident = Incident.objects.filter(status=OPEN, freezes_healing=True).order_by("opened_at").first()
    if incident is None:
        return ""
    return f"{incident}; healing waits until it resolves or somebody confirms or dismisses it"


def open_incidents() -> QuerySet[Incident]:
    """Incidents that wait, the oldest first."""
    return Incident.objects.filter(status=OPEN).order_by("opened_at")


def undecided_incidents() -> QuerySet[Incident]:
    """Incidents that a controller has yet to act upon: open, confirmed, or dismissed and still silent."""
    waiting = Q(status=OPEN) | Q(status__in=(CONFIRMED, DISMISSED), applied_at=None)
    return Incident.objects.filter(waiting).order_by("opened_at")


def recent_deaths(now: datetime, *, within_seconds: float) -> Mapping[str, list[float]]:
    """Ages in seconds of the deaths of each node, by its id, the longest ago first. One query."""
    since = now - timedelta(seconds=within_seconds)
    rows = Event.objects.filter(subject_kind="node", event="lost", at__gt=since).order_by("pk")
    ages: defaultdict[str, list[float]] = defaultdict(list)
    for node_id, at in rows.values_list("subject_id", "at"):
        ages[node_id].append((now - at).total_seconds())
    return ages
