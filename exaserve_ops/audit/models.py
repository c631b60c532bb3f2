"""Audit events: the history page, the live event feed and the evidence afterwards."""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class Event(models.Model):
    """One thing that happened to one subject. Rows are only ever added (a trigger holds it)."""

    at = models.DateTimeField()
    actor = models.CharField(max_length=120)
    """`user:<name>`, `agent:<node>` or `controller:<part>`."""
    subject_kind = models.CharField(max_length=32)
    subject_id = models.CharField(max_length=64)
    subject_name = models.CharField(max_length=200)
    event = models.CharField(max_length=64)
    from_status = models.CharField(max_length=32, blank=True)
    to_status = models.CharField(max_length=32, blank=True)
    reason = models.TextField(blank=True)
    generation = models.BigIntegerField(null=True, blank=True)

    class Meta:
        ordering: ClassVar[list[str]] = ["-id"]
        indexes: ClassVar[list[models.Index]] = [
            models.Index(fields=["subject_kind", "subject_id", "-id"], name="event_by_subject"),
            models.Index(fields=["event", "-id"], name="event_by_kind"),
            models.Index(fields=["-at"], name="event_by_time"),
        ]

    def __str__(self) -> str:
        """Return the event as one line."""
        return f"{self.subject_kind} {self.subject_name}: {self.event}"
