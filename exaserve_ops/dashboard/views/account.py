"""Login, logout and the style guide."""

from __future__ import annotations

from django.conf import settings
from django.contrib.auth.views import LoginView, LogoutView
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from exaserve_ops.dashboard.forms import ScaleForm
from exaserve_ops.dashboard.plans import PlanLine, PlanPreview
from exaserve_ops.inventory.domain.liveness import NODE_LIVENESS
from exaserve_ops.serving.domain.lifecycle import DEPLOYMENT, REPLICA


class SignInView(LoginView):
    """The only page that anybody may open."""

    template_name = "account/login.html"
    redirect_authenticated_user = True
    extra_context = {"title": "Sign in"}


class SignOutView(LogoutView):
    """Ends the session; POST only."""


_SAMPLE_PLAN = PlanPreview(
    lines=(
        PlanLine("create", "good", "new replica 1", "on gpu-07", "0 of this deployment here"),
        PlanLine("wait", "warn", "new replica 2", "fits nowhere", "gpu-01: cordoned: kernel update"),
        PlanLine("drain", "bad", "chat-4f2a-3", "ready, 2 active sessions", "scaled to 4"),
    ),
    created=2,
    placed=1,
    waiting=1,
    let_go=1,
    sessions_moved=2,
)


@require_safe
def styleguide(request: HttpRequest) -> HttpResponse:
    """Show every component, where debugging is on."""
    if not settings.DEBUG:
        raise Http404
    context = {
        "title": "Style guide",
        "lifecycles": [NODE_LIVENESS, REPLICA, DEPLOYMENT],
        "values": [3, 4, 4, 6, 5, 7, None, None, 6, 8, 9, 7, 6, 8],
        "plan": _SAMPLE_PLAN,
        "form": ScaleForm({"replicas": -1, "generation": 1}),
    }
    return render(request, "styleguide.html", context)
