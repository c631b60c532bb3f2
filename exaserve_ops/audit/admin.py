"""Audit events in the Django admin."""

from __future__ import annotations

from django.contrib import admin

from exaserve_ops.audit.models import Event
from exaserve_ops.lib.admin import ReadOnlyAdmin


@admin.register(Event)
class EventAdmin(ReadOnlyAdmin[Event]):
    """What happened; rows are only ever added."""

    list_display = (
        "at",
        "actor",
        "subject_kind",
        "subject_name",
        "event",
        "from_status",
        "to_status",
        "reason",
    )
    list_filter = ("subject_kind", "event", "at")
    search_fields = ("subject_name", "subject_id", "actor", "reason")
    show_full_result_count = False
