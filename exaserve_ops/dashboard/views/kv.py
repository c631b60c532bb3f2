"""The KV memory of a node: its part of the node's page, again and again, and other limits for replicas."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from exaserve_ops.audit.models import Event
from exaserve_ops.dashboard.access import actor_of, requires
from exaserve_ops.dashboard.kv import Named, view_kv
from exaserve_ops.dashboard.kv_beyond import kv_beyond
from exaserve_ops.dashboard.ports import live_reader
from exaserve_ops.inventory.models import Node
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError, InvalidInputError
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.services.kv_pools import ASKED, REFUSED, SET, ask_kv_limits
from exaserve_ops.sessions.selectors import count_moved_sessions
from workers.protocol.engines.tables import TABLES

ANSWER_SHOWN = timedelta(minutes=15)
"""How long the last word on changed limits stays beside the map."""
MOVED_SINCE = timedelta(minutes=15)
MOST_BLOCKS = 10**9
_TONES = {ASKED: "info", SET: "success", REFUSED: "error"}


def kv_context(node: Node) -> dict[str, Any]:
    """What the part of the page about KV memory needs."""
    rows = Replica.objects.filter(node=node).exclude(status=states.STOPPED).order_by("name")
    replicas = {str(row.pk): row for row in rows.select_related("release")}
    known = {key: _named(row) for key, row in replicas.items()}
    told = live_reader().read_kv(str(node.pk))
    view = view_kv(told, known)
    now = clock.now()
    return {
        "kv": view,
        "kv_map": json.dumps(
            {"received_at": told["received_at"], "pools": told["pools"]}
            if told
            else {"received_at": None, "pools": []},
            separators=(",", ":"),
        ),
        "kv_names": json.dumps({row.replica_id: {"name": row.label} for row in view.rows}),
        "kv_limited": [row for pool in view.pools for row in pool.rows if row.known],
        "kv_answers": _answers(replicas, now - ANSWER_SHOWN) if replicas else [],
        "kv_moved": count_moved_sessions([row.pk for row in rows], since=now - MOVED_SINCE)
        if replicas
        else 0,
    }


def _named(row: Replica) -> Named:
    engine, options = row.release.engine, row.release.engine_options
    table = TABLES.get(engine)
    return Named(
        row.name,
        reverse("replica", args=[row.pk]),
        table.title if table else engine,
        kv_beyond(engine, options),
    )


def _answers(replicas: dict[str, Replica], since: datetime) -> list[tuple[Event, str]]:
    """The newest word on each replica's limits, with its tone.

    Without what was said before its newest start: by that it has its deployment's limits again.
    """
    events = Event.objects.filter(
        subject_kind="replica", subject_id__in=list(replicas), event__in=_TONES, at__gte=since
    )
    newest: dict[str, Event] = {}
    for event in events.order_by("-pk")[:100]:
        newest.setdefault(event.subject_id, event)
    started = {key: row.ready_at for key, row in replicas.items()}
    return [
        (event, _TONES[event.event])
        for key, event in newest.items()
        if (ready_at := started[key]) is None or event.at >= ready_at
    ]


@require_safe
@requires("inventory.view_node")
def node_kv(request: HttpRequest, node_id: UUID) -> HttpResponse:
    """Show the figures and the table of a node's KV memory again."""
    found = get_object_or_404(Node, pk=node_id)
    return render(request, "nodes/kv_now.html", {"node": found, **kv_context(found)})


@require_POST
@requires("serving.change_replica")
def node_kv_limits(request: HttpRequest, node_id: UUID) -> HttpResponse:
    """Ask the node's agent for other limits of a replica (`replica`, `minimum_blocks`, `ceiling_blocks`)."""
    found = get_object_or_404(Node, pk=node_id)
    back = redirect(reverse("node", args=[node_id]) + "#kv")
    why = request.POST.get("reason", "").strip()[:500]
    numbers = [request.POST.get(name, "").strip() for name in ("minimum_blocks", "ceiling_blocks")]
    if not why:
        messages.error(request, "Say why: the reason is shown to everyone who wonders later.")
        return back
    if not all(number.isdecimal() and len(number) <= len(str(MOST_BLOCKS)) for number in numbers):
        messages.error(request, "Not done: say both limits as whole numbers of blocks.")
        return back
    try:
        ask_kv_limits(
            node_id,
            UUID(request.POST.get("replica", "")),
            minimum_blocks=int(numbers[0]),
            ceiling_blocks=int(numbers[1]),
            reason=why,
            actor=actor_of(request),
            now=clock.now(),
        )
    except (ConflictError, InvalidInputError, ValueError) as error:
        messages.error(request, f"Not done: {str(error).rstrip('.')}.")
    else:
        messages.success(request, f"{found.name} is asked; its answer shows beside the map in a moment.")
    return back
