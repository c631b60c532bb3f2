"""Deployments, their releases and replicas, and what nodes were told."""

from __future__ import annotations

import uuid
from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models.functions import Now

from exaserve_ops.inventory.models import Accelerator, Node
from exaserve_ops.serving.domain.lifecycle import DEPLOYMENT, REPLICA
from exaserve_ops.serving.domain.reach import REACHES, UNCHECKED
from exaserve_ops.serving.domain.sleep import STATES as SLEEP_STATES
from exaserve_ops.serving.models.catalogue import Model


class Deployment(models.Model):
    """What is wanted: a model, how many replicas, how they run and where."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.SlugField(max_length=60)
    model = models.ForeignKey(Model, on_delete=models.PROTECT, related_name="deployments")
    served_name = models.CharField(max_length=120, help_text="What clients send as `model`.")
    # Desired; each change raises the generation.
    generation = models.BigIntegerField(default=1)
    release_number = models.PositiveIntegerField(
        default=1, editable=False, help_text="The release that new replicas run; the fields here say it, too."
    )
    replicas = models.PositiveIntegerField()
    engine = models.CharField(max_length=32)
    engine_options = models.JSONField(default=dict, blank=True)
    replica_memory_bytes = models.BigIntegerField(
        help_text="Accelerator memory that one replica may use: weights, KV pool and overhead."
    )
    accelerators_per_replica = models.PositiveSmallIntegerField(
        default=1, help_text="On each node of a replica; the memory above is of one node, too."
    )
    nodes_per_replica = models.PositiveSmallIntegerField(
        default=1, help_text="Nodes that one replica runs on at once, all in one supernode."
    )
    placement = models.JSONField(
        default=dict, blank=True, help_text="`nodes`: names that replicas may run on; empty is any."
    )
    drain_seconds = models.PositiveIntegerField(default=60)
    start_seconds = models.PositiveIntegerField(default=300)
    stall_seconds = models.PositiveIntegerField(
        default=60, help_text="Requests run and no token comes for so long: it is restarted. 0: never."
    )
    standbys = models.PositiveIntegerField(
        default=0, help_text="Replicas beyond those that serve: started and loaded, outside routing."
    )
    standbys_sleep = models.BooleanField(
        default=False,
        help_text="A standby that is ready gives its accelerators' memory back until it is to serve.",
    )
    drain_slow = models.BooleanField(
        default=False, help_text="Replace and drain a replica that stays slower than its peers."
    )
    requires_go = models.BooleanField(
        default=False,
        help_text="A rollout needs a validation that ended with go, of its model on its engine.",
    )
    balance_sessions = models.BooleanField(
        default=True, help_text="Move sessions off replicas whose KV memory they overfill."
    )
    balance_from_percent = models.PositiveSmallIntegerField(
        default=90, help_text="How full of active sessions a replica's KV memory is for that, at least."
    )
    balance_gap_percent = models.PositiveSmallIntegerField(
        default=30, help_text="How much emptier another replica is for that, at least."
    )
    # Status
    balancing_since = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="Since when its sessions are being balanced."
    )
    balancing_note = models.CharField(max_length=300, blank=True, editable=False)
    status = models.CharField(max_length=16, choices=DEPLOYMENT.choices, default=DEPLOYMENT.initial)
    next_ordinal = models.PositiveIntegerField(default=1, editable=False)
    created_at = models.DateTimeField(db_default=Now())
    updated_at = models.DateTimeField(db_default=Now())

    class Meta:
        ordering: ClassVar[list[str]] = ["name"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(
                fields=["name"],
                condition=~models.Q(status="deleted"),
                name="deployment_name_once_while_it_lives",
            ),
            models.CheckConstraint(
                condition=models.Q(status__in=DEPLOYMENT.statuses), name="deployment_status_known"
            ),
        ]

    def __str__(self) -> str:
        """Return the name."""
        return self.name


class Release(models.Model):
    """What replicas of a deployment run: weights, engine, options. Immutable: a change is another one."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    deployment = models.ForeignKey(Deployment, on_delete=models.PROTECT, related_name="releases")
    number = models.PositiveIntegerField(help_text="Counted up within the deployment.")
    model = models.ForeignKey(Model, on_delete=models.PROTECT, related_name="releases")
    engine = models.CharField(max_length=32)
    engine_options = models.JSONField(default=dict, blank=True)
    replica_memory_bytes = models.BigIntegerField(help_text="As of a deployment.")
    created_at = models.DateTimeField(db_default=Now())
    created_by = models.CharField(max_length=120, blank=True)

    class Meta:
        ordering: ClassVar[list[str]] = ["deployment", "number"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["deployment", "number"], name="release_number_once"),
        ]

    def __str__(self) -> str:
        """Return deployment and number."""
        return f"{self.deployment} release {self.number}"


class Replica(models.Model):
    """One running copy, from the wish to the end of its process group. Never reused."""

    class Wanted(models.TextChoices):
        """What the deployment's controller decided for this replica."""

        RUN = "run"
        DRAIN = "drain"
        STOP = "stop"

    class Role(models.TextChoices):
        """What a replica is for."""

        SERVING = "serving"
        STANDBY = "standby"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=80, unique=True)
    deployment = models.ForeignKey(Deployment, on_delete=models.PROTECT, related_name="replica_set")
    node = models.ForeignKey(Node, on_delete=models.PROTECT, null=True, blank=True, related_name="replicas")
    accelerators = models.ManyToManyField(Accelerator, blank=True, related_name="replicas")
    memory_bytes = models.BigIntegerField()
    release = models.ForeignKey(
        Release,
        on_delete=models.PROTECT,
        related_name="replicas",
        help_text="What it runs, for its whole life.",
    )
    # Desired
    wanted = models.CharField(max_length=8, choices=Wanted.choices, default=Wanted.RUN)
    generation = models.BigIntegerField(default=1)
    role = models.CharField(max_length=8, choices=Role.choices, default=Role.SERVING)
    replaces = models.ForeignKey(
        "self",
        on_delete=models.SET_NULL,
        null=True,
        blank=True,
        related_name="replacements",
        help_text="Whose place it takes; that one is let go when this one is ready.",
    )
    made_for = models.CharField(max_length=16, blank=True, help_text="Why a replacement was made.")
    rolls_to = models.ForeignKey(
        Release,
        on_delete=models.SET_NULL,
        null=True,
        blank=True,
        related_name="rolling_replicas",
        help_text="Release of the replica that is to take its place; none: it stays.",
    )
    rolls_in_place = models.BooleanField(
        default=False, help_text="It goes first and its successor follows: there is no room for both."
    )
    start_waits_since = models.DateTimeField(
        null=True,
        blank=True,
        help_text="Since when it waits for its turn to start; its node knows it not yet.",
    )
    start_allowed_at = models.DateTimeField(
        null=True, blank=True, help_text="When it was its turn to start on its node."
    )
    # Of one that runs on several nodes: how its members are started together. See `ReplicaMember`.
    node_count = models.PositiveSmallIntegerField(default=1, help_text="Nodes that it runs on at once.")
    gang_epoch = models.PositiveIntegerField(
        default=0, help_text="Number of the newest start of all its members; 0: there was none."
    )
    gang_began_at = models.DateTimeField(
        null=True, blank=True, help_text="When that start began; empty while none is under way."
    )
    gang_ready_by = models.DateTimeField(
        null=True, blank=True, help_text="When all its members must be ready."
    )
    gang_retry_at = models.DateTimeField(
        null=True, blank=True, help_text="When the next start may begin after one that ended."
    )
    gang_crashes = models.PositiveSmallIntegerField(
        default=0, help_text="Starts in a row that ended by themselves."
    )
    # Observed
    observed_generation = models.BigIntegerField(default=0)
    attempt = models.PositiveIntegerField(default=0)
    restarts = models.PositiveIntegerField(default=0)
    pid = models.PositiveIntegerField(null=True, blank=True)
    address = models.CharField(max_length=300, blank=True)
    ports = ArrayField(models.PositiveIntegerField(), default=list, blank=True)
    start_took_seconds = models.FloatField(null=True, blank=True)
    exit_attempt = models.PositiveIntegerField(null=True, blank=True)
    exit_code = models.IntegerField(null=True, blank=True)
    exit_signal = models.PositiveSmallIntegerField(null=True, blank=True)
    exit_after_seconds = models.FloatField(null=True, blank=True)
    exit_log_tail = ArrayField(models.TextField(), default=list, blank=True)
    reach = models.CharField(
        max_length=16,
        choices=[(reach, reach) for reach in REACHES],
        default=UNCHECKED,
        help_text="Whether gateways can connect to it while it is ready.",
    )
    unroutable_reason = models.CharField(
        max_length=500, blank=True, help_text="Ready, but a gateway could not reach it."
    )
    leaving_since = models.DateTimeField(
        null=True, blank=True, help_text="Since when a rollout has its sessions leave it."
    )
    departure = models.JSONField(
        default=dict,
        blank=True,
        help_text="How its conversations leave it while it serves; empty: they stay.",
    )
    handed_over_at = models.DateTimeField(
        null=True, blank=True, help_text="Since when it only ends what is open: its conversations have left."
    )
    left_behind = models.PositiveIntegerField(
        null=True, blank=True, help_text="Conversations that had not left it when its time to drain was up."
    )
    held_by_pids = ArrayField(
        models.PositiveIntegerField(),
        default=list,
        blank=True,
        help_text="Processes that hold the memory that it waits for.",
    )
    held_since = models.DateTimeField(null=True, blank=True)
    memory_wait = models.JSONField(
        null=True, blank=True, help_text="What memory its launch waits for, and who holds it; null: none."
    )
    memory_since = models.DateTimeField(
        null=True, blank=True, help_text="Since when its launch waits for memory."
    )
    sleep_state = models.CharField(
        max_length=16,
        blank=True,
        choices=[(state, state.replace("_", " ")) for state in SLEEP_STATES if state],
        help_text="Empty: awake.",
    )
    sleep_since = models.DateTimeField(null=True, blank=True)
    sleep_note = models.CharField(
        max_length=500, blank=True, help_text="Why it is awake though it is to sleep."
    )
    woke_in_seconds = models.FloatField(
        null=True, blank=True, help_text="From the wish to answering, when it was woken last."
    )
    slow_since = models.DateTimeField(null=True, blank=True)
    slow_reason = models.CharField(max_length=500, blank=True)
    # Status
    status = models.CharField(max_length=16, choices=REPLICA.choices, default=REPLICA.initial)
    reason = models.TextField(blank=True)
    healing_note = models.CharField(
        max_length=1000, blank=True, help_text="What healing of this replica waits for."
    )
    failed_at = models.DateTimeField(
        null=True, blank=True, help_text="When its agent gave it up; cleared when a person starts it again."
    )
    status_changed_at = models.DateTimeField(db_default=Now())
    created_at = models.DateTimeField(db_default=Now())
    ready_at = models.DateTimeField(null=True, blank=True)
    stopped_at = models.DateTimeField(null=True, blank=True)
    drain_deadline_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering: ClassVar[list[str]] = ["name"]
        indexes: ClassVar[list[models.Index]] = [
            models.Index(fields=["deployment", "status"], name="replica_by_deployment"),
            models.Index(fields=["node"], condition=~models.Q(status="stopped"), name="replica_live_by_node"),
            models.Index(
                fields=["start_waits_since"],
                condition=models.Q(status="placed", start_waits_since__isnull=False),
                name="replica_waits_to_start",
            ),
        ]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.CheckConstraint(
                condition=models.Q(status__in=REPLICA.statuses), name="replica_status_known"
            ),
            models.CheckConstraint(
                condition=models.Q(status__in=["pending", "stopped"]) | models.Q(node__isnull=False),
                name="replica_has_a_node_once_placed",
            ),
            models.UniqueConstraint(
                fields=["node", "address"],
                condition=~models.Q(status="stopped") & ~models.Q(address=""),
                name="replica_address_once_per_node",
            ),
            models.CheckConstraint(
                condition=models.Q(role__in=["serving", "standby"]), name="replica_role_known"
            ),
            models.CheckConstraint(
                condition=models.Q(sleep_state__in=SLEEP_STATES), name="replica_sleep_known"
            ),
            models.UniqueConstraint(
                fields=["replaces"],
                condition=models.Q(wanted="run") & ~models.Q(status="stopped"),
                name="replica_replaced_by_one_at_a_time",
            ),
        ]

    def __str__(self) -> str:
        """Return the name."""
        return self.name


class NodeWish(models.Model):
    """Revision of what a node was last told to run."""

    node = models.OneToOneField(Node, on_delete=models.CASCADE, related_name="wish")
    revision = models.BigIntegerField(default=0)
    content_sha256 = models.CharField(max_length=64, blank=True)

    class Meta:
        ordering: ClassVar[list[str]] = ["node"]

    def __str__(self) -> str:
        """Return node and revision."""
        return f"{self.node} wish {self.revision}"
