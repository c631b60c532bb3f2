"""Recording of what happened, inside the transaction in which it happened."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from django.db import connection, transaction

from exaserve_ops.audit.models import Event
from exaserve_ops.lib.hints import ring


@dataclass(frozen=True, slots=True)
class Subject:
    """What an event is about."""

    kind: str
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Happening:
    """What happened to one subject; `moved` is (from status, to status)."""

    subject: Subject
    event: str
    moved: tuple[str, str] = ("", "")
    reason: str = ""
    generation: int | None = None


@transaction.atomic(savepoint=False)
def record_event(
    subject: Subject,
    event: str,
    *,
    actor: str,
    now: datetime,
    moved: tuple[str, str] = ("", ""),
    reason: str = "",
    generation: int | None = None,
) -> Event:
    """Append one event; `moved` is (from status, to status)."""
    happening = Happening(subject, event, moved, reason, generation)
    [row] = record_events([happening], actor=actor, now=now)
    return row


@transaction.atomic(savepoint=False)
def record_events(happenings: Iterable[Happening], *, actor: str, now: datetime) -> list[Event]:
    """Append one event for each, in their order."""
    rows = Event.objects.bulk_create([_row(happening, actor, now) for happening in happenings])
    if rows:
        ring("event", rows[-1].pk)
    return rows


def _row(happening: Happening, actor: str, now: datetime) -> Event:
    return Event(
        at=now,
        actor=actor[:120],
        subject_kind=happening.subject.kind,
        subject_id=happening.subject.id,
        subject_name=happening.subject.name[:200],
        event=happening.event,
        from_status=happening.moved[0],
        to_status=happening.moved[1],
        reason=happening.reason[:4000],
        generation=happening.generation,
    )


@transaction.atomic
def delete_events_before(moment: datetime) -> int:
    """Forget events older than the retention; the only way that a row ever leaves."""
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL exaops.retention = 'on'")
        cursor.execute("DELETE FROM audit_event WHERE at < %s", [moment])
        return int(cursor.rowcount)
