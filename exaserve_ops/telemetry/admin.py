"""Roll-ups in the Django admin."""

from __future__ import annotations

from django.contrib import admin

from exaserve_ops.lib.admin import ReadOnlyAdmin
from exaserve_ops.telemetry.models import ReplicaMinute


@admin.register(ReplicaMinute)
class ReplicaMinuteAdmin(ReadOnlyAdmin[ReplicaMinute]):
    """Load by the minute, as controllers rolled it up."""

    list_display = ("replica_id", "minute", "kv_used_ratio_max", "ttft_p95_seconds_max")
    list_filter = ("minute",)
    search_fields = ("replica_id",)
    show_full_result_count = False
