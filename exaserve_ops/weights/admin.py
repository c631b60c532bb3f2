"""Weights in the Django admin."""

from __future__ import annotations

from django.contrib import admin

from exaserve_ops.lib.admin import ReadOnlyAdmin
from exaserve_ops.weights.models import NodeStore, NodeWeights, PrewarmPolicy, WeightsClaim


@admin.register(WeightsClaim)
class WeightsClaimAdmin(ReadOnlyAdmin[WeightsClaim]):
    """Who wants which weights on which node."""

    list_display = ("revision", "node", "owner", "paused", "bytes_per_second", "claimed_by", "created_at")
    list_filter = ("paused",)
    list_select_related = ("node",)
    search_fields = ("revision", "owner", "node__name")


@admin.register(NodeWeights)
class NodeWeightsAdmin(ReadOnlyAdmin[NodeWeights]):
    """What nodes have."""

    list_display = ("revision", "node", "state", "have_bytes", "total_bytes", "in_use", "reason", "since")
    list_filter = ("state", "in_use")
    list_select_related = ("node",)
    search_fields = ("revision", "node__name")


@admin.register(NodeStore)
class NodeStoreAdmin(ReadOnlyAdmin[NodeStore]):
    """Disks for weights."""

    list_display = ("node", "used_bytes", "disk_free_bytes", "disk_total_bytes", "problem", "wish_revision")
    list_select_related = ("node",)
    search_fields = ("node__name",)


@admin.register(PrewarmPolicy)
class PrewarmPolicyAdmin(ReadOnlyAdmin[PrewarmPolicy]):
    """When weights are fetched ahead; changed on the weights page and over REST."""

    list_display = ("revision", "enabled", "busiest_ratio", "from_minute", "until_minute", "at_once")
    list_filter = ("enabled",)
    search_fields = ("revision",)
