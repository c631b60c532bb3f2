"""Recording of what happened, inside the transaction in which it happened."""

from __future__ import annotations

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


@transaction.atomic
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
    row = Event.objects.create(
        at=now,
        actor=actor[:120],
        subject_kind=subject.kind,
        subject_id=subject.id,
        subject_name=subject.name[:200],
        event=event,
        from_status=moved[0],
        to_status=moved[1],
        reason=reason[:4000],
        generation=generation,
    )
    ring("event", row.pk)
    return row


@transaction.atomic
def delete_events_before(moment: datetime) -> int:
    """Forget events older than the retention; the only way that a row ever leaves."""
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL exaops.retention = 'on'")
        cursor.execute("DELETE FROM audit_event WHERE at < %s", [moment])
        return int(cursor.rowcount)
