"""Nodes: table, one node, cordon."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
from django.contrib import messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from exaserve_ops.dashboard.access import actor_of, requires
from exaserve_ops.dashboard.figures import Panel, by_minute, small_multiples
from exaserve_ops.dashboard.hardware import hardware_of
from exaserve_ops.dashboard.installation_forms import JoinTokenForm
from exaserve_ops.dashboard.listing import list_page
from exaserve_ops.dashboard.machine import DEFAULT_RANGE, RANGES, cards_now, has_nvlink, machine_rows
from exaserve_ops.dashboard.ports import live_reader
from exaserve_ops.dashboard.problems import title_state
from exaserve_ops.dashboard.reading import (
    drain_of,
    history_of,
    load_of,
    minutes_of,
    nodes_with_counts,
    replicas_with_places,
)
from exaserve_ops.dashboard.simulation import KINDS
from exaserve_ops.dashboard.views.kv import kv_context
from exaserve_ops.inventory.domain.liveness import DEAD, NODE_LIVENESS, RETIRED, SUSPECT
from exaserve_ops.inventory.models import Accelerator, FailureDomain, Node
from exaserve_ops.inventory.selectors import installation_of_node, rack_of
from exaserve_ops.inventory.services import cordon_node, create_join_token, uncordon_node
from exaserve_ops.inventory.services.leftovers import ask_process_end
from exaserve_ops.inventory.services.quarantine import lift_quarantine
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.selectors.members import on_node
from exaserve_ops.serving.services.replicas import retire_lost_node
from exaserve_ops.telemetry.selectors import history_of_node

HISTORY = timedelta(hours=1)
_PANELS = (
    ("KV pool used", "ratio", "kv_used_ratio_max", 1.0),
    ("TTFT p95", "seconds", "ttft_p95_seconds_max", None),
    ("Queue", "requests", "requests_waiting_max", None),
    ("Tokens/s", "tokens_per_second", "generation_tokens_per_second_mean", None),
)


@require_safe
@requires("inventory.view_node")
def nodes(request: HttpRequest) -> HttpResponse:
    """Show all nodes."""
    racks = FailureDomain.objects.filter(kind=FailureDomain.Kind.RACK)
    rack_options = [(name, name) for name in racks.values_list("name", flat=True)]
    listing = list_page(
        request,
        _shown_nodes(request).order_by("name"),
        choices={
            "state": ("State", "liveness", NODE_LIVENESS.choices),
            "rack": ("Rack", "failure_domain__parent__name", rack_options),
            "cordoned": ("Cordoned", "cordoned", [("True", "yes"), ("False", "no")]),
            "simulated": ("Real and simulated", "simulated", KINDS),
        },
        search_in=("name", "hostname", "address"),
        searchable="name, host or address",
    )
    rows = list(listing.page.object_list)
    dead = sum(node.liveness == DEAD for node in rows)
    suspect = sum(node.liveness == SUSPECT for node in rows)
    title = title_state([(dead, "dead"), (suspect, "suspect")], "Nodes")
    context = {"title": title, "listing": listing, "rows": [(n, rack_of(n)) for n in rows]}
    return render(request, "nodes/list.html", context)


def _shown_nodes(request: HttpRequest) -> QuerySet[Node]:
    """Retired nodes are history: they are listed when somebody asks for that state."""
    rows = nodes_with_counts()
    return rows if request.GET.get("state") == RETIRED else rows.exclude(liveness=RETIRED)


@require_safe
@requires("inventory.view_node")
def node_row(request: HttpRequest, node_id: UUID) -> HttpResponse:
    """Show one row of the table again."""
    node = get_object_or_404(nodes_with_counts(), pk=node_id)
    return render(request, "nodes/row.html", {"node": node, "rack": rack_of(node)})


@require_safe
@requires("inventory.view_node")
def node(request: HttpRequest, node_id: UUID) -> HttpResponse:
    """Show one node."""
    found = get_object_or_404(nodes_with_counts(), pk=node_id)
    telemetry = live_reader().read_node(str(node_id))
    replicas = replicas_with_places().filter(on_node(node_id)).exclude(status=states.STOPPED)
    context = {
        "title": f"{found.liveness} · {found.name}",
        "node": found,
        "rack": rack_of(found),
        "telemetry": telemetry,
        **_host_context(telemetry),
        "range": _range_of(request),
        "ranges": [(key, words) for key, (words, _, _) in RANGES.items()],
        **hardware_of(found),
        "rows": [(replica, load_of(telemetry, replica.pk)) for replica in replicas],
        "events": history_of("node", node_id),
        "installation": installation_of_node(node_id),
        "drain": drain_of(found),
        **kv_context(found),
    }
    return render(request, "nodes/page.html", context)


@require_safe
@requires("inventory.view_node")
def node_host(request: HttpRequest, node_id: UUID) -> HttpResponse:
    """Show the host's figures again."""
    return render(request, "nodes/host.html", _host_context(live_reader().read_node(str(node_id))))


def _host_context(telemetry: dict[str, Any] | None) -> dict[str, Any]:
    told = telemetry or {}
    return {
        "telemetry": telemetry,
        "host": told.get("host") or {},
        "card_loads": cards_now(told.get("accelerators") or ()),
    }


def _range_of(request: HttpRequest) -> str:
    asked = request.GET.get("range", "")
    return asked if asked in RANGES else DEFAULT_RANGE


@require_safe
@requires("inventory.view_node")
def node_machine(request: HttpRequest, node_id: UUID) -> HttpResponse:
    """Answer what the machine and its replicas did over `?range=`, as rows over one time axis."""
    found = get_object_or_404(Node, pk=node_id)
    _, length, step = RANGES[_range_of(request)]
    now = clock.now()
    history = history_of_node(found.pk, since=now - length, until=now, step=step)
    loads = (live_reader().read_node(str(node_id)) or {}).get("accelerators") or ()
    has_cards = found.accelerators.exclude(kind="cpu").exists()
    return JsonResponse(machine_rows(history, has_cards=has_cards, has_nvlink=has_nvlink(loads)))


@require_safe
@requires("inventory.view_node")
def node_figure(request: HttpRequest, node_id: UUID) -> HttpResponse:
    """Answer the last hour of the node's replicas, as a Plotly figure of `?columns=` columns."""
    live = replicas_with_places().filter(on_node(node_id)).exclude(status=states.STOPPED)
    names = dict(live.values_list("pk", "name"))
    now = clock.now()
    minutes = minutes_of(list(names), since=now - HISTORY)
    panels = [
        Panel(
            title,
            unit,
            tuple(
                by_minute(
                    names[pk],
                    {row.minute: getattr(row, field) for row in rows},
                    since=now - HISTORY,
                    until=now,
                )
                for pk, rows in minutes.items()
                if rows
            ),
            top,
        )
        for title, unit, field, top in _PANELS
    ]
    columns = {"1": 1, "2": 2}.get(request.GET.get("columns", ""), len(panels))
    return JsonResponse(small_multiples(panels, columns=columns))


@require_POST
@requires("inventory.change_node")
def node_lift_quarantine(request: HttpRequest, node_id: UUID) -> HttpResponse:
    """Let one accelerator of the node (`accelerator`) take replicas again."""
    found = get_object_or_404(Accelerator, pk=request.POST.get("accelerator", ""), node=node_id)
    why = request.POST.get("reason", "").strip()
    if not why:
        messages.error(request, "Say why: the reason is shown to everyone who wonders later.")
        return redirect("node", node_id)
    try:
        lift_quarantine(found.pk, reason=why, actor=actor_of(request), now=clock.now())
    except ConflictError as error:
        messages.error(request, f"Not done: {error}.")
    else:
        messages.success(request, f"{found} takes replicas again.")
    return redirect("node", node_id)


@require_POST
@requires("inventory.end_process")
def node_end_process(request: HttpRequest, node_id: UUID) -> HttpResponse:
    """Have the agent end a process that it left behind (`pid`, `start_ticks`)."""
    found = get_object_or_404(Node, pk=node_id)
    why = request.POST.get("reason", "").strip()
    pid, ticks = (request.POST.get(name, "") for name in ("pid", "start_ticks"))
    if not why or not (pid.isdecimal() and ticks.isdecimal()):
        messages.error(request, "Say why: the reason is shown to everyone who wonders later.")
        return redirect("node", node_id)
    try:
        ask_process_end(
            node_id,
            pid=int(pid),
            start_ticks=int(ticks),
            reason=why,
            actor=actor_of(request),
            now=clock.now(),
        )
    except ConflictError as error:
        messages.error(request, f"Not done: {error}.")
    else:
        messages.success(
            request, f"{found.name} is asked to end process {pid}; its history says how that went."
        )
    return redirect("node", node_id)


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@requires("inventory.add_jointoken")
def node_join(request: HttpRequest) -> HttpResponse:
    """Show the ways to add a node; make a token, and show it with its command, this once."""
    form = JoinTokenForm(request.POST if request.method == "POST" else None)
    context = {"title": "Add a node", "form": form, "public_url": settings.ENV.public_url}
    if request.method == "POST" and form.is_valid():
        token, text = create_join_token(
            actor=actor_of(request),
            now=clock.now(),
            note=form.cleaned_data["note"] or "from the Nodes page",
            lifetime=timedelta(hours=int(form.cleaned_data["hours"] or 1)),
            max_uses=form.cleaned_data["uses"] or 1,
        )
        context |= {"token": token, "token_text": text, "form": JoinTokenForm()}
    return render(request, "nodes/join.html", context, status=422 if form.errors else 200)


@require_POST
@requires("inventory.change_node")
def node_cordon(request: HttpRequest, node_id: UUID) -> HttpResponse:
    """Place nothing new on the node."""
    found = get_object_or_404(Node, pk=node_id)
    reason = request.POST.get("reason", "").strip()
    if not reason:
        messages.error(request, "Say why: the reason is shown to everyone who wonders later.")
        return redirect("node", node_id)
    cordon_node(node_id, reason=reason, actor=actor_of(request), now=clock.now())
    messages.success(request, f"{found.name} is cordoned. What runs there keeps running.")
    return redirect("node", node_id)


@require_POST
@requires("inventory.delete_node")
def node_retire(request: HttpRequest, node_id: UUID) -> HttpResponse:
    """Take a dead node out for good."""
    found = get_object_or_404(Node, pk=node_id)
    reason = request.POST.get("reason", "").strip()
    if not reason:
        messages.error(request, "Say why: the reason is shown to everyone who wonders later.")
        return redirect("node", node_id)
    try:
        retire_lost_node(node_id, reason=reason, actor=actor_of(request), now=clock.now())
    except ConflictError as error:
        messages.error(request, f"Not done: {error}.")
    else:
        messages.success(request, f"{found.name} is retired. Its name is free for another node.")
    return redirect("node", node_id)


@require_POST
@requires("inventory.change_node")
def node_uncordon(request: HttpRequest, node_id: UUID) -> HttpResponse:
    """Let the node take new replicas again."""
    found = get_object_or_404(Node, pk=node_id)
    try:
        uncordon_node(node_id, actor=actor_of(request), now=clock.now())
    except ConflictError as error:
        messages.error(request, f"Not done: {error}.")
    else:
        messages.success(request, f"{found.name} takes new replicas again.")
    return redirect("node", node_id)
