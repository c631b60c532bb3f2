"""Rollouts in the Django admin."""

from __future__ import annotations

from django.contrib import admin

from exaserve_ops.lib.admin import ReadOnlyAdmin
from exaserve_ops.rollouts.models import ReleaseAnswers, Rollout, Wave, WaveMember


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
