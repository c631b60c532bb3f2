"""Leases in the Django admin."""

from __future__ import annotations

from django.contrib import admin

from exaserve_ops.health.models import NodeLease
from exaserve_ops.lib.admin import ReadOnlyAdmin


@admin.register(NodeLease)
class NodeLeaseAdmin(ReadOnlyAdmin[NodeLease]):
    """Leases, as controllers granted them."""

    list_display = ("node", "epoch", "boot_id", "granted_at")
    list_select_related = ("node",)
    search_fields = ("node__name", "boot_id")
