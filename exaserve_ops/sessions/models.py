"""Conversations, as the durable shadow of the session table in Redis."""

from __future__ import annotations

import uuid
from typing import ClassVar

from django.db import models

from exaserve_ops.serving.models import Replica
from exaserve_ops.sessions.domain.moves import RELOCATION
from exaserve_ops.sessions.domain.relocation import ASKED, TRIGGERS


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


class Relocation(models.Model):
    """One move of a conversation from a replica to another, from the decision to its end."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    session = models.ForeignKey(InferenceSession, on_delete=models.CASCADE, related_name="relocations")
    source = models.ForeignKey(
        Replica, on_delete=models.SET_NULL, null=True, blank=True, related_name="relocations_from"
    )
    target = models.ForeignKey(
        Replica, on_delete=models.SET_NULL, null=True, blank=True, related_name="relocations_to"
    )
    status = models.CharField(max_length=16, choices=RELOCATION.choices, default=RELOCATION.initial)
    why = models.CharField(max_length=500, help_text="Why it moves.")
    trigger = models.CharField(
        max_length=16,
        choices=[(trigger, trigger) for trigger in TRIGGERS],
        default=ASKED,
        help_text="`asked` by a person, its replica is `leaving`, or `balance`.",
    )
    asked_by = models.CharField(max_length=120, blank=True, help_text="Empty: the controllers chose it.")
    reason = models.CharField(max_length=500, blank=True, help_text="What was last said of it.")
    way = models.CharField(
        max_length=16,
        blank=True,
        help_text="`transfer`; `prefill`: the target computes it before the next turn; or `recompute` at it.",
    )
    carrier = models.CharField(
        max_length=16,
        blank=True,
        help_text="What its KV went by: `shared_memory` of the node, `tcp` or `nixl`; or `computed`.",
    )
    owner_epoch = models.BigIntegerField(default=0, help_text="In the session table, when it began.")
    turns = models.BigIntegerField(default=0, help_text="Turns in the session table, when it began.")
    sent_bytes = models.BigIntegerField(default=0)
    target_tokens = models.PositiveIntegerField(default=0, help_text="That the target had once it was sent.")
    send_seconds = models.FloatField(null=True, blank=True)
    created_at = models.DateTimeField(db_index=True)
    status_changed_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering: ClassVar[list[str]] = ["-created_at"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(
                fields=["session"],
                condition=models.Q(status__in=RELOCATION.live),
                name="relocation_one_at_a_time",
            ),
            models.CheckConstraint(
                condition=models.Q(status__in=RELOCATION.statuses), name="relocation_status_known"
            ),
            models.CheckConstraint(condition=models.Q(trigger__in=TRIGGERS), name="relocation_trigger_known"),
        ]

    def __str__(self) -> str:
        """Return what moves where."""
        return f"{self.session}: {self.source} to {self.target}"
