"""Rollouts: the list, one rollout as it goes, its buttons, and asking for one with its plan."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import messages
from django.db.models import Count, Q
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from exaserve_ops.dashboard.access import actor_of, requires
from exaserve_ops.dashboard.listing import list_page
from exaserve_ops.dashboard.problems import title_state
from exaserve_ops.dashboard.reading import history_of
from exaserve_ops.dashboard.rollout_forms import RolloutForms, policy_of, wish_of
from exaserve_ops.dashboard.rollouts import (
    Seat,
    buttons_of,
    cells_of,
    state_of_member,
    told_of,
    ttft_figure,
)
from exaserve_ops.dashboard.simulation import simulated_replicas_of
from exaserve_ops.dashboard.trials import is_kept_from_people
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError, DeniedError, InvalidInputError, OpsError, StaleError
from exaserve_ops.lib.lifecycle import IllegalTransitionError
from exaserve_ops.rollouts.domain.gates import Answers
from exaserve_ops.rollouts.domain.lifecycle import HALTED, PAUSED, PLANNED, ROLLOUT
from exaserve_ops.rollouts.models import Rollout, Wave
from exaserve_ops.rollouts.selectors import answers_of, rollouts_with_releases
from exaserve_ops.rollouts.services.rollouts import (
    act_on_rollout,
    checked_policy,
    create_rollout,
    preview_rollout,
)
from exaserve_ops.serving.domain.lifecycle import ACTIVE, STOPPED
from exaserve_ops.serving.models import Deployment, Replica

CONFLICT = 409
SHOWN_PLANNED_WAVES = 40
SHOWN_RELEASES = 5
_ASKS = (PLANNED, PAUSED, HALTED)
"""Statuses that wait for a person."""


@require_safe
@requires("rollouts.view_rollout")
def rollouts(request: HttpRequest) -> HttpResponse:
    """Show all rollouts, the newest first."""
    listing = list_page(
        request,
        rollouts_with_releases().order_by("-created_at"),
        choices={"state": ("State", "status", ROLLOUT.choices)},
        search_in=("deployment__name", "reason", "asked_by"),
        searchable="deployment, reason or who asked",
    )
    waiting = Rollout.objects.filter(status__in=_ASKS).count()
    context = {
        "title": title_state([(waiting, "waiting")], "Rollouts"),
        "listing": listing,
        "rows": _with_counts(list(listing.page.object_list)),
    }
    return render(request, "rollouts/list.html", context)


@require_safe
@requires("rollouts.view_rollout")
def rollout(request: HttpRequest, rollout_id: UUID) -> HttpResponse:
    """Show one rollout."""
    found = get_object_or_404(rollouts_with_releases(), pk=rollout_id)
    context = {
        **_progress(request, found),
        "title": f"{found.get_status_display()} · {found}",
        "events": history_of("rollout", rollout_id),
    }
    return render(request, "rollouts/page.html", context)


@require_safe
@requires("rollouts.view_rollout")
def rollout_progress(request: HttpRequest, rollout_id: UUID) -> HttpResponse:
    """Show again how far it is."""
    found = get_object_or_404(rollouts_with_releases(), pk=rollout_id)
    return render(request, "rollouts/progress.html", _progress(request, found))


@require_safe
@requires("rollouts.view_rollout")
def rollout_figure(request: HttpRequest, rollout_id: UUID) -> HttpResponse:  # noqa: ARG001 - Django's signature
    """Answer both releases' times to first token since it began, as a Plotly figure."""
    found = get_object_or_404(rollouts_with_releases(), pk=rollout_id)
    answers = answers_of(found, since=found.created_at)
    pairs = ((found.from_release, "old"), (found.to_release, "new"))
    by_release = {
        f"release {release.number} ({word})": answers.get(release.pk, Answers()).all_ttft
        for release, word in pairs
    }
    return JsonResponse(ttft_figure(by_release))


@require_safe
@requires("rollouts.view_rollout")
def deployment_rollouts(request: HttpRequest, deployment_id: UUID) -> HttpResponse:
    """Show a deployment's releases with how many replicas run each, and its latest rollouts."""
    found = get_object_or_404(Deployment, pk=deployment_id)
    kept = Q(replicas__wanted=Replica.Wanted.RUN) & ~Q(replicas__status=STOPPED)
    releases = found.releases.select_related("model").annotate(kept_count=Count("replicas", kept))
    context = {
        "deployment": found,
        "releases": releases.order_by("-number")[:SHOWN_RELEASES],
        "latest": rollouts_with_releases().filter(deployment=found).order_by("-created_at")[:SHOWN_RELEASES],
    }
    return render(request, "rollouts/of_deployment.html", context)


@require_POST
@requires("rollouts.view_rollout")
def rollout_act(request: HttpRequest, rollout_id: UUID) -> HttpResponse:
    """Do what a button says; each button has its permission."""
    found = get_object_or_404(Rollout, pk=rollout_id)
    act = request.POST.get("act") or request.GET.get("act", "")
    if act not in {b.act for b in buttons_of(found.status, request.user.get_all_permissions())}:
        messages.error(request, f"Not done: it is {found.get_status_display()}, or you may not.")
        return redirect("rollout", rollout_id)
    try:
        why = request.POST.get("reason", "")
        act_on_rollout(rollout_id, act, actor=actor_of(request), now=clock.now(), reason=why)
    except (InvalidInputError, ConflictError, DeniedError, IllegalTransitionError) as error:
        messages.error(request, f"Not done: {error}.")
    else:
        messages.success(request, "Done.")
    return redirect("rollout", rollout_id)


@require_http_methods(["GET", "HEAD", "POST"])
@requires("rollouts.add_rollout")
def rollout_new(request: HttpRequest, deployment_id: UUID) -> HttpResponse:
    """Show the form of a rollout, what it would do, and begin it when that is confirmed."""
    found = get_object_or_404(Deployment.objects.select_related("model"), pk=deployment_id)
    if is_kept_from_people(request, found):
        return redirect("deployment", deployment_id)
    forms = RolloutForms.of(found, request.POST or None)
    context: dict[str, Any] = {
        "title": f"Roll out {found.name}",
        "deployment": found,
        "form": forms.wish,
        "options": forms.options,
    }
    if request.method == "POST" and forms.is_valid():
        try:
            made = _plan_or_begin(request, found, forms.wish.cleaned_data, context)
        except InvalidInputError as error:
            forms.show_error(error.field, error.message)
        except OpsError as error:
            forms.wish.add_error(None, str(error))
        else:
            if made is not None:
                return redirect("rollout", made.pk)
    return render(request, "rollouts/new.html", context, status=422 if forms.has_errors else 200)


def _plan_or_begin(
    request: HttpRequest, found: Deployment, data: dict[str, Any], context: dict[str, Any]
) -> Rollout | None:
    """Begin what was confirmed; else put the plan of what is asked for now into the page."""
    wish, policy = wish_of(data), checked_policy(policy_of(data))
    actor, now = actor_of(request), clock.now()
    confirmed = request.POST.get("planned", "") if request.POST.get("step") == "begin" else ""
    if confirmed:
        try:
            return create_rollout(
                found.pk, wish, policy, reason=data["reason"], confirmed=confirmed, actor=actor, now=now
            )
        except StaleError:
            context["overtaken"] = True
    plan = preview_rollout(found.pk, wish, policy, actor=actor, now=now)
    shown = plan.waves[:SHOWN_PLANNED_WAVES]
    context |= {"plan": plan, "shown_waves": shown, "more_waves": len(plan.waves) - len(shown)}
    return None


def _progress(request: HttpRequest, found: Rollout) -> dict[str, Any]:
    waves = list(found.waves.prefetch_related("members__replica__node"))
    current = next((wave for wave in waves if wave.status != "passed"), None)
    answers = answers_of(found, since=found.created_at)
    pairs = ((found.from_release, "old"), (found.to_release, "new"))
    return {
        "rollout": found,
        "is_live": found.status in ROLLOUT.live,
        "asks": found.status in _ASKS,
        "current": current,
        "waves": _with_cells(found, waves),
        "told": [
            told_of(f"release {release.number} ({word})", answers.get(release.pk, Answers()))
            for release, word in pairs
        ],
        "buttons": buttons_of(found.status, request.user.get_all_permissions()),
        "may_end": found.deployment.status == ACTIVE,
        "simulated": simulated_replicas_of([found.deployment_id]).get(found.deployment_id, 0),
    }


def _with_cells(found: Rollout, waves: list[Wave]) -> list[dict[str, Any]]:
    members = [member.replica for wave in waves for member in wave.members.all()]
    rows = Replica.objects.filter(replaces__in=members, release=found.to_release_id).order_by("created_at")
    successors = {row[0]: row for row in rows.values_list("replaces", "status", "wanted")}
    shown = []
    for wave in waves:
        seats = [_seat(member.replica, successors.get(member.replica_id)) for member in wave.members.all()]
        shown.append({"wave": wave, "cells": cells_of(seats)})
    return shown


def _seat(replica: Replica, successor: tuple[UUID | None, str, str] | None) -> Seat:
    node = replica.node
    _, status, wanted = successor or (None, "", "")
    state = state_of_member(
        is_kept=replica.wanted == Replica.Wanted.RUN and replica.status != STOPPED,
        rolls=replica.rolls_to_id is not None or replica.leaving_since is not None,
        successor=status,
        successor_kept=wanted == Replica.Wanted.RUN and status != STOPPED,
    )
    return Seat(node.name if node is not None else "", state)


def _with_counts(rows: list[Any]) -> list[Any]:
    """Rollouts, each with how many of its waves have passed. One query."""
    counts: dict[UUID, list[int]] = {}
    for rollout_id, status in Wave.objects.filter(rollout__in=rows).values_list("rollout", "status"):
        passed_and_all = counts.setdefault(rollout_id, [0, 0])
        passed_and_all[0] += status == "passed"
        passed_and_all[1] += 1
    for row in rows:
        row.waves_passed, row.waves_total = counts.get(row.pk, [0, 0])
    return rows
