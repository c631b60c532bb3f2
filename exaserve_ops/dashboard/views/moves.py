"""Session migration: what would move now, what waits, what did, and when sessions are balanced."""

from __future__ import annotations

from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST, require_safe

from exaserve_ops.dashboard.access import actor_of, requires
from exaserve_ops.dashboard.forms import BalanceForm
from exaserve_ops.dashboard.listing import list_page
from exaserve_ops.dashboard.migration import describe_plan
from exaserve_ops.dashboard.ports import live_reader, move_limits
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.serving.models import Deployment
from exaserve_ops.serving.services.deployments import update_deployment
from exaserve_ops.sessions.domain.moves import RELOCATION
from exaserve_ops.sessions.domain.relocation import TRIGGERS, rooms_of
from exaserve_ops.sessions.domain.relocation_plan import plan_relocations
from exaserve_ops.sessions.models import Relocation
from exaserve_ops.sessions.selectors.moves import movable_fleet


@require_safe
@requires("inference_sessions.view_relocation")
def session_moves(request: HttpRequest) -> HttpResponse:
    """Show what would move now and why, what waits and why, and the latest moves."""
    reader, limits = live_reader(), move_limits()
    fleet = movable_fleet(
        now=clock.now(), rooms=lambda nodes: rooms_of(reader.read_nodes(nodes)), looks_at_all=True
    )
    listing = list_page(
        request,
        Relocation.objects.select_related("session", "source", "target").order_by("-created_at"),
        choices={
            "state": ("State", "status", RELOCATION.choices),
            "trigger": ("Because", "trigger", [(name, name) for name in TRIGGERS]),
        },
        search_in=("session__session_id", "source__name", "target__name", "why"),
        searchable="session, replica or reason",
    )
    context = {
        "title": "Session migration",
        "limits": limits,
        "plan": describe_plan(fleet, plan_relocations(fleet, limits.rested)),
        "listing": listing,
        "rows": listing.page.object_list,
    }
    return render(request, "sessions/migration.html", context)


@require_POST
@requires("serving.change_deployment")
def deployment_balance(request: HttpRequest, deployment_id: UUID) -> HttpResponse:
    """Set whether and when the deployment's sessions move to emptier replicas."""
    found = get_object_or_404(Deployment, pk=deployment_id)
    form = BalanceForm(request.POST)
    if not form.is_valid():
        told = "; ".join(
            f"{form.fields[name].label or name}: {errors[0]}" for name, errors in form.errors.items()
        )
        messages.error(request, f"Not done: {told}")
        return redirect("deployment", deployment_id)
    changes = dict(form.cleaned_data)
    why = changes.pop("reason")
    try:
        update_deployment(deployment_id, changes, actor=actor_of(request), now=clock.now(), reason=why)
    except ConflictError as error:
        messages.error(request, f"Not done: {error}.")
    else:
        balanced = (
            "are balanced between its replicas" if changes["balance_sessions"] else "stay where they are"
        )
        messages.success(request, f"Sessions of {found.name} {balanced}.")
    return redirect("deployment", deployment_id)
