"""Deployments: table, one deployment, create, scale with its plan, delete."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods, require_safe

from exaserve_ops.dashboard.accelerators import asked_words, got_by, mps_words
from exaserve_ops.dashboard.access import actor_of, requires
from exaserve_ops.dashboard.forms import DeleteForm, ScaleForm
from exaserve_ops.dashboard.kept import KeptAnswers
from exaserve_ops.dashboard.listing import list_page
from exaserve_ops.dashboard.plans import PlanPreview, plan_now, preview_deletion, preview_scale
from exaserve_ops.dashboard.problems import title_state
from exaserve_ops.dashboard.reading import (
    BY_NUMBER,
    active_sessions,
    history_of,
    replicas_with_places,
    with_loads,
)
from exaserve_ops.dashboard.simulation import simulated_replicas_of
from exaserve_ops.dashboard.trials import is_kept_from_people, trial_of
from exaserve_ops.dashboard.views.starts import starting_context
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.lifecycle import REPLICA
from exaserve_ops.serving.domain.reconcile import DeploymentSnapshot
from exaserve_ops.serving.domain.sleep import refusal
from exaserve_ops.serving.domain.spread import view_spread
from exaserve_ops.serving.models import Deployment, Model
from exaserve_ops.serving.selectors import deployment_snapshot, live_deployments, serving_as
from exaserve_ops.serving.selectors.rooms import wish_of
from exaserve_ops.serving.services.deployments import (
    delete_deployment,
    update_deployment,
)

SHOWN_LOSSES = 8
CONFLICT = 409

_outlooks: KeptAnswers[dict[str, Any]] = KeptAnswers()
"""By deployment and generation: of a large fleet they take a while, and every viewer asks."""


@require_safe
@requires("serving.view_deployment")
def deployments(request: HttpRequest) -> HttpResponse:
    """Show deployments that are not deleted."""
    models = Model.objects.values_list("name", flat=True)
    listing = list_page(
        request,
        live_deployments().order_by("name"),
        choices={"model": ("Model", "model__name", [(name, name) for name in models])},
        search_in=("name", "served_name"),
        searchable="name or served name",
    )
    rows = _with_simulated(listing.page.object_list)
    failing = sum(bool(row.failed_count) for row in rows)
    context = {
        "title": title_state([(failing, "failing")], "Deployments"),
        "listing": listing,
        "rows": rows,
    }
    return render(request, "deployments/list.html", context)


@require_safe
@requires("serving.view_deployment")
def deployment_row(request: HttpRequest, deployment_id: UUID) -> HttpResponse:
    """Show one row of the table again."""
    found = get_object_or_404(live_deployments(), pk=deployment_id)
    (marked,) = _with_simulated([found])
    return render(request, "deployments/row.html", {"deployment": marked})


@require_safe
@requires("serving.view_deployment")
def deployment(request: HttpRequest, deployment_id: UUID) -> HttpResponse:
    """Show one deployment and its replicas."""
    found: Any = live_deployments().filter(pk=deployment_id).first()
    if found is None:
        found = get_object_or_404(Deployment.objects.select_related("model"), pk=deployment_id)
        found.ready_count = found.kept_count = found.failed_count = 0
        found.standby_ready_count = found.standby_kept_count = found.standby_asleep_count = 0
    _with_simulated([found])
    replicas = replicas_with_places().filter(deployment=deployment_id).order_by(*BY_NUMBER)
    listing = list_page(
        request,
        replicas if request.GET.get("state") else replicas.exclude(status=states.STOPPED),
        choices={"state": ("State", "status", REPLICA.choices)},
        search_in=("name", "node__name", "reason"),
        searchable="name, node or reason",
    )
    context = {
        "title": title_state([(found.failed_count, "failed")], found.name),
        "deployment": found,
        "listing": listing,
        "rows": with_loads(listing.page.object_list, now_seconds=clock.unix_seconds()),
        "namesakes": serving_as(found.served_name).exclude(pk=deployment_id).values_list("pk", "name"),
        "trial": trial_of(found),
        "asked": wish_of(found),
        "asked_words": asked_words(wish_of(found)),
        "mps_words": mps_words(wish_of(found)),
        "why_awake": refusal(found.engine, found.engine_options, nodes=found.nodes_per_replica),
        "events": history_of("deployment", deployment_id),
        **starting_context(found),
        "scale_form": ScaleForm(initial={"replicas": found.replicas, "generation": found.generation}),
    }
    return render(request, "deployments/page.html", context)


@require_safe
@requires("serving.view_deployment")
def deployment_plan(request: HttpRequest, deployment_id: UUID) -> HttpResponse:
    """Show what is done for it now and what is waited for, and what the loss of each domain would cost."""
    found = get_object_or_404(Deployment, pk=deployment_id)
    kept = _outlooks.get((found.pk, found.generation), lambda: _outlook(found))
    context = {**kept.answer, "shown_losses": SHOWN_LOSSES, "found_at": kept.found_at}
    return render(request, "deployments/now.html", context)


@require_http_methods(["GET", "HEAD", "POST"])
@requires("serving.change_deployment")
def deployment_scale(request: HttpRequest, deployment_id: UUID) -> HttpResponse:
    """Show what another number of replicas would do (`?replicas=`), and do it when confirmed."""
    found = get_object_or_404(Deployment, pk=deployment_id)
    if is_kept_from_people(request, found):
        return redirect("deployment", deployment_id)
    if request.method == "POST":
        return _scale(request, found)
    form = ScaleForm({**request.GET.dict(), "generation": found.generation})
    return _scale_page(request, found, form)


@require_http_methods(["GET", "HEAD", "POST"])
@requires("serving.delete_deployment")
def deployment_delete(request: HttpRequest, deployment_id: UUID) -> HttpResponse:
    """Show what deleting would do, and do it when confirmed."""
    found = get_object_or_404(Deployment, pk=deployment_id)
    if is_kept_from_people(request, found):
        return redirect("deployment", deployment_id)
    form = DeleteForm(request.POST or None, initial={"generation": found.generation})
    conflict = ""
    if request.method == "POST" and form.is_valid():
        try:
            delete_deployment(
                deployment_id,
                actor=actor_of(request),
                now=clock.now(),
                expected_generation=form.cleaned_data["generation"],
                reason=form.cleaned_data["reason"],
            )
        except ConflictError as error:
            conflict = str(error)
            form = DeleteForm(initial={"generation": found.generation})
        else:
            messages.success(request, f"{found.name} is being deleted: its replicas drain first.")
            return redirect("deployment", deployment_id)
    now = clock.now()
    context = {
        "title": f"Delete {found.name}",
        "deployment": found,
        "form": form,
        "conflict": conflict,
        "plan": preview_deletion(_snapshot(found), now=now),
    }
    status = CONFLICT if conflict else 200
    return render(request, "deployments/delete.html", context, status=status)


def _outlook(found: Deployment) -> dict[str, Any]:
    snapshot = _snapshot(found)
    return {
        "got": got_by(found.pk, snapshot.request.wish),
        "asked": snapshot.request.wish,
        "asked_words": asked_words(snapshot.request.wish),
        "plan": plan_now(snapshot, now=clock.now()),
        "spread": view_spread(snapshot.nodes, snapshot.request),
    }


def _with_simulated(deployments: Iterable[Deployment]) -> list[Any]:
    """Deployments, each with the number of its replicas on simulated nodes. One query."""
    rows: list[Any] = list(deployments)
    counts = simulated_replicas_of([row.pk for row in rows])
    for row in rows:
        row.simulated_count = counts.get(row.pk, 0)
    return rows


def _scale(request: HttpRequest, found: Deployment) -> HttpResponse:
    form = ScaleForm(request.POST)
    if not form.is_valid():
        return _scale_page(request, found, form)
    wanted = form.cleaned_data
    standbys = found.standbys if wanted["standbys"] is None else wanted["standbys"]
    try:
        update_deployment(
            found.pk,
            {"replicas": wanted["replicas"], "standbys": standbys},
            actor=actor_of(request),
            now=clock.now(),
            expected_generation=wanted["generation"],
            reason=wanted["reason"],
        )
    except ConflictError as error:
        fresh = ScaleForm({**wanted, "generation": found.generation})
        return _scale_page(request, found, fresh, conflict=str(error))
    beside = f", with {standbys} standbys" if standbys else ""
    messages.success(request, f"{found.name} is wanted {wanted['replicas']} times{beside}.")
    return redirect("deployment", found.pk)


def _scale_page(
    request: HttpRequest, found: Deployment, form: ScaleForm, *, conflict: str = ""
) -> HttpResponse:
    plan: PlanPreview | None = None
    if form.is_valid():
        wanted = form.cleaned_data
        plan = preview_scale(
            _snapshot(found), wanted["replicas"], now=clock.now(), standbys=wanted["standbys"]
        )
    context = {
        "title": f"Scale {found.name}",
        "deployment": found,
        "form": form,
        "plan": plan,
        "conflict": conflict,
    }
    status = CONFLICT if conflict else 200 if form.is_valid() else 422
    return render(request, "deployments/scale.html", context, status=status)


def _snapshot(found: Deployment) -> DeploymentSnapshot:
    now = clock.now()
    counts = active_sessions(found.pk, now=now)
    snapshot = deployment_snapshot(found.pk, active_sessions=counts, now=now)
    if snapshot is None:
        raise Http404(f"{found.name} is deleted")
    return snapshot
