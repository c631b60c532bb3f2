"""Login, logout and the style guide."""

from __future__ import annotations

import math
from typing import Any

from django.conf import settings
from django.contrib.auth.forms import AuthenticationForm
from django.contrib.auth.views import LoginView, LogoutView
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from exaserve_ops.dashboard.forms import ScaleForm
from exaserve_ops.dashboard.plans import PlanLine, PlanPreview
from exaserve_ops.inventory.domain.liveness import NODE_LIVENESS
from exaserve_ops.lib.refusals import RefusalBound
from exaserve_ops.serving.domain.lifecycle import DEPLOYMENT, REPLICA

REFUSED_LOGINS = RefusalBound(limit=10, window_seconds=300.0)
"""Wrong passwords for one name from one address. Nobody elsewhere can lock a person out."""
REFUSED_ADDRESSES = RefusalBound(limit=30, window_seconds=300.0)


class SignInView(LoginView):
    """The only page that anybody may open."""

    template_name = "account/login.html"
    redirect_authenticated_user = True
    extra_context = {"title": "Sign in"}

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:  # noqa: ANN401 - Django's signature
        """Check the password, unless too many wrong ones came before."""
        wait = max(
            REFUSED_LOGINS.wait_seconds(self._login_key()), REFUSED_ADDRESSES.wait_seconds(self._address())
        )
        if wait <= 0:
            return super().post(request, *args, **kwargs)
        form = self.get_form()
        form.full_clean()
        form.errors.clear()
        form.add_error(None, f"Too many wrong passwords. Try again in {math.ceil(wait / 60)} min.")
        response = self.render_to_response(self.get_context_data(form=form), status=429)
        response["Retry-After"] = str(math.ceil(wait))
        return response

    def form_invalid(self, form: AuthenticationForm) -> HttpResponse:
        """Count the wrong password."""
        REFUSED_LOGINS.count_refusal(self._login_key())
        REFUSED_ADDRESSES.count_refusal(self._address())
        return super().form_invalid(form)

    def _address(self) -> str:
        return str(self.request.META.get("REMOTE_ADDR", ""))

    def _login_key(self) -> str:
        return f"{self._address()} {self.request.POST.get('username', '').lower()[:150]}"


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
