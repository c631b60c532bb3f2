"""Reading of the audit record."""

from __future__ import annotations

from django.db.models import QuerySet

from exaserve_ops.audit.models import Event

LOOKBACK_EVENTS = 64
"""Ids are given at insert and seen at commit, so a lower id can appear after a higher one. Readers
of the live feed look this far back and drop what they have."""


def newest_event_ids() -> tuple[int, ...]:
    """Ids of the newest events: others than before whenever one was added since, late commits included."""
    return tuple(Event.objects.order_by("-pk").values_list("pk", flat=True)[:LOOKBACK_EVENTS])


def events_after(event_id: int, *, limit: int = 500) -> list[Event]:
    """Events since the one last seen, oldest first, with a look-back for late commits. One query."""
    rows = Event.objects.filter(pk__gt=max(0, event_id - LOOKBACK_EVENTS)).order_by("-pk")[:limit]
    return list(reversed(rows))


def events_of(kind: str, subject_id: object) -> QuerySet[Event]:
    """History of one subject, newest first."""
    return Event.objects.filter(subject_kind=kind, subject_id=str(subject_id))
