"""Models: table, one model, register."""

from __future__ import annotations

from uuid import UUID

from django.contrib import messages
from django.db.models import Count, Q
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods, require_safe

from exaserve_ops.dashboard.access import actor_of, requires
from exaserve_ops.dashboard.forms import ModelForm
from exaserve_ops.dashboard.listing import list_page
from exaserve_ops.dashboard.ports import model_folder_reader
from exaserve_ops.dashboard.reading import history_of
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError, InvalidInputError
from exaserve_ops.serving.domain.kv_bytes import kv_bytes_of
from exaserve_ops.serving.domain.kv_layout import UnknownLayout
from exaserve_ops.serving.domain.lifecycle import DELETED
from exaserve_ops.serving.models import Model
from exaserve_ops.serving.selectors import live_deployments
from exaserve_ops.serving.services.models import FolderReading, register_model


@require_safe
@requires("serving.view_model")
def models(request: HttpRequest) -> HttpResponse:
    """Show registered models."""
    live = ~Q(deployments__status=DELETED) & Q(deployments__isnull=False)
    rows = Model.objects.annotate(deployment_count=Count("deployments", live)).order_by("name")
    listing = list_page(
        request, rows, search_in=("name", "digest", "source"), searchable="name, digest or folder"
    )
    context = {"title": "Models", "listing": listing, "rows": listing.page.object_list}
    return render(request, "models/list.html", context)


@require_safe
@requires("serving.view_model")
def model(request: HttpRequest, model_id: UUID) -> HttpResponse:
    """Show one model: what it needs, its files, who serves it."""
    found = get_object_or_404(Model, pk=model_id)
    kv = kv_bytes_of(found.planning_config)
    context = {
        "title": found.name,
        "model": found,
        "kv": kv,
        "kv_unknown": kv.summary() if isinstance(kv, UnknownLayout) else "",
        "files": found.files.all(),
        "deployments": live_deployments().filter(model=model_id),
        "events": history_of("model", model_id),
    }
    return render(request, "models/page.html", context)


@require_http_methods(["GET", "HEAD", "POST"])
@requires("serving.add_model")
def model_new(request: HttpRequest) -> HttpResponse:
    """Show the form of a new model, read its folder and record it."""
    form = ModelForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            facts = model_folder_reader().read(form.cleaned_data["path"])
            if isinstance(facts, FolderReading):
                return _reading_page(request, form, facts)
            made = register_model(
                name=form.cleaned_data["name"],
                facts=facts,
                actor=actor_of(request),
                now=clock.now(),
            )
        except InvalidInputError as error:
            form.add_error(error.field if error.field in form.fields else "path", error.message)
        except ConflictError as error:
            form.add_error("name", str(error))
        else:
            messages.success(request, f"{made.name} is registered.")
            return redirect("model", made.pk)
    status = 422 if form.errors else 200
    context = {"title": "Register a model", "form": form}
    return render(request, "models/new.html", context, status=status)


def _reading_page(request: HttpRequest, form: ModelForm, reading: FolderReading) -> HttpResponse:
    """Show how far it is; the page asks again by itself, with the same form."""
    context = {"title": f"Reading {form.cleaned_data['name']}", "form": form, "reading": reading}
    return render(request, "models/reading.html", context, status=202)
