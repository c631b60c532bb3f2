"""Leases of nodes and of the leading controller, and incidents."""

from __future__ import annotations

import uuid
from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models

from exaserve_ops.health.domain.incident import INCIDENT, KINDS
from exaserve_ops.inventory.models import Node


class NodeLease(models.Model):
    """The newest lease of a node. Reports of an older epoch are refused; agents refuse older commands."""

    node = models.OneToOneField(Node, on_delete=models.CASCADE, related_name="lease")
    epoch = models.BigIntegerField(default=1)
    boot_id = models.CharField(max_length=64)
    granted_at = models.DateTimeField()

    class Meta:
        ordering: ClassVar[list[str]] = ["node"]

    def __str__(self) -> str:
        """Return node and epoch."""
        return f"{self.node} epoch {self.epoch}"


class LeaderLease(models.Model):
    """Who leads among controllers, by the clock of Postgres alone. One row; written by the adapter.

    The epoch rises with each change of hands, and every transaction of a leader checks that it is
    still its own: one that stood still and wakes up can change nothing.
    """

    name = models.CharField(max_length=32, primary_key=True)
    epoch = models.BigIntegerField(default=0)
    holder = models.CharField(max_length=200, blank=True)
    renewed_at = models.DateTimeField()
    expires_at = models.DateTimeField()

    class Meta:
        ordering: ClassVar[list[str]] = ["name"]

    def __str__(self) -> str:
        """Return holder and epoch."""
        return f"{self.holder} epoch {self.epoch}"


class Incident(models.Model):
    """One time that the control plane doubted itself: what it saw, and how it ended."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    kind = models.CharField(max_length=32, choices=list(KINDS.items()))
    scope = models.CharField(max_length=160)
    """`fleet`, or level and name of a failure domain: `rack r7`."""
    node_ids = ArrayField(models.UUIDField(), default=list, blank=True)
    """Nodes whose death is withheld."""
    freezes_healing = models.BooleanField(default=True)
    evidence = models.TextField()
    opened_at = models.DateTimeField()
    # Status
    status = models.CharField(max_length=16, choices=INCIDENT.choices, default=INCIDENT.initial)
    resolved_at = models.DateTimeField(null=True, blank=True)
    resolved_by = models.CharField(max_length=120, blank=True)
    resolution = models.TextField(blank=True)
    applied_at = models.DateTimeField(
        null=True, blank=True, help_text="When the deaths that were confirmed had all been written down."
    )

    class Meta:
        ordering: ClassVar[list[str]] = ["-opened_at"]
        indexes: ClassVar[list[models.Index]] = [
            models.Index(fields=["status", "-opened_at"], name="incident_by_status"),
        ]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.CheckConstraint(
                condition=models.Q(status__in=INCIDENT.statuses), name="incident_status_known"
            ),
            # However many controllers believe to lead: one suspicion, one row.
            models.UniqueConstraint(
                fields=["kind", "scope"], condition=models.Q(status="open"), name="incident_open_once"
            ),
        ]

    def __str__(self) -> str:
        """Return what happened and where."""
        return f"{self.get_kind_display()}: {self.scope}"
