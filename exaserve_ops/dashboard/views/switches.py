"""Switches of a deployment that are turned for a reason: sleep of standbys, whole cards beside slices."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.views.decorators.http import require_POST

from exaserve_ops.dashboard.access import actor_of, requires
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError, InvalidInputError
from exaserve_ops.serving.models import Deployment
from exaserve_ops.serving.services.deployments import update_deployment

_REASON_CHARACTERS = 300


@require_POST
@requires("serving.change_deployment")
def deployment_sleep(request: HttpRequest, deployment_id: UUID) -> HttpResponse:
    """Let standbys sleep (`sleep` is `yes`), or have them awake, for a `reason`."""
    if request.POST.get("sleep") == "yes":
        return _turn(
            request, deployment_id, {"standbys_sleep": True}, "Its standbys sleep once they are ready."
        )
    return _turn(request, deployment_id, {"standbys_sleep": False}, "Its standbys are woken, and stay awake.")


@require_POST
@requires("serving.change_deployment")
def deployment_pool(request: HttpRequest, deployment_id: UUID) -> HttpResponse:
    """Open whole cards (`open` is `yes`) while no slice is free, or close them, for a `reason`."""
    if request.POST.get("open") == "yes":
        changes = {"spill": True, "spill_reason": request.POST.get("reason", "").strip()}
        return _turn(request, deployment_id, changes, "Whole cards are opened to it while no slice is free.")
    done = "Its new replicas go into slices only; those on whole cards keep them."
    return _turn(request, deployment_id, {"spill": False}, done)


def _turn(
    request: HttpRequest, deployment_id: UUID, changes: Mapping[str, object], done: str
) -> HttpResponse:
    found = get_object_or_404(Deployment, pk=deployment_id)
    why = request.POST.get("reason", "").strip()
    if not why:
        messages.error(request, "Say why: the reason is shown to everyone who wonders later.")
        return redirect("deployment", deployment_id)
    # One that is kept with the change need not stand beside it, too.
    reason = "" if why in changes.values() else why[:_REASON_CHARACTERS]
    try:
        update_deployment(deployment_id, changes, actor=actor_of(request), now=clock.now(), reason=reason)
    except (ConflictError, InvalidInputError) as error:
        messages.error(request, f"Not done: {error}.")
    else:
        messages.success(request, f"{found.name}: {done}")
    return redirect("deployment", deployment_id)
