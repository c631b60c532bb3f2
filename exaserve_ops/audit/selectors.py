"""Reading of the audit record."""

from __future__ import annotations

from django.db.models import QuerySet

from exaserve_ops.audit.models import Event

LOOKBACK_EVENTS = 64
"""Ids are given at insert and seen at commit, so a lower id can appear after a higher one. Readers
of the live feed look this far back and drop what they have."""

FLAG_EVENTS = 5_000
"""Flags are looked for so far back: one that was raised longer ago is raised once more, if it still holds."""


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


def subjects_with_flag(kind: str, raised: str, lowered: str) -> frozenset[str]:
    """Ids of the subjects whose newest event of the two is `raised`. One query."""
    rows = Event.objects.filter(event__in=(raised, lowered), subject_kind=kind).order_by("-pk")
    newest: dict[str, str] = {}
    for subject_id, event in rows.values_list("subject_id", "event")[:FLAG_EVENTS]:
        newest.setdefault(subject_id, event)
    return frozenset(subject_id for subject_id, event in newest.items() if event == raised)
