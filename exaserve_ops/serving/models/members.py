"""The parts of a replica that runs on several nodes."""

from __future__ import annotations

from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models

from exaserve_ops.inventory.models import Node
from exaserve_ops.serving.models.deployments import Replica


class ReplicaMember(models.Model):
    """What of a replica runs on one of its nodes. Replicas on one node have none."""

    replica = models.ForeignKey(Replica, on_delete=models.CASCADE, related_name="members")
    number = models.PositiveSmallIntegerField(help_text="From 0, the head, which answers requests.")
    node = models.ForeignKey(Node, on_delete=models.PROTECT, related_name="replica_members")
    accelerator_uuids = ArrayField(models.CharField(max_length=80), default=list)
    adapters = ArrayField(
        models.CharField(max_length=80, blank=True),
        default=list,
        blank=True,
        help_text="The network adapter next to each accelerator; empty where none is known.",
    )
    reserved_bytes = models.BigIntegerField(
        default=0, help_text="What was promised to it when it was placed."
    )
    # Observed
    state = models.CharField(max_length=16, blank=True, help_text="As its agent said last.")
    reason = models.TextField(blank=True)
    epoch = models.PositiveIntegerField(default=0, help_text="Of which start its agent spoke.")
    generation = models.BigIntegerField(default=0, help_text="Of the wish that its agent had then.")
    attempt = models.PositiveIntegerField(default=0)
    pid = models.PositiveIntegerField(null=True, blank=True)
    address = models.CharField(max_length=300, blank=True, help_text="Of the head: where its HTTP answers.")
    rendezvous = models.CharField(
        max_length=300, blank=True, help_text="Of the head: where the members find each other."
    )
    exit_attempt = models.PositiveIntegerField(null=True, blank=True)
    exit_text = models.CharField(max_length=500, blank=True, help_text="How its last process ended.")
    exit_code = models.IntegerField(null=True, blank=True)
    exit_signal = models.PositiveSmallIntegerField(null=True, blank=True)
    exit_after_seconds = models.FloatField(null=True, blank=True)
    exit_log_tail = ArrayField(models.TextField(), default=list, blank=True)
    held_by_pids = ArrayField(models.PositiveIntegerField(), default=list, blank=True)
    ended_at = models.DateTimeField(
        null=True, blank=True, help_text="Since when nothing is left of it, after it was let go."
    )

    class Meta:
        ordering: ClassVar[list[str]] = ["replica", "number"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["replica", "number"], name="replica_member_once"),
            models.UniqueConstraint(fields=["replica", "node"], name="replica_member_once_a_node"),
        ]

    def __str__(self) -> str:
        """Return its replica and number."""
        return f"{self.replica} member {self.number}"

    @property
    def cards(self) -> list[tuple[str, str]]:
        """Each accelerator, and the network adapter next to it."""
        adapters = [*self.adapters, *[""] * len(self.accelerator_uuids)]
        return list(zip(self.accelerator_uuids, adapters, strict=False))

    @property
    def state_words(self) -> str:
        """What its agent said last, for people."""
        return self.state.replace("_", " ")
