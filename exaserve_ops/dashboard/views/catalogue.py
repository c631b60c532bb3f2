"""Sessions, events and search: pages that only read."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.urls import reverse
from django.views.decorators.http import require_safe

from exaserve_ops.audit.models import Event
from exaserve_ops.dashboard.access import requires
from exaserve_ops.dashboard.conversation import describe_course
from exaserve_ops.dashboard.listing import list_page
from exaserve_ops.dashboard.ports import gateway_reports
from exaserve_ops.dashboard.problems import PROBLEM_EVENTS
from exaserve_ops.dashboard.simulation import simulated_subjects
from exaserve_ops.inventory.models import Node
from exaserve_ops.lib import clock
from exaserve_ops.serving.models import Deployment, Model, Replica
from exaserve_ops.sessions.domain.timeline import read_stays, read_turns
from exaserve_ops.sessions.models import InferenceSession
from exaserve_ops.sessions.selectors import (
    count_live_sessions,
    replicas_of_timeline,
)
from exaserve_ops.sessions.selectors.moves import latest_relocations, move_targets

FOUND_OF_EACH = 8
_SUBJECTS = (
    "node",
    "deployment",
    "replica",
    "model",
    "api_key",
    "join_token",
    "installation",
    "ssh_host_key",
)


@require_safe
@requires("inference_sessions.view_inferencesession")
def sessions(request: HttpRequest) -> HttpResponse:
    """Show conversations, the latest first."""
    models = Model.objects.values_list("name", flat=True)
    listing = list_page(
        request,
        InferenceSession.objects.select_related("replica__node").order_by("-last_turn_at"),
        choices={"model": ("Model", "model_name", [(name, name) for name in models])},
        search_in=("session_id", "node_name", "replica__name"),
        searchable="session, node or replica",
    )
    context = {
        "title": "Sessions",
        "listing": listing,
        "rows": listing.page.object_list,
        "live": count_live_sessions(clock.now()),
        "gateways": gateway_reports().read(),
    }
    return render(request, "sessions/list.html", context)


@require_safe
@requires("inference_sessions.view_inferencesession")
def session(request: HttpRequest, pk: int) -> HttpResponse:
    """Show one conversation: where it is, and what it used."""
    found = get_object_or_404(
        InferenceSession.objects.select_related("replica__node", "replica__deployment"), pk=pk
    )
    names = {key: replica.name for key, replica in replicas_of_timeline(found).items()}
    course = describe_course(read_turns(found.latest_turns), read_stays(found.stays), names)
    context = {"title": f"Session {found.session_id}", "session": found, "course": course}
    context |= {"moves": latest_relocations(found), "move_targets": move_targets(found)}
    return render(request, "sessions/page.html", context)


@require_safe
@requires("audit.view_event")
def events(request: HttpRequest) -> HttpResponse:
    """Show what happened, the latest first."""
    rows: QuerySet[Event] = Event.objects.order_by("-id")
    only_problems = request.GET.get("show") == "problems"
    if only_problems:
        rows = rows.filter(event__in=PROBLEM_EVENTS)
    subject = request.GET.get("subject", "").strip()
    if subject:
        rows = rows.filter(subject_id=subject)
    listing = list_page(
        request,
        rows,
        choices={"kind": ("Subject", "subject_kind", [(k, k.replace("_", " ")) for k in _SUBJECTS])},
        search_in=("subject_name", "event", "actor", "reason"),
        searchable="subject, event, actor or reason",
        tie="-id",
        also=("show", "subject"),
    )
    shown = list(listing.page.object_list)
    context = {
        "title": "Problem events" if only_problems else "Events",
        "listing": listing,
        "rows": shown,
        "simulated": simulated_subjects(shown),
        "only_problems": only_problems,
        "subject": subject,
    }
    return render(request, "events/list.html", context)


@require_safe
@requires("inventory.view_node")
def search(request: HttpRequest) -> HttpResponse:
    """Find nodes, replicas, deployments, models and sessions by name or id."""
    text = request.GET.get("q", "").replace("\x00", "").strip()  # Postgres takes no NUL
    groups = _find(request, text) if text else []
    context = {"title": f"Search: {text}" if text else "Search", "text": text, "groups": groups}
    template = "search/results.html" if request.headers.get("HX-Request") else "search/page.html"
    return render(request, template, context)


def _find(request: HttpRequest, text: str) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Groups of (name, address, what it is). Only kinds that the user may see."""
    kinds: tuple[tuple[str, str, QuerySet[Any], tuple[str, ...], str], ...] = (
        ("Nodes", "inventory.view_node", Node.objects.all(), ("name", "hostname", "address"), "node"),
        ("Deployments", "serving.view_deployment", Deployment.objects.all(), ("name",), "deployment"),
        ("Replicas", "serving.view_replica", Replica.objects.select_related("node"), ("name",), "replica"),
        ("Models", "serving.view_model", Model.objects.all(), ("name", "digest"), "model"),
        (
            "Sessions",
            "inference_sessions.view_inferencesession",
            InferenceSession.objects.all(),
            ("session_id",),
            "session",
        ),
    )
    groups = []
    for word, permission, rows, fields, page in kinds:
        if not request.user.has_perm(permission):
            continue
        found = rows.filter(_matches(text, fields, by_uuid=page != "session"))[:FOUND_OF_EACH]
        hits = [(str(row), reverse(page, args=[row.pk]), _state_of(row)) for row in found]
        if hits:
            groups.append((word, hits))
    return groups


def _matches(text: str, fields: tuple[str, ...], *, by_uuid: bool) -> Q:
    found = Q()
    for field in fields:
        found |= Q(**{f"{field}__icontains": text})
    if by_uuid and _is_uuid(text):
        found |= Q(pk=text)
    return found


def _is_uuid(text: str) -> bool:
    try:
        UUID(text)
    except ValueError:
        return False
    return True


def _state_of(row: object) -> str:
    state = str(getattr(row, "liveness", "") or getattr(row, "status", "")).replace("_", " ")
    node = getattr(row, "node", row)
    return f"{state}, simulated" if getattr(node, "simulated", False) else state
