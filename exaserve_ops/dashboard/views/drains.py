"""Draining a node: the buttons, and how far it is."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST, require_safe

from exaserve_ops.dashboard.access import actor_of, requires
from exaserve_ops.dashboard.forms import DrainForm
from exaserve_ops.dashboard.reading import drain_of
from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.services.drain import drain_node, undrain_node
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError


@require_POST
@requires("inventory.change_node")
def node_drain(request: HttpRequest, node_id: UUID) -> HttpResponse:
    """Have everything on the node moved elsewhere."""
    found = get_object_or_404(Node, pk=node_id)
    form = DrainForm(request.POST)
    if not form.is_valid():
        messages.error(request, "Say why, and in how many minutes at most it should be empty.")
        return redirect("node", node_id)
    now = clock.now()
    deadline_at = now + timedelta(minutes=form.cleaned_data["minutes"])
    reason = form.cleaned_data["reason"]
    try:
        drain_node(node_id, reason=reason, deadline_at=deadline_at, actor=actor_of(request), now=now)
    except ConflictError as error:
        messages.error(request, f"Not done: {error}.")
    else:
        messages.success(request, f"{found.name} drains. Its replicas are replaced elsewhere first.")
    return redirect("node", node_id)


@require_POST
@requires("inventory.change_node")
def node_undrain(request: HttpRequest, node_id: UUID) -> HttpResponse:
    """Take the node back into use."""
    found = get_object_or_404(Node, pk=node_id)
    undrain_node(node_id, actor=actor_of(request), now=clock.now())
    messages.success(request, f"{found.name} is in use again and takes new replicas.")
    return redirect("node", node_id)


@require_safe
@requires("inventory.view_node")
def node_drain_state(request: HttpRequest, node_id: UUID) -> HttpResponse:
    """Show again how far draining is."""
    found = get_object_or_404(Node, pk=node_id)
    return render(request, "nodes/drain.html", {"node": found, "drain": drain_of(found)})
