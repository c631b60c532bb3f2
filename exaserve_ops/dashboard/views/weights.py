"""Weights on nodes' disks: all models, one model node by node, and its buttons."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import messages
from django.db.models import Case, When
from django.forms import Form
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST, require_safe

from exaserve_ops.dashboard.access import actor_of, requires
from exaserve_ops.dashboard.listing import list_page, page_of_rows
from exaserve_ops.dashboard.ports import live_reader
from exaserve_ops.dashboard.reading import history_of
from exaserve_ops.dashboard.views.swarms import swarm_context, swarms_now
from exaserve_ops.dashboard.weights import (
    LiveOnce,
    in_order_of_need,
    mix_of,
    picture_of,
    policy_words,
    with_names,
)
from exaserve_ops.dashboard.weights_forms import (
    CompiledForm,
    PrewarmForm,
    StorageForm,
    initial_of,
    note_refusal,
)
from exaserve_ops.inventory.models import Node
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import OpsError
from exaserve_ops.serving.models import Model
from exaserve_ops.serving.selectors.compiled import compiled_of
from exaserve_ops.serving.selectors.weights import model_weights
from exaserve_ops.serving.services.weights import (
    change_storage,
    end_prewarm,
    pause_prewarm,
    pause_weights,
    release_weights,
    set_prewarm,
    want_weights,
)
from exaserve_ops.weights.domain.held import ABSENT
from exaserve_ops.weights.domain.wanted import PERSON
from exaserve_ops.weights.models import NodeStore


@require_safe
@requires("weights.view_nodeweights")
def weights(request: HttpRequest) -> HttpResponse:
    """Show which node has which model on its disk, and how full the disks are."""
    return render(request, "weights/list.html", {"title": "Weights", **_all(request)})


@require_safe
@requires("weights.view_nodeweights")
def weights_now(request: HttpRequest) -> HttpResponse:
    """Show the same again, for the page that is open."""
    return render(request, "weights/now.html", _all(request))


def _all(request: HttpRequest) -> dict[str, Any]:
    live = LiveOnce(live_reader().read_nodes)
    models = []
    for model in Model.objects.filter(manifest__isnull=False).order_by("name"):
        found = model_weights(model, live)
        models.append((model, picture_of(found.nodes), policy_words(found.policy), found.policy))
    # Disks that need somebody first: of hundreds nobody would find them.
    usable = Case(When(problem="", then=1), default=0)
    stores = NodeStore.objects.select_related("node").order_by(usable, "node__name")
    return {"models": models, "listing": list_page(request, stores), "swarms": swarms_now()}


@require_safe
@requires("weights.view_nodeweights")
def weights_of_model(request: HttpRequest, model_id: UUID) -> HttpResponse:
    """Show one model node by node, with its rules."""
    return render(request, "weights/page.html", _page(request, model_id))


def show_refused(request: HttpRequest, model_id: UUID, **bound: Form) -> HttpResponse:
    """Show the page again with a form of it as it was sent, and what is wrong beside its fields.

    `bound`: by name in the context of the page.
    """
    context = _page(request, model_id) | bound
    return render(request, "weights/page.html", context, status=422)


def _page(request: HttpRequest, model_id: UUID) -> dict[str, Any]:
    context = _one(request, model_id)
    found = context["found"]
    told = [f"{o.kind} {o.location} {o.secret}".rstrip() for o in found.origins]
    storage = {"storage": found.storage, "origins": "\n".join(told)}
    return context | {
        "title": f"Weights of {context['model'].name}",
        "policy_words": policy_words(found.policy),
        "prewarm_form": PrewarmForm(initial=initial_of(found.policy)),
        "storage_form": StorageForm(initial=storage),
        "compiled": compiled_of(model_id),
        "compiled_form": CompiledForm(),
        "events": history_of("model", model_id),
        **swarm_context(context["model"]),
    }


@require_safe
@requires("weights.view_nodeweights")
def weights_of_model_now(request: HttpRequest, model_id: UUID) -> HttpResponse:
    """Show its nodes again, for the page that is open."""
    return render(request, "weights/nodes.html", _one(request, model_id))


def _one(request: HttpRequest, model_id: UUID) -> dict[str, Any]:
    model = get_object_or_404(Model, pk=model_id)
    found = model_weights(model, live_reader().read_nodes)
    names = {str(row.node_id): row.name for row in found.nodes}
    shown = (with_names(row, names) for row in found.nodes if row.owners or row.state != ABSENT)
    rows = in_order_of_need(shown)
    return {
        "model": model,
        "found": found,
        "picture": picture_of(found.nodes),
        "listing": page_of_rows(request, [(row, mix_of(row)) for row in rows]),
        "others": len(found.nodes) - len(rows),
    }


@require_POST
@requires("weights.add_weightsclaim")
def weights_act(request: HttpRequest, model_id: UUID) -> HttpResponse:
    """Want a model on nodes by hand, give that back, pause it or go on: `act`, `nodes`, `reason`."""
    act, names = request.POST.get("act", ""), request.POST.get("nodes", "").split()
    nodes = Node.objects.filter(name__in=names)
    missing = sorted(set(names) - {node.name for node in nodes})
    reason = request.POST.get("reason", "").strip()
    if not reason or missing or not names:
        told = "Say why." if not reason else f"No node is named {', '.join(missing) or 'so'}."
        messages.error(request, f"Not done: {told}")
        return redirect("weights_of_model", model_id)
    try:
        count = _act(model_id, act, [node.pk for node in nodes], actor=actor_of(request), reason=reason)
    except OpsError as error:
        messages.error(request, f"Not done: {error}.")
    else:
        messages.success(request, f"Done on {count} of {len(names)} nodes; the others were so already.")
    return redirect("weights_of_model", model_id)


def _act(model_id: UUID, act: str, node_ids: list[UUID], *, actor: str, reason: str) -> int:
    now = clock.now()
    if act == "want":
        return want_weights(model_id, node_ids, owner=PERSON, actor=actor, now=now, reason=reason)
    if act == "release":
        return release_weights(model_id, owner=PERSON, actor=actor, now=now, node_ids=node_ids, reason=reason)
    return pause_weights(
        model_id,
        owner=PERSON,
        paused=act == "pause",
        actor=actor,
        now=now,
        node_ids=node_ids,
        reason=reason,
    )


@require_POST
@requires("weights.change_prewarmpolicy")
def weights_prewarm(request: HttpRequest, model_id: UUID) -> HttpResponse:
    """Fetch a model ahead by these rules, or no more (`act` is `end`)."""
    model = get_object_or_404(Model, pk=model_id)
    actor, now = actor_of(request), clock.now()
    if request.POST.get("act") == "end":
        end_prewarm(model_id, actor=actor, now=now, reason=request.POST.get("reason", "").strip())
        messages.success(request, f"{model.name} is not fetched ahead any more.")
        return redirect("weights_of_model", model_id)
    if request.POST.get("act") in {"pause", "resume"}:
        return _pause_prewarm(request, model, paused=request.POST["act"] == "pause")
    form = PrewarmForm(request.POST)
    if not form.is_valid():
        return show_refused(request, model_id, prewarm_form=form)
    try:
        rules = form.rules(model.digest)
        set_prewarm(model_id, rules, actor=actor, now=now, reason=form.cleaned_data["reason"])
    except OpsError as error:
        note_refusal(form, error)
        return show_refused(request, model_id, prewarm_form=form)
    messages.success(request, f"{model.name} is fetched ahead by these rules from now on.")
    return redirect("weights_of_model", model_id)


def _pause_prewarm(request: HttpRequest, model: Model, *, paused: bool) -> HttpResponse:
    reason = request.POST.get("reason", "").strip()[:500]
    try:
        pause_prewarm(model.pk, paused=paused, actor=actor_of(request), now=clock.now(), reason=reason)
    except OpsError as error:
        return _wrong(request, model.pk, str(error))
    told = "is paused; what is there stays" if paused else "goes on by its rules"
    messages.success(request, f"Fetching {model.name} ahead {told}.")
    return redirect("weights_of_model", model.pk)


@require_POST
@requires("serving.change_model")
def weights_storage(request: HttpRequest, model_id: UUID) -> HttpResponse:
    """Say what replicas start from, and where nodes fetch it."""
    form = StorageForm(request.POST)
    if not form.is_valid():
        return show_refused(request, model_id, storage_form=form)
    try:
        model = change_storage(
            model_id,
            storage=form.cleaned_data["storage"],
            origins=form.cleaned_data["origins"],
            actor=actor_of(request),
            now=clock.now(),
            reason=form.cleaned_data["reason"],
        )
    except OpsError as error:
        note_refusal(form, error)
        return show_refused(request, model_id, storage_form=form)
    messages.success(request, f"Replicas of {model.name} start from {model.get_storage_display()}.")
    return redirect("weights_of_model", model_id)


def _wrong(request: HttpRequest, model_id: UUID, told: str) -> HttpResponse:
    messages.error(request, f"Not done: {told}.")
    return redirect("weights_of_model", model_id)
