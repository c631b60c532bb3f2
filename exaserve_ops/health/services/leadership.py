"""Record of who leads among the controllers, and for how long nobody did."""

from __future__ import annotations

from datetime import datetime

from django.db import transaction

from exaserve_ops.audit.models import Event
from exaserve_ops.audit.services import Subject, record_event

SUBJECT = Subject("controllers", "controllers", "Controllers")


@transaction.atomic
def record_new_leader(*, holder: str, epoch: int, gap_seconds: float, now: datetime) -> Event:
    """Write down that another controller leads.

    `gap_seconds`: from the last sign of whoever led before until the new one had begun its work; 0 where
    the lead was given up in order.
    """
    how = f"nobody led for {gap_seconds:.2f} s" if gap_seconds > 0 else "the one before had given it up"
    return record_event(
        SUBJECT, "leader_changed", actor=f"controller:{holder}", now=now, reason=how, generation=epoch
    )
