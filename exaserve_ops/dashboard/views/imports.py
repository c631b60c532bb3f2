"""Imports of models: asking for one, watching it, trying again, giving up."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from exaserve_ops.dashboard.access import actor_of, requires
from exaserve_ops.dashboard.import_forms import ImportForm
from exaserve_ops.dashboard.listing import list_page
from exaserve_ops.dashboard.reading import history_of
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import InvalidInputError, OpsError
from exaserve_ops.serving.domain.model_import import FAILED, MODEL_IMPORT
from exaserve_ops.serving.models import ModelImport
from exaserve_ops.serving.services.imports import begin_import, cancel_import, retry_import


@require_safe
@requires("serving.view_modelimport")
def imports(request: HttpRequest) -> HttpResponse:
    """Show all imports, the newest first."""
    listing = list_page(
        request,
        ModelImport.objects.select_related("node", "model").order_by("-created_at"),
        choices={"state": ("State", "status", MODEL_IMPORT.choices)},
        search_in=("name", "location", "node__name"),
        searchable="name, address or node",
    )
    context = {"title": "Imports", "listing": listing, "rows": listing.page.object_list}
    return render(request, "imports/list.html", context)


@require_safe
@requires("serving.view_modelimport")
def model_import(request: HttpRequest, import_id: UUID) -> HttpResponse:
    """Show one import as it goes."""
    context = _one(import_id)
    row = context["row"]
    context |= {
        "title": f"{row.get_status_display()} · import of {row.name}",
        "events": history_of("model_import", import_id),
    }
    return render(request, "imports/page.html", context)


@require_safe
@requires("serving.view_modelimport")
def model_import_now(request: HttpRequest, import_id: UUID) -> HttpResponse:
    """Show again how far it is, for the page that is open."""
    return render(request, "imports/progress.html", _one(import_id))


@require_http_methods(["GET", "HEAD", "POST"])
@requires("serving.add_modelimport")
def model_import_new(request: HttpRequest) -> HttpResponse:
    """Show the form of an import, and begin it."""
    form = ImportForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            made = begin_import(
                form.wish(), actor=actor_of(request), now=clock.now(), reason=form.cleaned_data["reason"]
            )
        except InvalidInputError as error:
            field = {"files": "only"}.get(error.field, error.field)
            form.add_error(field if field in form.fields else None, error.message)
        except OpsError as error:
            form.add_error(None, str(error))
        else:
            return redirect("model_import", made.pk)
    context = {"title": "Import a model", "form": form}
    return render(request, "imports/new.html", context, status=422 if form.errors else 200)


@require_POST
@requires("serving.change_modelimport")
def model_import_act(request: HttpRequest, import_id: UUID) -> HttpResponse:
    """Cancel an import, or have it tried again (`act` is `retry`)."""
    get_object_or_404(ModelImport, pk=import_id)
    act = retry_import if request.GET.get("act") == "retry" else cancel_import
    reason = request.POST.get("reason", "").strip()
    if not reason:
        messages.error(request, "Not done: Say why.")
        return redirect("model_import", import_id)
    try:
        act(import_id, actor=actor_of(request), now=clock.now(), reason=reason[:500])
    except OpsError as error:
        messages.error(request, f"Not done: {error}.")
    else:
        messages.success(request, "Done.")
    return redirect("model_import", import_id)


def _one(import_id: UUID) -> dict[str, Any]:
    row = get_object_or_404(ModelImport.objects.select_related("node", "model"), pk=import_id)
    is_open = row.status in MODEL_IMPORT.live
    return {"row": row, "is_open": is_open, "is_moving": is_open and row.status != FAILED}
