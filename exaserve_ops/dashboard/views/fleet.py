"""The front page, its parts that refresh by themselves, and the layout of the heatmaps."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import require_safe

from exaserve_ops.audit.models import Event
from exaserve_ops.dashboard.access import requires
from exaserve_ops.dashboard.ports import live_reader
from exaserve_ops.dashboard.problems import count_problems, open_problems, title_state
from exaserve_ops.dashboard.simulation import KINDS, share_of_fleet, simulated_subjects
from exaserve_ops.dashboard.views.starts import starting_context
from exaserve_ops.serving.models import Deployment, Model
from exaserve_ops.telemetry.domain.frames import METRICS

LAST_EVENTS = 12


@require_safe
@requires("inventory.view_node")
def fleet(request: HttpRequest) -> HttpResponse:
    """Show the state of the whole fleet at a glance."""
    dead, failed = count_problems()
    share = share_of_fleet()
    context = {
        "title": title_state([(dead, "dead"), (failed, "failed")], "Fleet"),
        "dead": dead,
        "failed": failed,
        "summary": live_reader().read_summary(),
        "metrics": METRICS,
        "problems": open_problems(),
        "share": share,
        "kinds": ("", *(word for _, word in KINDS)),
        **_last_events(),
        **starting_context(),
        "first_steps": _first_steps(has_nodes=bool(share.total)),
    }
    return render(request, "fleet/page.html", context)


@require_safe
@requires("inventory.view_node")
def fleet_problems(request: HttpRequest) -> HttpResponse:
    """Show the open problems, without the page around them."""
    return render(request, "fleet/problems.html", {"problems": open_problems()})


@require_safe
@requires("audit.view_event")
def fleet_events(request: HttpRequest) -> HttpResponse:
    """Show the last events, without the page around them."""
    return render(request, "fleet/events.html", _last_events())


@require_safe
@gzip_page
@requires("inventory.view_node")
def live_layout(request: HttpRequest) -> HttpResponse:  # noqa: ARG001 - Django's signature
    """Answer the newest layout: over a megabyte for a large fleet, so never sent over a socket."""
    layout = live_reader().read_layout()
    if layout is None:
        return HttpResponse(b"null", content_type="application/json", status=404)
    response = HttpResponse(layout, content_type="application/json")
    response["Cache-Control"] = "private, no-store"
    return response


def _last_events() -> dict[str, Any]:
    events = list(Event.objects.all()[:LAST_EVENTS])
    return {"events": events, "simulated": simulated_subjects(events)}


def _first_steps(*, has_nodes: bool) -> str:
    """What to do first in a fleet with nothing in it: `node`, `model`, `deployment`, or nothing."""
    if not has_nodes:
        return "node"
    kinds = ((Model.objects, "model"), (Deployment.objects, "deployment"))
    return next((name for rows, name in kinds if not rows.exists()), "")
