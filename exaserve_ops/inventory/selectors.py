"""Reading of the inventory."""

from __future__ import annotations

from django.db.models import QuerySet

from exaserve_ops.inventory.models import Node


def nodes_with_hardware() -> QuerySet[Node]:
    """All nodes with accelerators and failure domains, in three queries."""
    return Node.objects.select_related("failure_domain__parent__parent").prefetch_related("accelerators")


def rack_of(node: Node) -> str:
    """Name of the rack that a node stands in; empty where none is known."""
    domain = node.failure_domain.parent
    while domain is not None and domain.kind != "rack":
        domain = domain.parent
    return domain.name if domain is not None else ""
