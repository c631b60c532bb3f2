"""Rollouts in the Django admin: asked for as an action on a deployment, with the plan before it begins."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse

from exaserve_ops.lib import clock
from exaserve_ops.lib.admin import ReadOnlyAdmin, actor_of
from exaserve_ops.lib.errors import OpsError, StaleError
from exaserve_ops.lib.json_field import JsonTextField
from exaserve_ops.lib.lifecycle import IllegalTransitionError
from exaserve_ops.rollouts.models import ReleaseAnswers, Rollout, Wave, WaveMember
from exaserve_ops.rollouts.services.rollouts import (
    act_on_rollout,
    checked_policy,
    create_rollout,
    preview_rollout,
)
from exaserve_ops.serving.admin import DeploymentAdmin
from exaserve_ops.serving.models import Deployment, Model
from exaserve_ops.serving.services.releases import ReleaseWish

_MAY_ADD, _MAY_CHANGE = "rollouts.add_rollout", "rollouts.change_rollout"
_MAY_APPROVE = "rollouts.approve_rollout"
_IN_THE_ADMIN = "asked for in the admin"


class StartForm(forms.Form):
    """What a deployment is to run, and how it gets there."""

    model = forms.ModelChoiceField(Model.objects.all(), empty_label=None)
    engine_options = JsonTextField(required=False, help_text="All of them, as an object.")
    policy = JsonTextField(
        required=False,
        help_text='What differs from the usual, such as {"max_surge": "10%", "approve_waves": [2]}.',
    )
    reason = forms.CharField(max_length=300, help_text="Why; shown in the history.")

    def clean_engine_options(self) -> dict[str, Any]:
        """Refuse JSON that is no object."""
        return _object_of(self.cleaned_data["engine_options"])

    def clean_policy(self) -> dict[str, Any]:
        """Refuse JSON that is no object."""
        return _object_of(self.cleaned_data["policy"])


def _object_of(value: Any) -> dict[str, Any]:  # noqa: ANN401 - whatever JSON holds
    if value is not None and not isinstance(value, dict):
        raise forms.ValidationError('Give an object, such as {"soak_seconds": 30}.')
    return value or {}


admin.site.unregister(Deployment)


@admin.register(Deployment)
class RollableDeploymentAdmin(DeploymentAdmin):
    """Deployments, with the action that moves one to another release."""

    actions = ("roll_out",)

    def has_roll_out_permission(self, request: HttpRequest) -> bool:
        """Whether the action is offered."""
        return request.user.has_perm(_MAY_ADD)

    @admin.action(description="Roll out another release of the chosen deployment…", permissions=["roll_out"])
    def roll_out(self, request: HttpRequest, deployments: QuerySet[Deployment]) -> HttpResponse | None:
        """Lead to the form and the plan; nothing begins here."""
        chosen = list(deployments.values_list("pk", flat=True)[:2])
        if len(chosen) != 1:
            self.message_user(request, "Choose one deployment: each has a plan of its own.", messages.ERROR)
            return None
        return HttpResponseRedirect(reverse("admin:rollouts_rollout_start", args=chosen))


class WaveInline(admin.TabularInline[Wave, Rollout]):
    """Waves of a rollout."""

    model = Wave
    extra = 0
    fields = ("number", "status", "domain", "planned", "mode", "soak_seconds", "needs_approval", "why")


@admin.register(Rollout)
class RolloutAdmin(ReadOnlyAdmin[Rollout]):
    """Rollouts: controllers own the rows."""

    list_display = (
        "deployment",
        "from_release",
        "to_release",
        "status",
        "why",
        "asked_by",
        "approved_by",
        "created_at",
        "ended_at",
    )
    list_filter = ("status",)
    list_select_related = ("deployment", "from_release__deployment", "to_release__deployment")
    search_fields = ("deployment__name", "reason", "asked_by")
    inlines = (WaveInline,)
    actions = ("approve", "cancel", "pause", "resume", "roll_back")

    def get_urls(self) -> list[URLPattern]:
        """The admin's own addresses, and the form that begins one."""
        start = path(
            "start/<uuid:deployment_id>/",
            self.admin_site.admin_view(self.start),
            name="rollouts_rollout_start",
        )
        return [start, *super().get_urls()]

    def start(self, request: HttpRequest, deployment_id: UUID) -> HttpResponse:
        """Ask what to roll out, show what that would do, and begin it when that is confirmed."""
        if not request.user.has_perm(_MAY_ADD):
            raise PermissionDenied
        deployment = get_object_or_404(Deployment, pk=deployment_id)
        initial = {"model": deployment.model_id, "engine_options": deployment.engine_options, "policy": {}}
        form = StartForm(request.POST or None, initial=initial)
        context: dict[str, Any] = {}
        if request.method == "POST" and form.is_valid():
            try:
                made = _plan_or_begin(request, deployment, form.cleaned_data, context)
            except OpsError as error:
                form.add_error(None, str(error))
            else:
                if made is not None:
                    self.message_user(request, f"{made}: {made.get_status_display()}")
                    return HttpResponseRedirect(reverse("admin:rollouts_rollout_change", args=[made.pk]))
        context |= {
            **self.admin_site.each_context(request),
            "title": f"Roll out another release of {deployment.name}",
            "form": form,
            "deployment": deployment,
            "opts": self.opts,
        }
        return TemplateResponse(request, "rollouts/admin_start.html", context)

    def has_operate_permission(self, request: HttpRequest) -> bool:
        """Whether the actions are offered."""
        return request.user.has_perm(_MAY_CHANGE)

    def has_approve_permission(self, request: HttpRequest) -> bool:
        """Whether approving is offered."""
        return request.user.has_perm(_MAY_APPROVE)

    @admin.action(description="Approve the chosen rollouts", permissions=["approve"])
    def approve(self, request: HttpRequest, rollouts: QuerySet[Rollout]) -> None:
        """Agree to what somebody else asked for."""
        self._each(request, rollouts, "approve")

    @admin.action(description="Take back the chosen rollouts", permissions=["operate"])
    def cancel(self, request: HttpRequest, rollouts: QuerySet[Rollout]) -> None:
        """Take back what has not begun."""
        self._each(request, rollouts, "cancel")

    @admin.action(description="Pause the chosen rollouts", permissions=["operate"])
    def pause(self, request: HttpRequest, rollouts: QuerySet[Rollout]) -> None:
        """Have nothing more begin."""
        self._each(request, rollouts, "pause")

    @admin.action(description="Let the chosen rollouts go on", permissions=["operate"])
    def resume(self, request: HttpRequest, rollouts: QuerySet[Rollout]) -> None:
        """Let them go on."""
        self._each(request, rollouts, "resume")

    @admin.action(description="Roll back the chosen rollouts", permissions=["operate"])
    def roll_back(self, request: HttpRequest, rollouts: QuerySet[Rollout]) -> None:
        """Turn back."""
        self._each(request, rollouts, "roll_back")

    def _each(self, request: HttpRequest, rollouts: QuerySet[Rollout], act: str) -> None:
        for rollout in rollouts:
            try:
                act_on_rollout(
                    rollout.pk, act, actor=actor_of(request), now=clock.now(), reason=_IN_THE_ADMIN
                )
            except (OpsError, IllegalTransitionError) as error:
                self.message_user(request, f"{rollout}: {error}", messages.ERROR)
            else:
                self.message_user(request, f"{rollout}: done")


def _plan_or_begin(
    request: HttpRequest, deployment: Deployment, data: dict[str, Any], context: dict[str, Any]
) -> Rollout | None:
    wish = ReleaseWish(model_id=data["model"].pk, engine_options=data["engine_options"])
    policy = checked_policy(data["policy"])
    actor, now = actor_of(request), clock.now()
    if "_begin" in request.POST:
        try:
            return create_rollout(
                deployment.pk,
                wish,
                policy,
                reason=data["reason"],
                confirmed=request.POST.get("planned", ""),
                actor=actor,
                now=now,
            )
        except StaleError:
            context["overtaken"] = True
    context["plan"] = preview_rollout(deployment.pk, wish, policy, actor=actor, now=now)
    return None


@admin.register(Wave)
class WaveAdmin(ReadOnlyAdmin[Wave]):
    """Waves of all rollouts."""

    list_display = ("rollout", "number", "status", "domain", "planned", "mode", "why")
    list_filter = ("status",)
    list_select_related = ("rollout__deployment", "rollout__from_release", "rollout__to_release")


@admin.register(WaveMember)
class WaveMemberAdmin(ReadOnlyAdmin[WaveMember]):
    """Replicas that make way."""

    list_display = ("wave", "replica")
    list_select_related = (
        "replica",
        "wave__rollout__deployment",
        "wave__rollout__from_release",
        "wave__rollout__to_release",
    )


@admin.register(ReleaseAnswers)
class ReleaseAnswersAdmin(ReadOnlyAdmin[ReleaseAnswers]):
    """What releases answered while they were rolled out."""

    list_display = ("release", "slot_at", "requests", "failed")
    list_select_related = ("release__deployment",)
