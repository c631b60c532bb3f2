"""Rollouts, their waves, and what both releases answered meanwhile."""

from __future__ import annotations

import uuid
from typing import ClassVar

from django.db import models

from exaserve_ops.rollouts.domain.lifecycle import ROLLOUT, WAVE
from exaserve_ops.serving.models import Deployment, Release, Replica


class Rollout(models.Model):
    """A deployment's way from one release to another, from the wish to its end."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    deployment = models.ForeignKey(Deployment, on_delete=models.PROTECT, related_name="rollouts")
    from_release = models.ForeignKey(Release, on_delete=models.PROTECT, related_name="rollouts_from")
    to_release = models.ForeignKey(Release, on_delete=models.PROTECT, related_name="rollouts_to")
    # Desired
    policy = models.JSONField(default=dict, help_text="As `domain.policy` reads it.")
    surge = models.PositiveIntegerField(help_text="Replicas that may run beyond what is wanted.")
    unavailable = models.PositiveIntegerField(help_text="Replicas that may be missing by its own doing.")
    reason = models.CharField(max_length=500, help_text="Why; shown in the history.")
    asked_by = models.CharField(max_length=120)
    approved_by = models.CharField(max_length=120, blank=True)
    warnings = models.JSONField(default=list, blank=True, help_text="What was said before it was asked for.")
    estimate = models.JSONField(default=dict, blank=True, help_text="Seconds, bytes and moves, as estimated.")
    # Status
    status = models.CharField(max_length=16, choices=ROLLOUT.choices, default=ROLLOUT.initial)
    why = models.CharField(max_length=1000, blank=True, help_text="Why it has this status.")
    waits_for = models.CharField(max_length=1000, blank=True, help_text="What it waits for now.")
    created_at = models.DateTimeField(db_index=True)
    started_at = models.DateTimeField(null=True, blank=True)
    status_changed_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering: ClassVar[list[str]] = ["-created_at"]
        permissions = (("approve_rollout", "Can approve rollouts that somebody else asked for"),)
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(
                fields=["deployment"],
                condition=models.Q(status__in=ROLLOUT.live),
                name="rollout_one_at_a_time",
            ),
            models.CheckConstraint(
                condition=models.Q(status__in=ROLLOUT.statuses), name="rollout_status_known"
            ),
        ]

    def __str__(self) -> str:
        """Return what moves, from where to where."""
        return f"{self.deployment}: release {self.from_release.number} to {self.to_release.number}"


class Wave(models.Model):
    """Replicas of one failure domain that make way before the next wave begins."""

    rollout = models.ForeignKey(Rollout, on_delete=models.CASCADE, related_name="waves")
    number = models.PositiveIntegerField()
    domain = models.CharField(max_length=160, blank=True)
    domains = models.JSONField(
        default=list, blank=True, help_text="Its failure domains: one, or nodes of which no rack is known."
    )
    planned = models.PositiveIntegerField(help_text="Replicas that it is to have.")
    sessions = models.PositiveIntegerField(default=0, help_text="Active ones there when it was planned.")
    soak_seconds = models.PositiveIntegerField()
    needs_approval = models.BooleanField(default=False, help_text="It begins when somebody lets it.")
    mode = models.CharField(
        max_length=8, blank=True, help_text="`surge`: successors start first; `in_place`: in the freed place."
    )
    gates = models.JSONField(default=list, blank=True, help_text="What each gate said last.")
    # Status
    status = models.CharField(max_length=16, choices=WAVE.choices, default=WAVE.initial)
    why = models.CharField(max_length=1000, blank=True)
    since = models.DateTimeField(help_text="Of its status.")
    opened_at = models.DateTimeField(null=True, blank=True)
    passed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering: ClassVar[list[str]] = ["rollout", "number"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["rollout", "number"], name="wave_number_once"),
            models.CheckConstraint(condition=models.Q(status__in=WAVE.statuses), name="wave_status_known"),
        ]

    def __str__(self) -> str:
        """Return rollout and number."""
        return f"{self.rollout} wave {self.number}"


class WaveMember(models.Model):
    """A replica that makes way in a wave."""

    wave = models.ForeignKey(Wave, on_delete=models.CASCADE, related_name="members")
    replica = models.ForeignKey(Replica, on_delete=models.CASCADE, related_name="wave_members")

    class Meta:
        ordering: ClassVar[list[str]] = ["wave", "replica"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["wave", "replica"], name="wave_member_once"),
        ]

    def __str__(self) -> str:
        """Return wave and replica."""
        return f"{self.wave}: {self.replica}"


class ReleaseAnswers(models.Model):
    """What a release answered in ten seconds of a rollout."""

    rollout = models.ForeignKey(Rollout, on_delete=models.CASCADE, related_name="answers")
    release = models.ForeignKey(Release, on_delete=models.CASCADE, related_name="answers")
    slot_at = models.DateTimeField(help_text="When the ten seconds began.")
    requests = models.PositiveIntegerField(default=0)
    failed = models.PositiveIntegerField(default=0)
    ttft = models.JSONField(
        default=dict, help_text="By kind of answer: counts by bucket, see `domain.durations`."
    )
    itl = models.JSONField(
        default=dict, help_text="Counts by bucket of streamed answers' time between tokens."
    )
    last_turn_key = models.CharField(
        max_length=40, blank=True, help_text="Stream position of the last turn counted in."
    )

    class Meta:
        ordering: ClassVar[list[str]] = ["rollout", "slot_at"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["rollout", "release", "slot_at"], name="release_answers_once"),
        ]

    def __str__(self) -> str:
        """Return release and time."""
        return f"{self.release} at {self.slot_at:%H:%M:%S}"
