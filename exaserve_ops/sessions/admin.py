"""Sessions in the Django admin."""

from __future__ import annotations

from django.contrib import admin

from exaserve_ops.lib.admin import ReadOnlyAdmin
from exaserve_ops.sessions.models import InferenceSession, Relocation


@admin.register(InferenceSession)
class InferenceSessionAdmin(ReadOnlyAdmin[InferenceSession]):
    """Conversations, as gateways counted their turns."""

    list_display = (
        "session_id",
        "model_name",
        "replica",
        "node_name",
        "turns",
        "failed_turns",
        "last_turn_at",
    )
    list_filter = ("model_name", "last_outcome")
    list_select_related = ("replica",)
    search_fields = ("session_id", "replica__name", "node_name")
    show_full_result_count = False


@admin.register(Relocation)
class RelocationAdmin(ReadOnlyAdmin[Relocation]):
    """Moves of conversations between replicas."""

    list_display = ("session", "source", "target", "status", "way", "why", "reason", "created_at", "ended_at")
    list_filter = ("status", "way")
    list_select_related = ("session", "source", "target")
    search_fields = ("session__session_id",)
    show_full_result_count = False
