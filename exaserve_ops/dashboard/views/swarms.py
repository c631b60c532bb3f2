"""How weights go from node to node: parts of the weights pages."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_safe

from exaserve_ops.dashboard.access import requires
from exaserve_ops.dashboard.ports import live_reader
from exaserve_ops.dashboard.swarms import TREE_WORDS, egress_figure, swarm_page
from exaserve_ops.lib import clock
from exaserve_ops.serving.models import Model
from exaserve_ops.serving.selectors.swarms import model_swarm, swarms_since
from exaserve_ops.weights.domain.swarms import SwarmHealth

SHOWN_SECONDS = 3600
"""A swarm that is over is shown among others for so long."""
_COLUMNS = 3


@require_safe
@requires("weights.view_nodeweights")
def weights_swarm_now(request: HttpRequest, model_id: UUID) -> HttpResponse:
    """Show again how a model's weights go from node to node."""
    model = get_object_or_404(Model, pk=model_id)
    return render(request, "weights/swarm.html", swarm_context(model))


@require_safe
@requires("weights.view_nodeweights")
def weights_swarm_figure(request: HttpRequest, model_id: UUID) -> HttpResponse:
    """Answer what the origin gave over time, as a Plotly figure of `?columns=` columns."""
    model = get_object_or_404(Model, pk=model_id)
    columns = {"1": 1, "2": 2}.get(request.GET.get("columns", ""), _COLUMNS)
    health = model_swarm(model, live_reader())
    return JsonResponse(egress_figure(health, columns=columns))


def swarm_context(model: Model) -> dict[str, Any]:
    """What the part of a model's page needs."""
    health = model_swarm(model, live_reader())
    began, ended = health.began_at_seconds, health.ended_at_seconds
    return {
        "model": model,
        "swarm": swarm_page(health),
        "tree_words": TREE_WORDS,
        "took_seconds": None if began is None or ended is None else ended - began,
    }


def swarms_now() -> list[tuple[Model, SwarmHealth, list[float]]]:
    """Each model whose weights go from node to node, or did within the hour; and what left the origin."""
    found = swarms_since(clock.unix_seconds() - SHOWN_SECONDS, live_reader())
    return [
        (model, health, [float(point.origin_bytes) for point in health.points]) for model, health in found
    ]
