"""Models, deployments and replicas."""

from __future__ import annotations

import uuid
from typing import Any, ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models.functions import Now

from exaserve_ops.inventory.models import Accelerator, Node
from exaserve_ops.serving.domain.architecture import described_config
from exaserve_ops.serving.domain.lifecycle import DEPLOYMENT, REPLICA
from exaserve_ops.serving.domain.model_import import MODEL_IMPORT
from exaserve_ops.serving.domain.reach import REACHES, UNCHECKED


class Model(models.Model):
    """Weights and tokenizer, named by digest. Immutable: other bytes are another model."""

    class Storage(models.TextChoices):
        """What replicas start from."""

        IN_PLACE = "in_place", "where its source lies"
        NODE = "node", "a copy on each node's own disk"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(
        max_length=120, unique=True, help_text="What clients send as `model` unless overridden."
    )
    digest = models.CharField(max_length=80, help_text="`sha256:` of the list of files.")
    source = models.CharField(max_length=1000, help_text="`file:///folder` that nodes can read.")
    storage = models.CharField(
        max_length=8,
        choices=Storage.choices,
        default=Storage.IN_PLACE,
        help_text="Whether replicas start from the source itself, or from a copy on their node's disk.",
    )
    origins = models.JSONField(
        default=list,
        blank=True,
        help_text="Where nodes fetch it, nearest first: kind, location, secret. Empty: its source.",
    )
    architecture = models.JSONField(
        default=dict, blank=True, help_text="Facts from config.json: family, layers, heads, limits."
    )
    config = models.JSONField(
        default=dict, blank=True, help_text="config.json as it was read: what memory is planned with."
    )
    parameter_count = models.BigIntegerField(null=True, blank=True)
    weights_bytes = models.BigIntegerField(default=0)
    kv_bytes_per_token = models.BigIntegerField(
        null=True, blank=True, help_text="What each further token takes; null: the layout is not known."
    )
    max_context_tokens = models.PositiveIntegerField(null=True, blank=True)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        ordering: ClassVar[list[str]] = ["name"]

    def __str__(self) -> str:
        """Return the name."""
        return self.name

    @property
    def planning_config(self) -> dict[str, Any]:
        """config.json, or one that says the same as the facts, for a model registered without."""
        known: dict[str, Any] = dict(self.config)
        return known or described_config(self.architecture, self.max_context_tokens or 0)


class ModelFile(models.Model):
    """One file of a model."""

    model = models.ForeignKey(Model, on_delete=models.CASCADE, related_name="files")
    path = models.CharField(max_length=500)
    size_bytes = models.BigIntegerField()
    sha256 = models.CharField(max_length=64)

    class Meta:
        ordering: ClassVar[list[str]] = ["path"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["model", "path"], name="model_file_once"),
        ]

    def __str__(self) -> str:
        """Return the path."""
        return self.path


class ModelManifest(models.Model):
    """Sizes and digests of a model's files and of their pieces: what nodes fetch and check it by.

    Of its own, since it may be megabytes and only the controllers read it.
    """

    model = models.OneToOneField(Model, on_delete=models.CASCADE, primary_key=True, related_name="manifest")
    digest = models.CharField(max_length=80, db_index=True, help_text="`sha256:` of the bytes; names it.")
    body = models.BinaryField()

    def __str__(self) -> str:
        """Return the digest."""
        return self.digest


class ModelImport(models.Model):
    """A model that a node fetches from a hub, a server or a bucket, until it is registered."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=120, help_text="Of the model, once it is registered.")
    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="model_imports")
    # Desired
    kind = models.CharField(max_length=8, help_text="`hub`, `http` or `s3`.")
    location = models.CharField(max_length=1000)
    secret = models.CharField(max_length=64, blank=True, help_text="Name of a secret on the node.")
    revision = models.CharField(
        max_length=200, blank=True, help_text="Of a hub: branch, tag or commit; empty: main."
    )
    files = models.JSONField(default=list, blank=True, help_text="Names or patterns; empty: what is needed.")
    attempt = models.PositiveIntegerField(default=1)
    reason = models.CharField(max_length=500, help_text="Why; shown in the history.")
    asked_by = models.CharField(max_length=120)
    # Status
    status = models.CharField(max_length=16, choices=MODEL_IMPORT.choices, default=MODEL_IMPORT.initial)
    why = models.CharField(max_length=1000, blank=True, help_text="Why it stands so, or what it is doing.")
    fixed_location = models.CharField(
        max_length=1000, blank=True, help_text="The place as it stays: of a hub with the commit."
    )
    file_count = models.PositiveIntegerField(default=0)
    files_done = models.PositiveIntegerField(default=0)
    total_bytes = models.BigIntegerField(default=0)
    have_bytes = models.BigIntegerField(default=0)
    bytes_per_second = models.FloatField(default=0.0)
    eta_seconds = models.FloatField(null=True, blank=True)
    model = models.ForeignKey(Model, on_delete=models.SET_NULL, null=True, blank=True, related_name="imports")
    created_at = models.DateTimeField(db_index=True)
    status_changed_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering: ClassVar[list[str]] = ["-created_at"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(
                fields=["name"],
                condition=models.Q(status__in=MODEL_IMPORT.live),
                name="model_import_one_of_a_name",
            ),
            models.CheckConstraint(
                condition=models.Q(status__in=MODEL_IMPORT.statuses), name="model_import_status_known"
            ),
        ]

    def __str__(self) -> str:
        """Return the name and where it comes from."""
        return f"{self.name} from {self.location}"


class FoundPart(models.Model):
    """A part of what a node found for an import; gone when the model is registered."""

    model_import = models.ForeignKey(ModelImport, on_delete=models.CASCADE, related_name="parts")
    digest = models.CharField(max_length=64, help_text="Of all parts together.")
    index = models.PositiveIntegerField()
    count = models.PositiveIntegerField()
    data = models.BinaryField()

    class Meta:
        ordering: ClassVar[list[str]] = ["model_import", "index"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["model_import", "index"], name="found_part_once"),
        ]

    def __str__(self) -> str:
        """Return which part of how many it is."""
        return f"{self.index + 1} of {self.count}"


class CompiledSet(models.Model):
    """What an engine compiled for a model on one kind of hardware: put into engines' caches on nodes.

    Compiled code is code: who registers it lets it run on nodes. It is fetched and verified as weights are.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    model = models.ForeignKey(Model, on_delete=models.CASCADE, related_name="compiled_sets")
    engine = models.CharField(max_length=32)
    hardware = models.CharField(
        max_length=120, blank=True, help_text="Name or kind of an accelerator, as nodes show it. Empty: any."
    )
    digest = models.CharField(max_length=80, help_text="`sha256:` of the list of files.")
    source = models.CharField(max_length=1000)
    origins = models.JSONField(default=list, blank=True, help_text="As of a model.")
    total_bytes = models.BigIntegerField()
    file_count = models.PositiveIntegerField()
    manifest_digest = models.CharField(max_length=80, db_index=True)
    manifest_body = models.BinaryField()
    registered_by = models.CharField(max_length=120)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        ordering: ClassVar[list[str]] = ["model", "engine", "hardware"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["model", "engine", "hardware"], name="compiled_set_once"),
        ]

    def __str__(self) -> str:
        """Return what it is for."""
        return f"{self.model} for {self.engine} on {self.hardware or 'any hardware'}"


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
    accelerators_per_replica = models.PositiveSmallIntegerField(default=1)
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
            models.UniqueConstraint(
                fields=["replaces"],
                condition=models.Q(wanted="run") & ~models.Q(status="stopped"),
                name="replica_replaced_by_one_at_a_time",
            ),
        ]

    def __str__(self) -> str:
        """Return the name."""
        return self.name


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
