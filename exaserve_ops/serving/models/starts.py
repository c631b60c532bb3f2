"""How much may start at once, and starts that took turns."""

from __future__ import annotations

import uuid
from typing import ClassVar

from django.db import models
from django.db.models.functions import Now


class StartRules(models.Model):
    """How much may start at once, as somebody set it. One row at most: without it the defaults hold."""

    id = models.PositiveSmallIntegerField(primary_key=True, default=1, editable=False)
    per_node = models.PositiveIntegerField(
        help_text="Replicas of one node that start at once. 0: any number."
    )
    per_fleet = models.PositiveIntegerField(help_text="Replicas of the fleet that start at once.")
    from_origins = models.PositiveIntegerField(
        help_text="Copies of weights that leave their origins at once. A swarm of nodes counts as one."
    )
    in_place = models.PositiveIntegerField(
        help_text="Nodes that read weights where their source lies, at once."
    )
    per_rack = models.PositiveIntegerField(help_text="Nodes of one rack that fetch weights at once.")
    changed_at = models.DateTimeField(db_default=Now())

    class Meta:
        ordering: ClassVar[list[str]] = ["id"]
        verbose_name_plural = "start rules"
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.CheckConstraint(condition=models.Q(id=1), name="start_rules_once"),
        ]

    def __str__(self) -> str:
        """Say what they are."""
        return "start rules"


class StagedStart(models.Model):
    """A time in which more replicas were to start than could at once. Open until all of them have started."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    began_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)
    most_waiting = models.PositiveIntegerField(default=0, help_text="Replicas that waited at the same time.")
    replicas = models.PositiveIntegerField(default=0, help_text="That were let go in it; counted at its end.")
    waves = models.PositiveIntegerField(default=0, help_text="In which they were; counted at its end.")

    class Meta:
        ordering: ClassVar[list[str]] = ["-began_at"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(
                fields=["ended_at"],
                condition=models.Q(ended_at__isnull=True),
                nulls_distinct=False,
                name="staged_start_open_once",
            ),
        ]

    def __str__(self) -> str:
        """Return since when."""
        return f"staged start of {self.began_at:%Y-%m-%d %H:%M:%S}"

    @property
    def seconds(self) -> float | None:
        """How long it lasted; `None` while it goes on."""
        return None if self.ended_at is None else (self.ended_at - self.began_at).total_seconds()
