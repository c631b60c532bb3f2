"""Moving a conversation to another replica."""

from __future__ import annotations

from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.views.decorators.http import require_POST

from exaserve_ops.dashboard.access import actor_of, requires
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.sessions.models import InferenceSession
from exaserve_ops.sessions.services.relocations import ask_move


@require_POST
@requires("inference_sessions.add_relocation")
def session_move(request: HttpRequest, pk: int) -> HttpResponse:
    """Ask for a move (`target`: replica id, or empty for the emptiest; `reason`)."""
    found = get_object_or_404(InferenceSession, pk=pk)
    back = redirect("session", pk=found.pk)
    why, chosen = request.POST.get("reason", "").strip()[:500], request.POST.get("target", "")
    if not why:
        messages.error(request, "Say why: the reason is shown to everyone who wonders later.")
        return back
    try:
        target = UUID(chosen) if chosen else None
    except ValueError:
        messages.error(request, "Not done: choose where it goes from the list, or the emptiest.")
        return back
    try:
        moved = ask_move(found.pk, target, reason=why, actor=actor_of(request), now=clock.now())
    except ConflictError as error:
        messages.error(request, f"Not done: {error}.")
    else:
        messages.success(request, f"It moves to {moved.target} before its next turn, if no turn runs.")
    return back
