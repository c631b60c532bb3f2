"""Validations of models, and what each of their checks found."""

from __future__ import annotations

import uuid
from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models

from exaserve_ops.serving.models import Deployment, Model
from exaserve_ops.validation.domain.catalogue import BY_NAME
from exaserve_ops.validation.domain.lifecycle import CHECK, VALIDATION


class Validation(models.Model):
    """One run of all checks of a model on chosen engines, from the wish to the verdict."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    model = models.ForeignKey(Model, on_delete=models.PROTECT, related_name="validations")
    # Desired
    engines = ArrayField(models.CharField(max_length=32), help_text="In the order in which they are tried.")
    engine_options = models.JSONField(
        default=dict, blank=True, help_text="By engine; what is left out is usual."
    )
    replica_memory_bytes = models.BigIntegerField(default=0, help_text="Of each trial; 0: computed.")
    accelerators_per_replica = models.PositiveSmallIntegerField(default=1)
    nodes_per_replica = models.PositiveSmallIntegerField(
        default=1, help_text="More than 1: each trial runs on so many nodes of one supernode at once."
    )
    nodes = ArrayField(
        models.CharField(max_length=64),
        default=list,
        blank=True,
        help_text="Where trials may run; empty is any.",
    )
    idle_seconds = models.PositiveIntegerField(
        default=30, help_text="Rest before the check of a first answer."
    )
    most_at_once = models.PositiveIntegerField(default=32, help_text="Where the concurrency ramp ends.")
    most_launches = models.PositiveSmallIntegerField(
        default=6, help_text="In the search for the best settings; 0: none is made."
    )
    ttft_limit_seconds = models.FloatField(
        default=2.0, help_text="What 19 in 20 first tokens may take, for a setting to be a good one."
    )
    itl_limit_seconds = models.FloatField(default=0.1, help_text="The same between two tokens.")
    reason = models.CharField(max_length=500, help_text="Why; shown in the history.")
    asked_by = models.CharField(max_length=120)
    # Status
    status = models.CharField(max_length=16, choices=VALIDATION.choices, default=VALIDATION.initial)
    why = models.CharField(max_length=1000, blank=True, help_text="Why it has this status.")
    waits_for = models.CharField(max_length=1000, blank=True, help_text="What it waits for now.")
    trial = models.ForeignKey(
        Deployment,
        on_delete=models.SET_NULL,
        null=True,
        blank=True,
        related_name="validations",
        help_text="The deployment that an engine is tried in now.",
    )
    created_at = models.DateTimeField(db_index=True)
    started_at = models.DateTimeField(null=True, blank=True)
    status_changed_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering: ClassVar[list[str]] = ["-created_at"]
        indexes: ClassVar[list[models.Index]] = [
            models.Index(fields=["model", "status"], name="validation_by_model"),
        ]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.CheckConstraint(
                condition=models.Q(status__in=VALIDATION.statuses), name="validation_status_known"
            ),
        ]

    def __str__(self) -> str:
        """Return what is validated, and on what."""
        return f"{self.model} on {', '.join(self.engines)}"


class ValidationCheck(models.Model):
    """One check of a validation; `engine` is empty for what is asked of the model."""

    validation = models.ForeignKey(Validation, on_delete=models.CASCADE, related_name="checks")
    position = models.PositiveSmallIntegerField()
    name = models.CharField(max_length=16, choices=[(name, check.title) for name, check in BY_NAME.items()])
    engine = models.CharField(max_length=32, blank=True)
    # Status
    status = models.CharField(max_length=16, choices=CHECK.choices, default=CHECK.initial)
    figure = models.CharField(max_length=200, blank=True)
    limit = models.CharField(max_length=200, blank=True)
    why = models.CharField(max_length=1000, blank=True)
    details = models.JSONField(default=dict, blank=True, help_text="Curves and tokens, for the report.")
    began_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering: ClassVar[list[str]] = ["validation", "position"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["validation", "position"], name="validation_check_once"),
            models.CheckConstraint(condition=models.Q(status__in=CHECK.statuses), name="check_status_known"),
        ]

    def __str__(self) -> str:
        """Return the check and where."""
        return f"{self.name} on {self.engine}" if self.engine else self.name
