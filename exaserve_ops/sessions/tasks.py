"""Chores of this app."""

from __future__ import annotations

from datetime import timedelta

from celery import shared_task

from exaserve_ops.lib import clock
from exaserve_ops.sessions.services import delete_sessions_before
from exaserve_ops.sessions.services.relocations import delete_relocations_before

RETENTION = timedelta(days=30)
RELOCATION_RETENTION = timedelta(days=7)


@shared_task(name="exaops.sessions.retain")  # type: ignore[untyped-decorator]  # celery has no types
def retain() -> int:
    """Forget what is older than the retention; returns how many rows went."""
    now = clock.now()
    return delete_relocations_before(now - RELOCATION_RETENTION) + delete_sessions_before(now - RETENTION)
