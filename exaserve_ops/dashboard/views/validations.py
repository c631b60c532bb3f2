"""Validations: the list, one report as it grows, asking for one, and ending one."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from exaserve_ops.dashboard.access import actor_of, requires
from exaserve_ops.dashboard.listing import list_page
from exaserve_ops.dashboard.problems import title_state
from exaserve_ops.dashboard.reading import history_of
from exaserve_ops.dashboard.validation_forms import ValidationForm, wish_of
from exaserve_ops.dashboard.validations import curves_figure, groups_of, searches_of
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import InvalidInputError, OpsError
from exaserve_ops.lib.lifecycle import IllegalTransitionError
from exaserve_ops.serving.models import Model
from exaserve_ops.validation.domain.lifecycle import RUNNING, VALIDATION
from exaserve_ops.validation.models import Validation
from exaserve_ops.validation.selectors import counted_validations, validations_with_model
from exaserve_ops.validation.services import ask_validation, cancel_validation

SHOWN_OF_MODEL = 5


@require_safe
@requires("validation.view_validation")
def validations(request: HttpRequest) -> HttpResponse:
    """Show all validations, the newest first."""
    listing = list_page(
        request,
        counted_validations().order_by("-created_at"),
        choices={"state": ("State", "status", VALIDATION.choices)},
        search_in=("model__name", "reason", "asked_by"),
        searchable="model, reason or who asked",
    )
    running = Validation.objects.filter(status=RUNNING).count()
    context = {
        "title": title_state([(running, "running")], "Validations"),
        "listing": listing,
        "rows": list(listing.page.object_list),
    }
    return render(request, "validations/list.html", context)


@require_safe
@requires("validation.view_validation")
def validation(request: HttpRequest, validation_id: UUID) -> HttpResponse:
    """Show the report of one validation."""
    found = get_object_or_404(validations_with_model(), pk=validation_id)
    context = {
        **_progress(found),
        "title": f"{found.get_status_display()} · {found}",
        "events": history_of("validation", validation_id),
    }
    return render(request, "validations/page.html", context)


@require_safe
@requires("validation.view_validation")
def validation_progress(request: HttpRequest, validation_id: UUID) -> HttpResponse:
    """Show again what its checks found so far."""
    found = get_object_or_404(validations_with_model(), pk=validation_id)
    return render(request, "validations/progress.html", _progress(found))


@require_safe
@requires("validation.view_validation")
def validation_figure(request: HttpRequest, validation_id: UUID) -> HttpResponse:
    """Answer the curves of its ramps, as a Plotly figure of `?columns=` columns."""
    found = get_object_or_404(Validation, pk=validation_id)
    columns = 1 if request.GET.get("columns") == "1" else 2
    return JsonResponse(curves_figure(found.checks.all(), columns=columns))


@require_safe
@requires("validation.view_validation")
def model_validations(request: HttpRequest, model_id: UUID) -> HttpResponse:
    """Show a model's latest validations."""
    found = get_object_or_404(Model, pk=model_id)
    latest = counted_validations().filter(model=found).order_by("-created_at")[:SHOWN_OF_MODEL]
    return render(request, "validations/of_model.html", {"model": found, "latest": latest})


@require_http_methods(["GET", "HEAD", "POST"])
@requires("validation.add_validation")
def validation_new(request: HttpRequest, model_id: UUID) -> HttpResponse:
    """Show the form, and have the model validated."""
    found = get_object_or_404(Model, pk=model_id)
    form = ValidationForm(request.POST or None, initial={"engines": ["torch"]})
    if request.method == "POST" and form.is_valid():
        wish = wish_of(found, form.cleaned_data)
        try:
            made = ask_validation(
                wish, reason=form.cleaned_data["reason"], actor=actor_of(request), now=clock.now()
            )
        except InvalidInputError as error:
            name = error.field.partition(".")[0].replace("replica_memory_bytes", "memory_mib")
            form.add_error(name if name in form.fields else None, error.message)
        except OpsError as error:
            form.add_error(None, str(error))
        else:
            return redirect("validation", made.pk)
    context = {"title": f"Validate {found.name}", "model": found, "form": form}
    return render(request, "validations/new.html", context, status=422 if form.errors else 200)


@require_POST
@requires("validation.change_validation")
def validation_cancel(request: HttpRequest, validation_id: UUID) -> HttpResponse:
    """End it before its last check."""
    found = get_object_or_404(Validation, pk=validation_id)
    try:
        why = request.POST.get("reason", "")
        cancel_validation(found.pk, reason=why, actor=actor_of(request), now=clock.now())
    except (OpsError, IllegalTransitionError) as error:
        messages.error(request, f"Not done: {error}.")
    else:
        messages.success(request, "Cancelled. What it runs is cleared away.")
    return redirect("validation", validation_id)


def _progress(found: Validation) -> dict[str, Any]:
    checks = list(found.checks.order_by("position"))
    groups = groups_of(checks)
    return {
        "validation": found,
        "is_live": found.status in VALIDATION.live,
        "groups": groups,
        "searches": searches_of(checks),
        "done": sum(group.done for group in groups),
        "total": sum(len(group.rows) for group in groups),
    }
