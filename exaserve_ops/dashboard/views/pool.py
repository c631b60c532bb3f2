"""Opening whole cards to a deployment that runs in slices, and closing them again."""

from __future__ import annotations

from typing import Any
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


@require_POST
@requires("serving.change_deployment")
def deployment_pool(request: HttpRequest, deployment_id: UUID) -> HttpResponse:
    """Open whole cards (`open` is `yes`) while no slice is free, or close them, for a `reason`."""
    found = get_object_or_404(Deployment, pk=deployment_id)
    opens = request.POST.get("open") == "yes"
    why = request.POST.get("reason", "").strip()
    if not why:
        messages.error(request, "Say why: the reason is shown to everyone who wonders later.")
        return redirect("deployment", deployment_id)
    changes: dict[str, Any] = {"spill": True, "spill_reason": why} if opens else {"spill": False}
    try:
        update_deployment(
            deployment_id,
            changes,
            actor=actor_of(request),
            now=clock.now(),
            reason="" if opens else why,
        )
    except (ConflictError, InvalidInputError) as error:
        messages.error(request, f"Not done: {error}.")
    else:
        messages.success(
            request,
            f"Whole cards are opened to {found.name} while no slice is free."
            if opens
            else f"New replicas of {found.name} go into slices only; those on whole cards keep them.",
        )
    return redirect("deployment", deployment_id)
