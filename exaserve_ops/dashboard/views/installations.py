"""Agents over SSH: ask, compare the host key, watch, upgrade, remove."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from exaserve_ops.dashboard.access import actor_of, requires
from exaserve_ops.dashboard.installation_forms import CredentialsForm, InstallationForm
from exaserve_ops.dashboard.listing import list_page
from exaserve_ops.dashboard.ports import credential_vault
from exaserve_ops.dashboard.reading import history_of
from exaserve_ops.inventory.domain import installation as states
from exaserve_ops.inventory.domain.installation import INSTALLATION, STEP_WORDS, STEPS, Credentials
from exaserve_ops.inventory.models import InstallationStep, NodeInstallation, SshHostKey
from exaserve_ops.inventory.services.installations import (
    InstallationWish,
    advance_installation,
    ask_installation,
    confirm_host_key,
    create_installation,
    forget_host_key,
    set_restart_when_dead,
)
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import InvalidInputError, OpsError
from exaserve_ops.lib.lifecycle import IllegalTransitionError

UNSETTLED = frozenset({states.NEW, states.QUEUED, states.WORKING})
CHANGEABLE = (states.CONFIRMING, states.FAILED)
"""Where nothing is under way; what was asked may be asked differently as long as no node has joined."""
WISHED = (
    "host", "port", "user", "auth", "node_name", "address", "folder", "python",
    "allow_http", "restart_when_dead",
)  # fmt: skip
ACTIONS = {
    states.UPGRADE: "Upgrade",
    states.RESTART_AGENT: "Restart agent",
    states.REMOVE: "Remove",
    states.INSTALL: "Install again",
}
PLANS = {
    states.UPGRADE: "The present version of the agent is put beside the old one and started. Replicas keep "
    "running and are adopted. An agent that does not report goes back to the version before.",
    states.RESTART_AGENT: "The agent is stopped, killed if it must be, and started. Replicas keep running.",
    states.REMOVE: "The node is drained, agent and replicas are stopped, the folder is deleted, and the node "
    "is retired: its keys are worth nothing any more.",
    states.INSTALL: "All steps are gone through again; what is done already is not done twice.",
}


@dataclass(frozen=True, slots=True)
class ShownStep:
    """One line of the progress: a step that ran, or one that is still to come."""

    word: str
    outcome: str
    step: InstallationStep | None


@require_safe
@requires("inventory.view_nodeinstallation")
def installations(request: HttpRequest) -> HttpResponse:
    """Show all installations, and the pinned host keys."""
    listing = list_page(
        request,
        NodeInstallation.objects.order_by("-created_at"),
        choices={"state": ("State", "status", INSTALLATION.choices)},
        search_in=("host", "node_name"),
        searchable="host or node",
    )
    context = {
        "title": "Agents over SSH",
        "listing": listing,
        "rows": listing.page.object_list,
        "pins": SshHostKey.objects.all()[:200],
    }
    return render(request, "installations/list.html", context)


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@requires("inventory.install_node")
def installation_new(request: HttpRequest) -> HttpResponse:
    """Ask for a machine, and how to sign in; filled in like the one that it is `?instead_of=`."""
    former = _former(request.GET.get("instead_of", ""))
    initial = {name: getattr(former, name) for name in WISHED} if former else None
    form = InstallationForm(request.POST or None, request.FILES or None, initial=initial)
    if request.method == "POST" and form.is_valid():
        made = _create(request, form, former)
        if made is not None:
            return redirect("installation", made.pk)
    context = {"title": "Add a node over SSH", "form": form, "former": former}
    return render(request, "installations/new.html", context, status=422 if form.errors else 200)


@require_safe
@requires("inventory.view_nodeinstallation")
def installation(request: HttpRequest, installation_id: UUID) -> HttpResponse:
    """Show one installation: what it waits for, its steps and their logs."""
    row = get_object_or_404(NodeInstallation.objects.select_related("node"), pk=installation_id)
    context = {
        "title": f"{row.status} · {row}",
        "row": row,
        "events": history_of("installation", installation_id),
        "actions": _actions(row),
        "credentials": CredentialsForm(initial={"auth": row.auth}),
        "can_change": row.status in CHANGEABLE and row.node_id is None,
        **_progress(row),
    }
    return render(request, "installations/page.html", context)


@require_safe
@requires("inventory.view_nodeinstallation")
def installation_progress(request: HttpRequest, installation_id: UUID) -> HttpResponse:
    """Show the progress again; a page whose buttons would differ by now is loaded anew."""
    row = get_object_or_404(NodeInstallation, pk=installation_id)
    response = render(request, "installations/progress.html", {"row": row, **_progress(row)})
    if request.GET.get("unsettled") == "yes" and row.status not in UNSETTLED:
        response["HX-Refresh"] = "true"
    return response


@require_POST
@requires("inventory.install_node")
def installation_confirm(request: HttpRequest, installation_id: UUID) -> HttpResponse:
    """Pin the host key that was compared."""
    return _acted(
        request,
        installation_id,
        lambda: confirm_host_key(
            installation_id, request.POST.get("fingerprint", ""), actor=actor_of(request), now=clock.now()
        ),
    )


@never_cache
@require_POST
@requires("inventory.install_node")
def installation_act(request: HttpRequest, installation_id: UUID) -> HttpResponse:
    """Have it tried again, upgraded, restarted or removed; credentials come along where they are needed."""
    row = get_object_or_404(NodeInstallation, pk=installation_id)
    form = CredentialsForm({**request.POST.dict(), "auth": row.auth}, request.FILES)
    if not form.is_valid():
        for errors in form.errors.values():
            messages.error(request, " ".join(map(str, errors)))
        return redirect("installation", installation_id)
    action, reason = request.POST.get("action", ""), request.POST.get("reason", "").strip()

    def ask() -> None:
        with transaction.atomic():
            ask_installation(installation_id, action, reason=reason, actor=actor_of(request), now=clock.now())
            _keep(installation_id, form.credentials())

    return _acted(request, installation_id, ask)


@require_POST
@requires("inventory.install_node")
def installation_abandon(request: HttpRequest, installation_id: UUID) -> HttpResponse:
    """Give an installation up."""

    def abandon() -> None:
        reason = request.POST.get("reason", "").strip()
        advance_installation(
            installation_id, "abandoned", reason=reason, actor=actor_of(request), now=clock.now()
        )
        credential_vault().forget(str(installation_id))

    return _acted(request, installation_id, abandon)


@require_POST
@requires("inventory.install_node")
def installation_healing(request: HttpRequest, installation_id: UUID) -> HttpResponse:
    """Allow or forbid healing to restart the agent over SSH."""
    wanted = request.POST.get("wanted") == "yes"
    return _acted(
        request,
        installation_id,
        lambda: set_restart_when_dead(
            installation_id, wanted=wanted, actor=actor_of(request), now=clock.now()
        ),
    )


@require_POST
@requires("inventory.install_node")
def installations_upgrade(request: HttpRequest) -> HttpResponse:
    """Upgrade every agent that controllers can sign in for by themselves, a few at a time."""
    rows = NodeInstallation.objects.filter(
        status=states.INSTALLED, auth=NodeInstallation.Auth.AGENT, node__isnull=False
    )
    asked = 0
    for row in rows:
        ask_installation(
            row.pk, states.UPGRADE, reason="all at once", actor=actor_of(request), now=clock.now()
        )
        asked += 1
    messages.success(request, f"{asked} agents are being upgraded, a few at a time.")
    return redirect("installations")


@require_POST
@requires("inventory.delete_sshhostkey")
def host_key_forget(request: HttpRequest, pin_id: UUID) -> HttpResponse:
    """Forget a pinned host key."""
    pin = get_object_or_404(SshHostKey, pk=pin_id)
    forget_host_key(pin_id, actor=actor_of(request), now=clock.now())
    messages.success(request, f"The key of {pin} is forgotten. The next one is shown before it is used.")
    return redirect("installations")


def _former(installation_id: str) -> NodeInstallation | None:
    """The installation that is asked for anew; `None` where it is under way, or there is a node already."""
    try:
        rows = NodeInstallation.objects.filter(pk=UUID(installation_id))
    except ValueError:
        return None
    return rows.filter(status__in=CHANGEABLE, node=None).first()


def _create(
    request: HttpRequest, form: InstallationForm, former: NodeInstallation | None
) -> NodeInstallation | None:
    wish = InstallationWish(**{name: form.cleaned_data[name] for name in WISHED})
    actor, now = actor_of(request), clock.now()
    try:
        with transaction.atomic():
            if former is not None:
                why = "asked for anew with other settings"
                advance_installation(former.pk, "abandoned", reason=why, actor=actor, now=now)
            made = create_installation(wish, actor=actor, now=now)
            _keep(made.pk, form.credentials())
    except InvalidInputError as error:
        form.add_error(error.field if error.field in form.fields else None, error.message)
        return None
    except (OpsError, IllegalTransitionError) as error:
        form.add_error(None, str(error))
        return None
    if former is not None:
        credential_vault().forget(str(former.pk))
    return made


def _keep(installation_id: UUID, credentials: Credentials) -> None:
    if credentials != Credentials():
        credential_vault().keep(str(installation_id), credentials)


def _acted(request: HttpRequest, installation_id: UUID, act: Any) -> HttpResponse:  # noqa: ANN401 - any callable
    get_object_or_404(NodeInstallation, pk=installation_id)
    try:
        act()
    except (OpsError, IllegalTransitionError) as error:
        messages.error(request, str(error))
    return redirect("installation", installation_id)


def _actions(row: NodeInstallation) -> list[dict[str, Any]]:
    """What may be asked for now, the most likely first."""
    if row.status not in {states.INSTALLED, states.FAILED}:
        return []
    names: list[str] = [states.UPGRADE, states.RESTART_AGENT, states.REMOVE] if row.node_id else []
    if row.status == states.FAILED:
        names = [row.action, *(name for name in names if name != row.action)]
        names += [states.REMOVE] if states.REMOVE not in names else []
    return [
        {
            "name": name,
            "word": "Try again" if index == 0 and row.status == states.FAILED else ACTIONS[name],
            "plan": PLANS[name],
            "danger": name == states.REMOVE,
        }
        for index, name in enumerate(names)
    ]


def _progress(row: NodeInstallation) -> dict[str, Any]:
    ran = {step.name: step for step in row.steps.filter(run=row.run)}
    names = STEPS[row.action] if row.status in UNSETTLED | {states.CONFIRMING} else tuple(ran)
    if row.status != states.WORKING and row.status in UNSETTLED | {states.CONFIRMING}:
        ran = {}
    shown = [
        ShownStep(STEP_WORDS.get(name, name), ran[name].outcome if name in ran else "waiting", ran.get(name))
        for name in names
    ]
    done = sum(step.outcome in {"done", "warning"} for step in shown)
    total = len(STEPS[row.action]) if shown else 0
    return {"steps": shown, "done": done, "total": total, "unsettled": row.status in UNSETTLED}
