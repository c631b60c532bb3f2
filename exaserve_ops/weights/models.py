"""Who wants which weights on which node, and what nodes have."""

from __future__ import annotations

from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models.functions import Now

from exaserve_ops.inventory.models import Node
from exaserve_ops.weights.domain.held import STATES
from exaserve_ops.weights.domain.prewarm import MINUTES_OF_A_DAY


class WeightsClaim(models.Model):
    """One owner wants one revision on one node: it is fetched, and not evicted while the claim stands."""

    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="weights_claims")
    revision = models.CharField(max_length=80, help_text="The model's digest.")
    owner = models.CharField(max_length=80, help_text="`prewarm`, `person` or `rollout:<id>`.")
    paused = models.BooleanField(default=False)
    bytes_per_second = models.BigIntegerField(default=0, help_text="0: as fast as it goes.")
    claimed_by = models.CharField(max_length=120)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        ordering: ClassVar[list[str]] = ["revision", "node", "owner"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["node", "revision", "owner"], name="weights_claim_once"),
            models.CheckConstraint(
                condition=models.Q(bytes_per_second__gte=0), name="weights_claim_speed_not_negative"
            ),
        ]
        indexes: ClassVar[list[models.Index]] = [
            models.Index(fields=["owner", "revision"], name="weights_claim_by_owner"),
        ]

    def __str__(self) -> str:
        """Return who wants what."""
        return f"{self.owner}: {self.revision[:19]}"


class NodeWeights(models.Model):
    """One revision as a node reports it. The agent's word; progress between is in heartbeats only."""

    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="weights")
    revision = models.CharField(max_length=80)
    state = models.CharField(max_length=16, choices=[(state, state) for state in STATES])
    reason = models.CharField(max_length=1000, blank=True)
    total_bytes = models.BigIntegerField(default=0)
    have_bytes = models.BigIntegerField(default=0)
    in_use = models.BooleanField(default=False)
    damaged_pieces = models.PositiveIntegerField(default=0)
    spoilt = models.BooleanField(
        default=False,
        help_text="Not to be had by fault of the weights, not of the node or its sources' absence.",
    )
    sources = models.JSONField(
        default=list, blank=True, help_text="What came from where: [kind, host or node, bytes]."
    )
    since = models.DateTimeField(help_text="When it came into this state.")

    class Meta:
        ordering: ClassVar[list[str]] = ["revision", "node"]
        verbose_name_plural = "node weights"
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["node", "revision"], name="node_weights_once"),
        ]
        indexes: ClassVar[list[models.Index]] = [
            models.Index(fields=["revision", "state"], name="node_weights_by_revision"),
        ]

    def __str__(self) -> str:
        """Return what stands how."""
        return f"{self.revision[:19]}: {self.state}"


class NodeStore(models.Model):
    """A node's disk for weights, and the revision of what it was told to have there."""

    node = models.OneToOneField(Node, on_delete=models.CASCADE, primary_key=True, related_name="store")
    wish_revision = models.BigIntegerField(default=0)
    wish_sha256 = models.CharField(max_length=64, blank=True)
    disk_total_bytes = models.BigIntegerField(default=0)
    disk_free_bytes = models.BigIntegerField(default=0)
    used_bytes = models.BigIntegerField(default=0)
    problem = models.CharField(max_length=1000, blank=True, help_text="Why nothing can be stored there.")

    class Meta:
        ordering: ClassVar[list[str]] = ["node"]

    def __str__(self) -> str:
        """Return whose it is."""
        return f"store of {self.pk}"


class PrewarmPolicy(models.Model):
    """When and where a revision is fetched ahead of being needed."""

    revision = models.CharField(primary_key=True, max_length=80, help_text="The model's digest.")
    enabled = models.BooleanField(default=True)
    node_names = ArrayField(
        models.CharField(max_length=120), default=list, blank=True, help_text="Empty: every node in service."
    )
    busiest_ratio = models.FloatField(
        default=0.5, help_text="Not begun on a node whose replicas are busier than this, 0 to 1."
    )
    from_minute = models.PositiveSmallIntegerField(default=0, help_text="Of the day, in UTC.")
    until_minute = models.PositiveSmallIntegerField(
        default=MINUTES_OF_A_DAY, help_text="Of the day, in UTC; before `from_minute`: past midnight."
    )
    bytes_per_second = models.BigIntegerField(default=0, help_text="Of each node. 0: as fast as it goes.")
    at_once = models.PositiveIntegerField(default=8, help_text="Nodes that fetch at the same time.")
    note = models.CharField(max_length=500, blank=True, help_text="What it waits for now.")
    changed_at = models.DateTimeField(db_default=Now())

    class Meta:
        ordering: ClassVar[list[str]] = ["revision"]
        verbose_name_plural = "prewarm policies"
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.CheckConstraint(
                condition=models.Q(
                    busiest_ratio__gte=0,
                    busiest_ratio__lte=1,
                    from_minute__lt=MINUTES_OF_A_DAY,
                    until_minute__lte=MINUTES_OF_A_DAY,
                    bytes_per_second__gte=0,
                    at_once__gte=1,
                ),
                name="prewarm_policy_makes_sense",
            ),
        ]

    def __str__(self) -> str:
        """Return what it is about."""
        return self.revision[:19]
