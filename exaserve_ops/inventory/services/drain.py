"""Emptying a node for maintenance, and taking it back into use."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from django.db import transaction

from exaserve_ops.audit.services import record_event
from exaserve_ops.inventory.domain.drain import DRAINED, NODE_DRAIN, NOT_DRAINED
from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.services import subject_of
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.lib.hints import ring


@transaction.atomic
def drain_node(node_id: UUID, *, reason: str, deadline_at: datetime, actor: str, now: datetime) -> Node:
    """Cordon a node and have everything on it moved elsewhere.

    Asked for again while it drains, only the deadline and the reason change. Raises `ConflictError`
    where the node is drained already.
    """
    node = Node.objects.select_for_update().get(pk=node_id)
    if node.drain_status == DRAINED:
        raise ConflictError(f"node {node.name} is drained already")
    node.cordoned, node.cordon_reason = True, reason[:500]
    node.drain_reason, node.drain_deadline_at = reason[:500], deadline_at
    node.save(update_fields=["cordoned", "cordon_reason", "drain_reason", "drain_deadline_at"])
    if node.drain_status == NOT_DRAINED:
        return _advance(node, "drain", reason=reason, actor=actor, now=now)
    record_event(subject_of(node), "drain_changed", actor=actor, now=now, reason=reason)
    ring("node", node.pk)
    return node


@transaction.atomic
def undrain_node(node_id: UUID, *, actor: str, now: datetime) -> Node:
    """Take a node back into use: it is no longer cordoned either. Twice is harmless."""
    node = Node.objects.select_for_update().get(pk=node_id)
    if node.drain_status == NOT_DRAINED:
        return node
    node.cordoned, node.cordon_reason = False, ""
    node.drain_reason, node.drain_deadline_at = "", None
    node.save(update_fields=["cordoned", "cordon_reason", "drain_reason", "drain_deadline_at"])
    return _advance(node, "undrain", reason="", actor=actor, now=now)


@transaction.atomic
def record_drain_progress(node_id: UUID, *, left: int, actor: str, now: datetime) -> Node:
    """Record that a draining node is empty, or that a drained one turned out not to be."""
    node = Node.objects.select_for_update().get(pk=node_id)
    event = "found_more" if left else "emptied"
    if not NODE_DRAIN.allows(node.drain_status, event):
        return node
    reason = f"{left} replicas are here" if left else "no replica is left"
    return _advance(node, event, reason=reason, actor=actor, now=now)


def _advance(node: Node, event: str, *, reason: str, actor: str, now: datetime) -> Node:
    before = node.drain_status
    node.drain_status = NODE_DRAIN.next(before, event)
    node.drain_changed_at = now
    node.save(update_fields=["drain_status", "drain_changed_at"])
    moved = (before, node.drain_status)
    record_event(subject_of(node), event, actor=actor, now=now, moved=moved, reason=reason)
    ring("node", node.pk)
    return node
