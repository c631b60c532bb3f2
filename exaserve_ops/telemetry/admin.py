"""Roll-ups in the Django admin."""

from __future__ import annotations

from django.contrib import admin

from exaserve_ops.lib.admin import ReadOnlyAdmin
from exaserve_ops.telemetry.models import NodeMinute, ReplicaMinute


@admin.register(ReplicaMinute)
class ReplicaMinuteAdmin(ReadOnlyAdmin[ReplicaMinute]):
    """Load by the minute, as controllers rolled it up."""

    list_display = ("replica_id", "minute", "kv_used_ratio_max", "ttft_p95_seconds_max")
    list_filter = ("minute",)
    search_fields = ("replica_id",)
    show_full_result_count = False


@admin.register(NodeMinute)
class NodeMinuteAdmin(ReadOnlyAdmin[NodeMinute]):
    """Machines by the minute, as controllers rolled them up."""

    list_display = ("node_id", "minute", "ttft_p99_seconds", "requests_waiting", "cpu_busiest_ratio")
    list_filter = ("minute",)
    search_fields = ("node_id",)
    show_full_result_count = False
