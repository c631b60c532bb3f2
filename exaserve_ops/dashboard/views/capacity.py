"""Capacity: what fits on an accelerator, and how many nodes a load needs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import get_object_or_404, render
from django.urls import reverse
from django.views.decorators.http import require_safe

from exaserve_ops.dashboard.access import requires
from exaserve_ops.dashboard.capacity_forms import GIB, CapacityForm
from exaserve_ops.dashboard.ports import live_reader
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.serving.domain.fleet_plan import WorkloadPlan, WorkloadRefusal, plan_fleet, plan_workload
from exaserve_ops.serving.domain.lifecycle import STOPPED
from exaserve_ops.serving.domain.memory_breakdown import breakdown
from exaserve_ops.serving.domain.memory_plan import FITS, TIGHT
from exaserve_ops.serving.domain.reference_points import ReferencePoint, reference_points
from exaserve_ops.serving.models import Deployment
from exaserve_ops.serving.selectors.capacity import CapacityAsk, workload_of
from exaserve_ops.serving.selectors.memory_numbers import memory_of, used_bytes_of

MOST_BESIDE = 6
"""Models beside the one in the form: they travel in the address."""
_NODE_FIELDS = ("accelerator", "memory_gib", "per_node", "spare_percent")
_TONES = {FITS: "good", TIGHT: "warn"}


@require_safe
@requires("serving.view_model")
def capacity(request: HttpRequest) -> HttpResponse:
    """Show the question and, once it is asked, the answer. The address holds the whole question."""
    form = CapacityForm(request.GET)
    beside = request.GET.getlist("with")[:MOST_BESIDE]
    context: dict[str, Any] = {
        "title": "Capacity",
        "form": form,
        "beside": beside,
        "examples": [] if beside else _examples(),
    }
    if form.is_bound and form.is_valid():
        try:
            context |= _answer(form, beside)
            context["add_address"] = _address_with(request.GET, beside)
        except InvalidInputError as error:
            name, _, option = error.field.partition(".")
            form.add_error(name if name in form.fields else None, f"{option}: {error.message}".lstrip(": "))
    return render(request, "capacity/page.html", context)


@require_safe
@requires("serving.view_deployment")
def deployment_memory(request: HttpRequest, deployment_id: UUID) -> HttpResponse:
    """Show what a replica needs, what is reserved for it, and what it is seen to take."""
    found = get_object_or_404(Deployment.objects.select_related("model"), pk=deployment_id)
    rows = found.replica_set.exclude(status=STOPPED).prefetch_related("accelerators").order_by("name")
    nodes = live_reader().read_nodes({str(row.node_id) for row in rows if row.node_id})
    memory = memory_of(found, rows, used_bytes_of(nodes.values(), now_seconds=clock.unix_seconds()))
    tone = _TONES.get(memory.verdict, "bad")
    context = {"deployment": found, "memory": memory, "tone": tone}
    return render(request, "deployments/memory.html", context)


def _answer(form: CapacityForm, beside: Sequence[str]) -> dict[str, Any]:
    """The answer for the model in the form, on nodes that it shares with those `beside` it."""
    kind, now = form.node_kind(), clock.now()
    own = workload_of(form.ask(), now=now)
    others = [workload_of(_ask_beside(text), now=now) for text in beside]
    fleet = plan_fleet([own, *others], kind)
    answer = plan_workload(own, kind)
    plan = answer if isinstance(answer, WorkloadPlan) else None
    refusal = answer if isinstance(answer, WorkloadRefusal) else None
    memory = plan.memory if plan else refusal.memory if refusal else None
    return {
        "fleet": fleet,
        "kind": kind,
        "plan": plan,
        "refusal": refusal,
        "others": fleet.workloads[1 if plan else 0 :],
        "others_refused": fleet.refusals[1 if refusal else 0 :],
        "memory": memory,
        "parts": breakdown(plan, kind.accelerator) if plan else (),
        "tone": _TONES.get(memory.verdict if memory else "", "bad"),
        "groups_per_node": max(1, kind.accelerators // plan.ways) if plan else 0,
        "per_node": plan.per_group * (kind.accelerators // plan.ways) if plan else 0,
        "fixes": plan.fixes if plan else refusal.fixes if refusal else (),
    }


def _ask_beside(text: str) -> CapacityAsk:
    """A model that was asked for before, out of its address. Raises `InvalidInputError`."""
    form = CapacityForm(QueryDict(text))
    if not form.is_bound or not form.is_valid():
        raise InvalidInputError("with", "a model beside this one cannot be read: start over")
    return form.ask()


def _address_with(asked: QueryDict, beside: Sequence[str]) -> str:
    """A form for another model beside those that were asked for, on the same nodes."""
    own = asked.copy()
    own.pop("with", None)
    query: list[tuple[str, str]] = [("with", text) for text in (*beside, own.urlencode())][:MOST_BESIDE]
    query += [(name, value) for name in _NODE_FIELDS if (value := asked.get(name, ""))]
    return f"{reverse('capacity')}?{urlencode(query)}"


def _examples() -> list[tuple[str, str, str]]:
    """Names, words and addresses of the fleets that operators run."""
    return [
        (point.name, f"{point.replicas:,} replicas of {point.workload.model.name}", _address_of(point))
        for point in reference_points()
    ]


def _address_of(point: ReferencePoint) -> str:
    workload, load = point.workload, point.workload.load
    query = {
        "config": json.dumps(dict(workload.model.config)),
        "weights_gib": f"{workload.model.weights_bytes / GIB:.6f}",
        "engine": workload.launch.engine,
        "memory_gib": point.kind.accelerator.total_bytes // GIB,
        "per_node": point.kind.accelerators,
        "prompt_tokens": load.prompt_tokens,
        "output_tokens": load.output_tokens,
        "limit_tokens": load.limit_tokens,
        "requests_per_second": load.requests_per_second,
        "seconds_per_request": workload.rates.seconds_per_request,
        "sequences": workload.sequences,
    }
    return f"{reverse('capacity')}?{urlencode(query)}"
