"""Replicas: table, one replica, drawer, restart and replace."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from http import HTTPStatus
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST, require_safe

from exaserve_ops.dashboard.access import actor_of, requires
from exaserve_ops.dashboard.engine_words import told_of
from exaserve_ops.dashboard.figures import Panel, by_minute, small_multiples
from exaserve_ops.dashboard.listing import list_page
from exaserve_ops.dashboard.ports import live_reader
from exaserve_ops.dashboard.problems import title_state
from exaserve_ops.dashboard.reading import (
    BY_NUMBER,
    history_of,
    leaving_of,
    load_of,
    members_of,
    replicas_with_places,
    sleep_of,
    with_loads,
)
from exaserve_ops.dashboard.replica_logs import shown_log
from exaserve_ops.dashboard.simulation import KINDS
from exaserve_ops.dashboard.trials import trial_of
from exaserve_ops.dashboard.wording import load_words
from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.selectors import nodes_in_service
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.lib.lifecycle import IllegalTransitionError
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.lifecycle import REPLICA
from exaserve_ops.serving.models import Deployment, Replica
from exaserve_ops.serving.services.replicas import replace_replica, restart_replica
from exaserve_ops.sessions.models import InferenceSession
from exaserve_ops.telemetry.selectors import minutes_of

SHOWN_SESSIONS = 10
MAX_LOADS = 200
MAX_NODE_OPTIONS = 100
"""Of a drop-down: a longer one is of use to nobody."""
HISTORY = timedelta(hours=3)
_PARTS = {
    "now": "replicas/now.html",
    "facts": "replicas/facts.html",
    "told": "replicas/told.html",
    "members": "replicas/members.html",
    "exit": "replicas/exit.html",
}
_PANELS = (
    ("KV pool used", "ratio", "kv_used_ratio_max", 1.0),
    ("TTFT p95", "seconds", "ttft_p95_seconds_max", None),
    ("Tokens/s", "tokens_per_second", "generation_tokens_per_second_mean", None),
    ("Running", "requests", "requests_running_mean", None),
    ("Queue", "requests", "requests_waiting_max", None),
    ("Prefix hit rate", "ratio", "prefix_hit_ratio_mean", 1.0),
)


@require_safe
@requires("serving.view_replica")
def replicas(request: HttpRequest) -> HttpResponse:
    """Show replicas; those that have stopped only where asked for."""
    rows = replicas_with_places().order_by("deployment__name", *BY_NUMBER)
    if not request.GET.get("state"):
        rows = rows.exclude(status=states.STOPPED)
    deployments = Deployment.objects.exclude(status=states.DELETED)
    listing = list_page(
        request,
        rows,
        choices={
            "state": ("State", "status", REPLICA.choices),
            "deployment": (
                "Deployment",
                "deployment__name",
                [(n, n) for n in deployments.values_list("name", flat=True)],
            ),
            "node": ("Node", "node__name", _node_options(request.GET.get("node", ""))),
            "simulated": ("Real and simulated", "node__simulated", KINDS),
        },
        search_in=("name", "node__name", "reason", "address"),
        searchable="name, node, reason or address",
    )
    shown = list(listing.page.object_list)
    failed = sum(replica.status == states.FAILED for replica in shown)
    title = title_state([(failed, "failed")], "Replicas")
    rows_with_loads = with_loads(shown, now_seconds=clock.unix_seconds())
    context = {"title": title, "listing": listing, "rows": rows_with_loads}
    return render(request, "replicas/list.html", context)


@require_safe
@requires("serving.view_replica")
def replica_row(request: HttpRequest, replica_id: UUID) -> HttpResponse:
    """Show one row of the table again."""
    found = get_object_or_404(replicas_with_places(), pk=replica_id)
    ((_, load),) = with_loads([found], now_seconds=clock.unix_seconds())
    context = {"replica": found, "load": load, "brief": request.GET.get("brief") == "1"}
    return render(request, "replicas/row.html", context)


@require_safe
@requires("serving.view_replica")
def replica_loads(request: HttpRequest) -> HttpResponse:
    """Answer the loads of replicas (`?ids=`, comma-separated), in the words of the table's cells."""
    ids = [text for text in request.GET.get("ids", "").split(",") if _is_uuid(text)][:MAX_LOADS]
    found = with_loads(Replica.objects.filter(pk__in=ids), now_seconds=clock.unix_seconds())
    return JsonResponse({str(row.pk): load_words(load) for row, load in found})


@require_safe
@requires("serving.view_replica")
def replica_figure(request: HttpRequest, replica_id: UUID) -> HttpResponse:
    """Answer the last hours of one replica, as a Plotly figure of `?columns=` columns."""
    found = get_object_or_404(Replica, pk=replica_id)
    until = clock.now()
    since = until - HISTORY
    minutes = minutes_of(replica_id, since=since)
    panels = []
    for title, unit, field, top in _PANELS if minutes else ():
        known = {row.minute: getattr(row, field) for row in minutes}
        panels.append(Panel(title, unit, (by_minute(found.name, known, since=since, until=until),), top))
    columns = {"1": 1, "2": 2}.get(request.GET.get("columns", ""), 3)
    return JsonResponse(small_multiples(panels, columns=columns))


@require_safe
@requires("serving.view_replica")
def replica(request: HttpRequest, replica_id: UUID) -> HttpResponse:
    """Show one replica."""
    context = _replica_context(replica_id, request.GET.get("member", ""))
    status = HTTPStatus.NOT_FOUND if context["log"].is_unknown else HTTPStatus.OK
    return render(request, "replicas/page.html", context, status=status)


@require_safe
@requires("serving.view_replica")
def replica_drawer(request: HttpRequest, replica_id: UUID) -> HttpResponse:
    """Show one replica in the drawer of the fleet page."""
    return render(request, "replicas/drawer.html", _replica_context(replica_id))


@require_safe
@requires("serving.view_replica")
def replica_state(request: HttpRequest, replica_id: UUID) -> HttpResponse:
    """Show a replica's state again, or the `?part=` of facts, members, its exit or what its engine tells.

    The part `now` is its state together with the badge of its page: the two never say different things.

    Of the exit `?seen=<attempt>` says which is shown already: while that is the last there is nothing new,
    and what somebody reads or marks there is left alone.
    """
    name = request.GET.get("part", "")
    context = _replica_context(replica_id, request.GET.get("member", ""))
    seen = request.GET.get("seen")
    if name == "exit" and seen == str(context["log"].ending.exit_attempt or 0):
        return HttpResponse(status=HTTPStatus.NO_CONTENT)
    return render(request, _PARTS.get(name, "replicas/state.html"), context)


@require_safe
@requires("serving.view_replica")
def replica_why(request: HttpRequest, replica_id: UUID) -> HttpResponse:  # noqa: ARG001 - Django's
    """Answer why a replica is in its state, for the heatmaps: layouts do not carry what changes often."""
    found = get_object_or_404(Replica, pk=replica_id)
    return JsonResponse({"status": found.status, "reason": found.unroutable_reason or found.reason})


@require_POST
@requires("serving.change_replica")
def replica_restart(request: HttpRequest, replica_id: UUID) -> HttpResponse:
    """Start a failed replica afresh."""
    return _act(request, replica_id, restart_replica, "starts afresh")


@require_POST
@requires("serving.change_replica")
def replica_replace(request: HttpRequest, replica_id: UUID) -> HttpResponse:
    """Let a replica go; its deployment makes a new one."""
    return _act(request, replica_id, replace_replica, "is let go; a new one takes its place")


def _node_options(chosen: str) -> list[tuple[str, str]]:
    """Nodes to choose from; of a large fleet only the chosen one, since the search finds the others."""
    nodes = nodes_in_service()
    names = list(nodes.order_by("name").values_list("name", flat=True)[: MAX_NODE_OPTIONS + 1])
    if len(names) > MAX_NODE_OPTIONS:
        names = list(Node.objects.filter(name=chosen).values_list("name", flat=True))
    return [(name, name) for name in names]


def _is_uuid(text: str) -> bool:
    try:
        UUID(text)
    except ValueError:
        return False
    return True


def _act(
    request: HttpRequest, replica_id: UUID, service: Callable[..., Replica], outcome: str
) -> HttpResponse:
    found = get_object_or_404(Replica, pk=replica_id)
    why = request.POST.get("reason", "").strip()
    if not why:
        messages.error(request, "Say why: the reason is shown to everyone who wonders later.")
        return redirect("replica", replica_id)
    try:
        service(replica_id, why=why, actor=actor_of(request), now=clock.now())
    except (ConflictError, IllegalTransitionError) as error:
        messages.error(request, f"Not done: {error}.")
    else:
        messages.success(request, f"{found.name} {outcome}.")
    return redirect("replica", replica_id)


def _replica_context(replica_id: UUID, member: str = "") -> dict[str, Any]:
    found = get_object_or_404(
        Replica.objects.select_related("deployment__model", "release", "node"), pk=replica_id
    )
    telemetry = live_reader().read_node(str(found.node_id)) if found.node_id else None
    live = ((telemetry or {}).get("replicas") or {}).get(str(replica_id)) or {}
    sessions = InferenceSession.objects.filter(replica=replica_id)[:SHOWN_SESSIONS]
    load = load_of(telemetry, replica_id)
    members = members_of(found)
    return {
        "title": f"{found.status.replace('_', ' ')} · {found.name}",
        "replica": found,
        "accelerators": found.accelerators.all(),
        "members": members,
        "log": shown_log(found, members, member),
        "live": live,
        "load": load,
        "told": told_of(load, sleep_of(found)),
        "sessions": sessions,
        "events": history_of("replica", replica_id),
        "leaving": leaving_of(found),
        "trial": trial_of(found.deployment),
        "can_restart": found.status == states.FAILED,
        "can_replace": found.wanted == Replica.Wanted.RUN and found.status != states.STOPPED,
    }
