"""Conversations, as the durable shadow of the session table in Redis."""

from __future__ import annotations

from typing import ClassVar

from django.db import models

from exaserve_ops.serving.models import Replica


class InferenceSession(models.Model):
    """A conversation. Written behind in batches; the request path never waits for it."""

    session_id = models.CharField(max_length=128)
    model_name = models.CharField(max_length=120)
    replica = models.ForeignKey(
        Replica, on_delete=models.SET_NULL, null=True, blank=True, related_name="inference_sessions"
    )
    node_name = models.CharField(max_length=120, blank=True)
    turns = models.PositiveIntegerField(default=0)
    failed_turns = models.PositiveIntegerField(default=0)
    replica_changes = models.PositiveIntegerField(default=0)
    prompt_tokens = models.BigIntegerField(default=0)
    cached_tokens = models.BigIntegerField(default=0)
    completion_tokens = models.BigIntegerField(default=0)
    context_tokens = models.PositiveIntegerField(null=True, blank=True)
    last_ttft_seconds = models.FloatField(null=True, blank=True)
    last_outcome = models.CharField(max_length=32, blank=True)
    last_why = models.CharField(max_length=32, blank=True)
    latest_turns = models.JSONField(default=list, blank=True)
    """Rows of `domain.timeline.TurnMark`, bounded."""
    stays = models.JSONField(default=list, blank=True)
    """Rows of `domain.timeline.Stay`, bounded."""
    last_turn_key = models.CharField(
        max_length=40, blank=True, help_text="Stream position of the last turn counted in."
    )
    first_turn_at = models.DateTimeField()
    last_turn_at = models.DateTimeField(db_index=True)

    class Meta:
        ordering: ClassVar[list[str]] = ["-last_turn_at"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["model_name", "session_id"], name="session_once_per_model"),
        ]

    def __str__(self) -> str:
        """Return the session's own id."""
        return self.session_id
