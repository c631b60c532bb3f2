"""A new deployment: the form with the options of its engine, and drafts of it out of what was pasted."""

from __future__ import annotations

import hashlib
from typing import Any

from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.text import slugify
from django.views.decorators.http import require_http_methods, require_safe

from exaserve_ops.dashboard.access import actor_of, requires
from exaserve_ops.dashboard.engine_forms import EngineOptionsForm
from exaserve_ops.dashboard.forms import MIB, DeploymentForm, ImportForm
from exaserve_ops.dashboard.plans import PlanPreview, preview_scale
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError, InvalidInputError
from exaserve_ops.serving.domain.accelerator_wish import ANY
from exaserve_ops.serving.domain.launch_import import Draft
from exaserve_ops.serving.domain.launch_words import PasteError
from exaserve_ops.serving.domain.paste_import import read_paste
from exaserve_ops.serving.selectors import deployment_snapshot, serving_as
from exaserve_ops.serving.selectors.drafts import find_model
from exaserve_ops.serving.services.deployments import DeploymentWish, create_deployment
from workers.protocol.confidential import mask

_FORM_FIELDS = {
    "slice_memory_bytes": "slice_memory_mib",
    "mps_memory_bytes": "mps_memory_mib",
    "replica_memory_bytes": "memory_mib",
}
"""What the form calls fields of a wish, where it asks in other units."""


@require_http_methods(["GET", "HEAD", "POST"])
@requires("serving.add_deployment")
def deployment_new(request: HttpRequest) -> HttpResponse:
    """Show the form of a new deployment, what making it would do, and make it when confirmed."""
    form = DeploymentForm(request.POST or None, initial={"model": request.GET.get("model")})
    options = EngineOptionsForm(request.POST.get("engine") or form.first_engine, request.POST or None)
    context: dict[str, Any] = {"title": "New deployment", "form": form, "options": options}
    valid = form.is_valid() and options.is_valid()  # unbound forms are not
    if valid and form.take_options(options.options):
        wish, actor = _wish_of(form.cleaned_data), actor_of(request)
        confirmed = request.POST.get("step") == "create"
        try:
            if confirmed and request.POST.get("planned") == _digest_of(wish):
                made = create_deployment(wish, actor=actor, now=clock.now())
                messages.success(request, f"{made.name} is created; its replicas are being placed.")
                return redirect("deployment", made.pk)
            plan = _plan_of(wish, actor)
            context |= {"plan": plan, "planned": _digest_of(wish), "overtaken": confirmed}
            served_as = wish.served_name or form.cleaned_data["model"].name
            context |= {
                "served_as": served_as,
                "namesakes": serving_as(served_as).values_list("pk", "name"),
            }
        except InvalidInputError as error:
            _show_error(error, form, options)
        except ConflictError as error:
            form.add_error("name", str(error))
    status = 422 if form.errors or options.errors else 200
    return render(request, "deployments/new.html", context, status=status)


def _show_error(error: InvalidInputError, form: DeploymentForm, options: EngineOptionsForm) -> None:
    """Put it beside the field that it is about."""
    name = error.field.removeprefix("engine_options.")
    if name != error.field and name in options.fields:
        options.add_error(name, error.message)
        return
    field = "engine_options" if name != error.field else _FORM_FIELDS.get(error.field, error.field)
    form.add_error(field if field in form.fields else None, error.message)


@require_http_methods(["GET", "HEAD", "POST"])
@requires("serving.add_deployment")
def deployment_import(request: HttpRequest) -> HttpResponse:
    """Read a pasted launch, say what was understood, and show the form filled in with it. Makes nothing."""
    paste = ImportForm(request.POST or None)
    context: dict[str, Any] = {"title": "Import a launch", "paste": paste}
    if paste.is_valid():
        try:
            pasted = read_paste(paste.cleaned_data["text"])
        except PasteError as error:
            # What is wrong is mended in the text, and no secret is needed for that.
            paste = ImportForm({"text": mask(paste.cleaned_data["text"])})
            paste.add_error("text", f"This cannot be read: {error}.")
            context["paste"] = paste
        else:
            context |= _drafted(pasted.drafts, paste.cleaned_data["draft"] or 0)
            # Shown again, to be mended or to choose another draft, and without secrets.
            context["paste"] = ImportForm(initial={"text": pasted.text})
    status = 422 if paste.errors else 200
    return render(request, "deployments/import.html", context, status=status)


def _drafted(drafts: tuple[Draft, ...], chosen: int) -> dict[str, Any]:
    """Drafts, and the form filled in with the chosen one."""
    draft = drafts[min(chosen, len(drafts) - 1)]
    model = find_model(draft)
    initial = {
        "name": slugify(draft.name or draft.served_name or draft.model.rpartition("/")[2])[:60],
        "model": model.pk if model else None,
        "replicas": 1 if draft.replicas is None else draft.replicas,
        "engine": draft.engine,
        "drafted_engine": draft.engine,
        "served_name": draft.served_name,
        "accelerators_per_replica": draft.accelerators,
        "nodes_per_replica": draft.nodes,
        "accelerator": draft.accelerator or ANY,
    }
    form = DeploymentForm(initial=initial)
    return {
        "drafts": drafts,
        "draft": draft,
        "chosen": drafts.index(draft),
        "model": model,
        "form": form,
        "offered": form.offers(draft.engine),
        "options": EngineOptionsForm(draft.engine, initial=draft.options),
    }


@require_safe
@requires("serving.add_deployment")
def deployment_options(request: HttpRequest) -> HttpResponse:
    """Show the options of another engine in the form of a new deployment."""
    options = EngineOptionsForm(request.GET.get("engine", ""))
    return render(request, "deployments/engine_options.html", {"options": options})


def _plan_of(wish: DeploymentWish, actor: str) -> PlanPreview:
    """Plan a deployment that does not exist: make it, look, and take it back.

    So the plan stands on the very record that making it would leave. Raises as `create_deployment` does.
    """
    now = clock.now()
    with transaction.atomic():
        made = create_deployment(wish, actor=actor, now=now)
        snapshot = deployment_snapshot(made.pk, active_sessions={}, now=now)
        transaction.set_rollback(True)
    if snapshot is None:
        raise AssertionError("it was made just now")
    return preview_scale(snapshot, wish.replicas, now=now, standbys=wish.standbys)


def _digest_of(wish: DeploymentWish) -> str:
    """Tells whether what is confirmed is what was planned."""
    return hashlib.sha256(repr(wish).encode()).hexdigest()[:32]


def _wish_of(data: dict[str, Any]) -> DeploymentWish:
    return DeploymentWish(
        name=data["name"],
        model_id=data["model"].pk,
        replicas=data["replicas"],
        engine=data["engine"],
        engine_options=data["engine_options"],
        served_name=data["served_name"],
        nodes=tuple(node.name for node in data["nodes"]),
        replica_memory_bytes=(data["memory_mib"] or 0) * MIB,
        accelerators_per_replica=data["accelerators_per_replica"],
        nodes_per_replica=data["nodes_per_replica"] or 1,
        accelerator=data["accelerator"] or ANY,
        slice_memory_bytes=(data["slice_memory_mib"] or 0) * MIB,
        mps_thread_percent=data["mps_thread_percent"] or 0,
        mps_memory_bytes=(data["mps_memory_mib"] or 0) * MIB,
        drain_seconds=data["drain_seconds"],
        start_seconds=data["start_seconds"] or 0,
        stall_seconds=60 if data["stall_seconds"] is None else data["stall_seconds"],
        standbys=data["standbys"] or 0,
        standbys_sleep=data["standbys_sleep"],
        drain_slow=data["drain_slow"],
        requires_go=data["requires_go"],
        balance_sessions=data["balance_sessions"],
    )
