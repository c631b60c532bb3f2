"""Incidents: what the control plane doubts, and the buttons that decide it."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST, require_safe

from exaserve_ops.dashboard.access import actor_of, requires
from exaserve_ops.dashboard.listing import list_page
from exaserve_ops.dashboard.problems import title_state
from exaserve_ops.dashboard.reading import history_of
from exaserve_ops.dashboard.simulation import share_of_nodes, simulated_incidents
from exaserve_ops.health.domain.incident import INCIDENT, KINDS, OPEN
from exaserve_ops.health.models import Incident
from exaserve_ops.health.selectors import open_incidents
from exaserve_ops.health.services.incidents import confirm_incident, dismiss_incident
from exaserve_ops.inventory.models import Node
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError

SHOWN_NODES = 100


@require_safe
@requires("health.view_incident")
def incidents(request: HttpRequest) -> HttpResponse:
    """Show all incidents, the newest first."""
    listing = list_page(
        request,
        Incident.objects.order_by("-opened_at"),
        choices={
            "state": ("State", "status", INCIDENT.choices),
            "kind": ("Kind", "kind", list(KINDS.items())),
        },
        search_in=("scope", "evidence", "resolution"),
        searchable="scope, evidence or outcome",
    )
    title = title_state([(open_incidents().count(), "open")], "Incidents")
    rows = list(listing.page.object_list)
    context = {"title": title, "listing": listing, "rows": rows, "simulated": simulated_incidents(rows)}
    return render(request, "incidents/list.html", context)


@require_safe
@requires("health.view_incident")
def incident(request: HttpRequest, incident_id: UUID) -> HttpResponse:
    """Show one incident with its nodes."""
    found = get_object_or_404(Incident, pk=incident_id)
    context = {
        "title": f"{found.status} · {found}",
        "incident": found,
        "is_open": found.status == OPEN,
        "nodes": Node.objects.filter(pk__in=found.node_ids)[:SHOWN_NODES],
        "more_nodes": max(0, len(found.node_ids) - SHOWN_NODES),
        "share": share_of_nodes(found.node_ids),
        "events": history_of("incident", incident_id),
    }
    return render(request, "incidents/page.html", context)


@require_POST
@requires("health.change_incident")
def incident_confirm(request: HttpRequest, incident_id: UUID) -> HttpResponse:
    """Declare the silent nodes dead."""
    return _decide(request, incident_id, confirm_incident, "The nodes are declared dead and healed.")


@require_POST
@requires("health.change_incident")
def incident_dismiss(request: HttpRequest, incident_id: UUID) -> HttpResponse:
    """Leave the silent nodes unjudged and let healing go on."""
    return _decide(request, incident_id, dismiss_incident, "Healing goes on; the silent nodes stay suspect.")


def _decide(
    request: HttpRequest, incident_id: UUID, service: Callable[..., Incident], outcome: str
) -> HttpResponse:
    get_object_or_404(Incident, pk=incident_id)
    why = request.POST.get("reason", "").strip()
    if not why:
        messages.error(request, "Say why: the reason is shown to everyone who wonders later.")
        return redirect("incident", incident_id)
    try:
        service(incident_id, reason=why, actor=actor_of(request), now=clock.now())
    except ConflictError as error:
        messages.error(request, f"Not done: {error}.")
    else:
        messages.success(request, outcome)
    return redirect("incident", incident_id)
