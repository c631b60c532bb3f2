"""Starts in turns: who starts, who waits and why, how it went before, and the limits."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from uuid import UUID

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST, require_safe

from exaserve_ops.dashboard.access import actor_of, requires
from exaserve_ops.dashboard.reading import history_of
from exaserve_ops.dashboard.starts import BARS_HEIGHT, bars_of, width_of
from exaserve_ops.lib import clock
from exaserve_ops.serving.domain.starts import StartLimits
from exaserve_ops.serving.models import Deployment, StagedStart
from exaserve_ops.serving.selectors.start_outlook import has_staged_start, start_outlook
from exaserve_ops.serving.selectors.starts import start_limits
from exaserve_ops.serving.services.starts import MOST_AT_ONCE, set_start_limits

SHOWN_STARTS = 20


class StartLimitsForm(forms.Form):
    """How much may start at once."""

    per_node = forms.IntegerField(
        min_value=0, max_value=MOST_AT_ONCE, label="Replicas of one node", help_text="They share its disk."
    )
    per_fleet = forms.IntegerField(min_value=0, max_value=MOST_AT_ONCE, label="Replicas of the fleet")
    from_origins = forms.IntegerField(
        min_value=0,
        max_value=MOST_AT_ONCE,
        label="Copies from origins",
        help_text="Nodes that pass weights on to one another count as one.",
    )
    per_rack = forms.IntegerField(
        min_value=0, max_value=MOST_AT_ONCE, label="Nodes of a rack that fetch weights"
    )
    in_place = forms.IntegerField(
        min_value=0,
        max_value=MOST_AT_ONCE,
        label="Nodes that read in place",
        help_text="Where weights lie on a file server.",
    )
    reason = forms.CharField(max_length=500, label="Why")

    def limits(self) -> StartLimits:
        """What a valid form asks for."""
        asked = dict(self.cleaned_data)
        del asked["reason"]
        return StartLimits(**asked)


@require_safe
@requires("serving.view_stagedstart")
def starts(request: HttpRequest) -> HttpResponse:
    """Show who starts and who waits, the limits, and how staged starts went before."""
    return _page(request, StartLimitsForm(initial=asdict(start_limits())))


@require_safe
@requires("serving.view_stagedstart")
def starts_now(request: HttpRequest) -> HttpResponse:
    """Show the panel again, for a page that is open."""
    at_home = "at_home" in request.GET
    return render(request, "starts/panel.html", {**starting_context(), "at_home": at_home})


@require_safe
@requires("serving.view_deployment")
def deployment_starting(request: HttpRequest, deployment_id: UUID) -> HttpResponse:
    """Show how the starts of one deployment go; nothing while none of its replicas has to wait."""
    found = get_object_or_404(Deployment, pk=deployment_id)
    return render(request, "starts/panel.html", starting_context(found))


@require_POST
@requires("serving.change_startrules")
def start_limits_set(request: HttpRequest) -> HttpResponse:
    """Set the limits."""
    form = StartLimitsForm(request.POST)
    if not form.is_valid():
        return _page(request, form, status=422)
    reason = form.cleaned_data["reason"]
    set_start_limits(form.limits(), actor=actor_of(request), now=clock.now(), reason=reason)
    messages.success(request, "The limits are set; what starts already goes on.")
    return redirect("starts")


def starting_context(deployment: Deployment | None = None) -> dict[str, Any]:
    """What the panel shows; nothing while nobody has to wait, which costs one short query."""
    if not has_staged_start():
        return {}
    outlook = start_outlook(now=clock.now(), deployment_id=deployment.pk if deployment else None)
    bars = bars_of(outlook.waves)
    return {
        "starts": outlook,
        "bars": bars,
        "bars_width": width_of(bars),
        "bars_height": BARS_HEIGHT,
    }


def _page(request: HttpRequest, form: StartLimitsForm, *, status: int = 200) -> HttpResponse:
    context = {
        "title": "Starts",
        "limits": start_limits(),
        "at_home": True,
        "form": form,
        "rows": StagedStart.objects.exclude(ended_at=None)[:SHOWN_STARTS],
        "events": history_of("start_rules", 1),
        **starting_context(),
    }
    return render(request, "starts/page.html", context, status=status)
