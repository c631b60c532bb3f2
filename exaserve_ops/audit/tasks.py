"""Chores of this app."""

from __future__ import annotations

from datetime import timedelta

from celery import shared_task

from exaserve_ops.audit.services import delete_events_before
from exaserve_ops.lib import clock

RETENTION = timedelta(days=400)


@shared_task(name="exaops.audit.retain")  # type: ignore[untyped-decorator]  # celery has no types
def retain() -> int:
    """Forget what is older than the retention; returns how many rows went."""
    return delete_events_before(clock.now() - RETENTION)
