"""Having the standbys of a deployment sleep, and keeping them awake again."""

from __future__ import annotations

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
def deployment_sleep(request: HttpRequest, deployment_id: UUID) -> HttpResponse:
    """Let standbys sleep (`sleep` is `yes`), or have them awake, for a `reason`."""
    found = get_object_or_404(Deployment, pk=deployment_id)
    sleeps = request.POST.get("sleep") == "yes"
    why = request.POST.get("reason", "").strip()
    if not why:
        messages.error(request, "Say why: the reason is shown to everyone who wonders later.")
        return redirect("deployment", deployment_id)
    try:
        update_deployment(
            deployment_id,
            {"standbys_sleep": sleeps},
            actor=actor_of(request),
            now=clock.now(),
            reason=why[:300],
        )
    except (ConflictError, InvalidInputError) as error:
        messages.error(request, f"Not done: {error}.")
    else:
        messages.success(
            request,
            f"Standbys of {found.name} sleep once they are ready."
            if sleeps
            else f"Standbys of {found.name} are woken, and stay awake.",
        )
    return redirect("deployment", deployment_id)
