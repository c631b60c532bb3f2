"""Chores of this app."""

from __future__ import annotations

from datetime import timedelta

from celery import shared_task

from exaserve_ops.lib import clock
from exaserve_ops.sessions.services import delete_sessions_before

RETENTION = timedelta(days=30)


@shared_task(name="exaops.sessions.retain")  # type: ignore[untyped-decorator]  # celery has no types
def retain() -> int:
    """Forget what is older than the retention; returns how many rows went."""
    return delete_sessions_before(clock.now() - RETENTION)
