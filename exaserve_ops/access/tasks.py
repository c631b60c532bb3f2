"""Chores of this app."""

from __future__ import annotations

from datetime import timedelta

from celery import shared_task

from exaserve_ops.access.services import delete_idempotency_records_before
from exaserve_ops.lib import clock

RETENTION = timedelta(days=2)


@shared_task(name="exaops.access.retain")  # type: ignore[untyped-decorator]  # celery has no types
def retain() -> int:
    """Forget what is older than the retention; returns how many rows went."""
    return delete_idempotency_records_before(clock.now() - RETENTION)
