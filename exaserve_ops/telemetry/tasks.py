"""Chores of this app."""

from __future__ import annotations

from datetime import timedelta

from celery import shared_task

from exaserve_ops.lib import clock
from exaserve_ops.telemetry.services import delete_minutes_before, delete_node_minutes_before

RETENTION = timedelta(days=30)
NODE_RETENTION = timedelta(days=14)


@shared_task(name="exaops.telemetry.retain")  # type: ignore[untyped-decorator]  # celery has no types
def retain() -> int:
    """Forget what is older than the retention; returns how many rows went."""
    now = clock.now()
    return delete_minutes_before(now - RETENTION) + delete_node_minutes_before(now - NODE_RETENTION)
