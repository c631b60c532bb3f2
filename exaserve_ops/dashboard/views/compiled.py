"""What engines compiled for a model: a part of its weights page."""

from __future__ import annotations

from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.views.decorators.http import require_POST

from exaserve_ops.dashboard.access import actor_of, requires
from exaserve_ops.dashboard.ports import compiled_folder_reader
from exaserve_ops.dashboard.views.weights import show_refused
from exaserve_ops.dashboard.weights_forms import CompiledForm, note_refusal
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import OpsError
from exaserve_ops.serving.models import CompiledSet, Model
from exaserve_ops.serving.services.compiled import COPIES_STAY, register_compiled, remove_compiled


@require_POST
@requires("serving.add_model")
def weights_compiled(request: HttpRequest, model_id: UUID) -> HttpResponse:
    """Register a folder of what an engine compiled."""
    model = get_object_or_404(Model, pk=model_id)
    form = CompiledForm(request.POST)
    if not form.is_valid():
        return show_refused(request, model_id, compiled_form=form)
    asked = form.cleaned_data
    try:
        made = register_compiled(
            model.pk,
            compiled_folder_reader().read(asked["path"]),
            engine=asked["engine"],
            hardware=asked["hardware"],
            origins=asked["origins"],
            actor=actor_of(request),
            now=clock.now(),
            reason=asked["reason"],
        )
    except OpsError as error:
        note_refusal(form, error)
        return show_refused(request, model_id, compiled_form=form)
    where = made.hardware or "any hardware"
    files = "1 file goes" if made.file_count == 1 else f"{made.file_count} files go"
    messages.success(request, f"{files} to nodes with {model.name} and {where}.")
    return redirect("weights_of_model", model_id)


@require_POST
@requires("serving.add_model")
def weights_compiled_remove(request: HttpRequest, model_id: UUID, compiled_id: UUID) -> HttpResponse:
    """Put a set into no more caches."""
    reason = request.POST.get("reason", "").strip()
    if not reason:
        return _wrong(request, model_id, "say why")
    try:
        remove_compiled(model_id, compiled_id, actor=actor_of(request), now=clock.now(), reason=reason)
    except CompiledSet.DoesNotExist:
        return _wrong(request, model_id, "it was removed already")
    messages.success(request, COPIES_STAY)
    return redirect("weights_of_model", model_id)


def _wrong(request: HttpRequest, model_id: UUID, told: str) -> HttpResponse:
    messages.error(request, f"Not done: {told}.")
    return redirect("weights_of_model", model_id)
