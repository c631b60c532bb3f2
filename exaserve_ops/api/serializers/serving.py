"""Models, deployments and replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, cast

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from exaserve_ops.api.serializers.members import ReplicaMemberSerializer
from exaserve_ops.api.serializers.strict import StrictSerializer
from exaserve_ops.inventory.models import Accelerator
from exaserve_ops.serving.domain.accelerator_wish import ANY, MOST_BYTES, MOST_PERCENT
from exaserve_ops.serving.models import Deployment, Model, ModelFile, Replica
from exaserve_ops.serving.services.deployments import BOUNDS, MAX_REPLICAS
from exaserve_ops.serving.services.models import FolderReading

MAX_SECONDS = 24 * 3600


class ModelFileSerializer(serializers.ModelSerializer[ModelFile]):
    """One file of a model."""

    class Meta:
        model = ModelFile
        fields: ClassVar[list[str]] = ["path", "size_bytes", "sha256"]


class ModelSerializer(serializers.ModelSerializer[Model]):
    """A model, without its files."""

    class Meta:
        model = Model
        fields: ClassVar[list[str]] = [
            "id",
            "name",
            "digest",
            "source",
            "architecture",
            "parameter_count",
            "weights_bytes",
            "kv_bytes_per_token",
            "max_context_tokens",
            "created_at",
        ]


class ModelDetailSerializer(ModelSerializer):
    """A model with its files."""

    files = ModelFileSerializer(many=True)

    class Meta(ModelSerializer.Meta):
        fields: ClassVar[list[str]] = [*ModelSerializer.Meta.fields, "files"]


class ModelRequestSerializer(StrictSerializer):
    """Asks to register a model."""

    name = serializers.RegexField(
        r"^[A-Za-z0-9][A-Za-z0-9._/-]*$",
        max_length=120,
        error_messages={"invalid": "Use letters, digits, dots, dashes, underscores and slashes."},
    )
    folder = serializers.CharField(
        max_length=900,
        help_text="Absolute path, the same here and on the nodes, with config.json and weights.",
    )


class FolderReadingSerializer(serializers.Serializer[FolderReading]):
    """How far the hashing of a folder is."""

    read_bytes = serializers.IntegerField()
    total_bytes = serializers.IntegerField()
    read_ratio = serializers.FloatField()


class DeploymentSerializer(serializers.ModelSerializer[Deployment]):
    """What is wanted, with counts of what there is."""

    model_name = serializers.CharField(source="model.name")
    accelerator = serializers.CharField(
        source="placement.accelerator", default=ANY, help_text="`any`, `whole`, `slice` or `slice:3g.40gb`."
    )
    slice_memory_bytes = serializers.IntegerField(
        source="placement.slice_memory_bytes", default=0, help_text="Least memory of a slice."
    )
    mps_thread_percent = serializers.IntegerField(
        source="placement.mps_thread_percent", default=0, help_text="0: no such limit."
    )
    mps_memory_bytes = serializers.IntegerField(
        source="placement.mps_memory_bytes", default=0, help_text="Of each accelerator. 0: no such limit."
    )
    spill = serializers.BooleanField(
        source="placement.spill", default=False, help_text="Whole cards may be taken while no slice is free."
    )
    spill_reason = serializers.CharField(source="placement.spill_reason", default="")
    nodes = serializers.SerializerMethodField(help_text="Nodes that replicas may run on; empty is any.")
    ready_replicas = serializers.IntegerField(source="ready_count")
    kept_replicas = serializers.IntegerField(source="kept_count", help_text="Neither ended nor let go of.")
    ready_standbys = serializers.IntegerField(source="standby_ready_count")
    kept_standbys = serializers.IntegerField(source="standby_kept_count")
    asleep_standbys = serializers.IntegerField(source="standby_asleep_count")
    failed_replicas = serializers.IntegerField(source="failed_count")

    class Meta:
        model = Deployment
        fields: ClassVar[list[str]] = [
            "id",
            "name",
            "model",
            "model_name",
            "served_name",
            "generation",
            "release_number",
            "replicas",
            "engine",
            "engine_options",
            "replica_memory_bytes",
            "accelerators_per_replica",
            "nodes_per_replica",
            "accelerator",
            "slice_memory_bytes",
            "mps_thread_percent",
            "mps_memory_bytes",
            "spill",
            "spill_reason",
            "nodes",
            "drain_seconds",
            "start_seconds",
            "stall_seconds",
            "standbys",
            "standbys_sleep",
            "drain_slow",
            "requires_go",
            "balance_sessions",
            "balance_from_percent",
            "balance_gap_percent",
            "balancing_since",
            "balancing_note",
            "status",
            "ready_replicas",
            "kept_replicas",
            "ready_standbys",
            "kept_standbys",
            "asleep_standbys",
            "failed_replicas",
            "created_at",
            "updated_at",
        ]

    def get_nodes(self, deployment: Deployment) -> list[str]:
        """Names of the nodes that replicas may run on."""
        return list(deployment.placement.get("nodes", ()))


@extend_schema_field(OpenApiTypes.ANY)
class EngineOptionField(serializers.Field[Any, Any, Any, Any]):
    """Text, a finite number, true or false."""

    def to_internal_value(self, data: Any) -> str | float | bool:  # noqa: ANN401 - any JSON
        """Return the value. Raises `ValidationError`."""
        if isinstance(data, str):
            return str(serializers.CharField(max_length=1000, allow_blank=True).run_validation(data))
        if isinstance(data, bool | int) or (isinstance(data, float) and math.isfinite(data)):
            return cast("float | bool", data)
        raise serializers.ValidationError("Give text, a number, true or false.")

    def to_representation(self, value: Any) -> Any:  # noqa: ANN401 - any JSON
        """Return it as it is."""
        return value


def replica_count(**options: Any) -> serializers.IntegerField:  # noqa: ANN401 - keywords of the field
    return serializers.IntegerField(min_value=0, max_value=MAX_REPLICAS, **options)


def _seconds(**options: Any) -> serializers.IntegerField:  # noqa: ANN401 - keywords of the field
    return serializers.IntegerField(min_value=0, max_value=MAX_SECONDS, required=False, **options)


def _nodes(**options: Any) -> serializers.ListField:  # noqa: ANN401 - keywords of the field
    names = serializers.CharField(max_length=120)
    return serializers.ListField(child=names, max_length=10_000, required=False, **options)


def _accelerator(**options: Any) -> serializers.CharField:  # noqa: ANN401 - keywords of the field
    words = "`any`, `whole` cards, a `slice`, or one of a profile: `slice:3g.40gb`."
    return serializers.CharField(max_length=60, required=False, help_text=words, **options)


def _slice_bytes(**options: Any) -> serializers.IntegerField:  # noqa: ANN401 - keywords of the field
    return serializers.IntegerField(
        min_value=0, max_value=MOST_BYTES, required=False, help_text="Least memory of a slice.", **options
    )


def _spill(**options: Any) -> serializers.BooleanField:  # noqa: ANN401 - keywords of the field
    words = "Whole cards may be taken while no slice is free; say why in `spill_reason`."
    return serializers.BooleanField(required=False, help_text=words, **options)


def _balance(**options: Any) -> serializers.BooleanField:  # noqa: ANN401 - keywords of the field
    words = "Move sessions off replicas whose KV memory they overfill, to emptier ones."
    return serializers.BooleanField(required=False, help_text=words, **options)


def _balance_percent(name: str, words: str, **options: Any) -> serializers.IntegerField:  # noqa: ANN401 - keywords of the field
    least, most = BOUNDS[name]
    return serializers.IntegerField(
        min_value=least, max_value=most, required=False, help_text=words, **options
    )


def _balance_from(**options: Any) -> serializers.IntegerField:  # noqa: ANN401 - keywords of the field
    words = "From how full a replica's KV memory is of active sessions."
    return _balance_percent("balance_from_percent", words, **options)


def _balance_gap(**options: Any) -> serializers.IntegerField:  # noqa: ANN401 - keywords of the field
    words = "And how many points emptier another one is; it ends at a third of them."
    return _balance_percent("balance_gap_percent", words, **options)


def _spill_reason(**options: Any) -> serializers.CharField:  # noqa: ANN401 - keywords of the field
    return serializers.CharField(max_length=300, required=False, allow_blank=True, **options)


_SLEEP = (
    "A standby that is ready gives its accelerators' memory back until it is to serve; only with an engine"
    " and options that can."
)


_NODES = (
    "More than 1: each replica runs on so many nodes of one supernode at once, with its accelerators and"
    " memory on each; the engine's parallel sizes must make up as many accelerators."
)


class DeploymentRequestSerializer(StrictSerializer):
    """Asks for a new deployment."""

    name = serializers.SlugField(max_length=60)
    model = serializers.UUIDField()
    replicas = replica_count()
    engine = serializers.CharField(max_length=32, help_text="Such as `torch`; nodes list what they have.")
    engine_options = serializers.DictField(child=EngineOptionField(), required=False, default=dict)
    served_name = serializers.CharField(
        max_length=120,
        required=False,
        default="",
        allow_blank=True,
        help_text="What clients send as `model`; empty: the model's name.",
    )
    nodes = _nodes(default=list)
    replica_memory_bytes = serializers.IntegerField(
        min_value=0, max_value=MOST_BYTES, required=False, default=0, help_text="0: computed from the model."
    )
    accelerators_per_replica = serializers.IntegerField(
        min_value=1, max_value=1024, required=False, default=1, help_text="On each node of a replica."
    )
    nodes_per_replica = serializers.IntegerField(
        min_value=1, max_value=64, required=False, default=1, help_text=_NODES
    )
    drain_seconds = _seconds(default=60)
    start_seconds = _seconds(default=0, help_text="0: computed from the size of the weights.")
    stall_seconds = _seconds(
        default=60, help_text="Requests run and no token comes for so long: restarted. 0: never."
    )
    standbys = replica_count(required=False, default=0, help_text="Started and loaded, outside routing.")
    standbys_sleep = serializers.BooleanField(required=False, default=False, help_text=_SLEEP)
    drain_slow = serializers.BooleanField(
        required=False, default=False, help_text="Replace replicas that stay slower than their peers."
    )
    requires_go = serializers.BooleanField(
        required=False, default=False, help_text="A rollout needs a validation that ended with go."
    )
    balance_sessions = _balance(default=True)
    balance_from_percent = _balance_from(default=90)
    balance_gap_percent = _balance_gap(default=30)
    accelerator = _accelerator(default=ANY)
    slice_memory_bytes = _slice_bytes(default=0)
    mps_thread_percent = serializers.IntegerField(
        min_value=0,
        max_value=MOST_PERCENT,
        required=False,
        default=0,
        help_text="Most of a card's threads, as a client of NVIDIA's MPS. 0: no such limit.",
    )
    mps_memory_bytes = serializers.IntegerField(
        min_value=0,
        max_value=MOST_BYTES,
        required=False,
        default=0,
        help_text="Most memory that it may allocate on each accelerator, as a client of MPS. 0: no limit.",
    )
    spill = _spill(default=False)
    spill_reason = _spill_reason(default="")

    def validate_engine_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Refuse names that no store could keep."""
        for name in options:
            serializers.CharField(max_length=100).run_validation(name)
        return options


_BY_ROLLOUT = (
    "It is fixed while replicas run with it: ask for a rollout (POST /api/v1/rollouts), which replaces them,"
    " or for a new deployment."
)
_FOR_LIFE = (
    "It is fixed for the deployment's life: ask for a new deployment, and delete this one when it serves."
)
_FIXED: Mapping[str, str] = dict.fromkeys(
    ("name", "served_name", "nodes_per_replica", "accelerators_per_replica"), _FOR_LIFE
) | dict.fromkeys(("model", "engine", "engine_options", "replica_memory_bytes"), _BY_ROLLOUT)


class DeploymentChangeSerializer(StrictSerializer):
    """Asks to change a deployment."""

    refusals: ClassVar[Mapping[str, str]] = _FIXED

    replicas = replica_count(required=False)
    nodes = _nodes()
    drain_seconds = _seconds()
    start_seconds = _seconds(help_text="0: computed from the size of the weights.")
    stall_seconds = _seconds()
    standbys = replica_count(required=False)
    standbys_sleep = serializers.BooleanField(required=False, help_text=_SLEEP)
    drain_slow = serializers.BooleanField(required=False)
    requires_go = serializers.BooleanField(required=False)
    balance_sessions = _balance()
    balance_from_percent = _balance_from()
    balance_gap_percent = _balance_gap()
    accelerator = _accelerator()
    slice_memory_bytes = _slice_bytes()
    spill = _spill()
    spill_reason = _spill_reason()
    generation = serializers.IntegerField(
        min_value=1, max_value=(1 << 63) - 1, required=False, help_text="The one you read; or use If-Match."
    )


class MemoryUserSerializer(serializers.Serializer[Any]):
    """Who is in the way of a launch that waits for memory."""

    kind = serializers.ChoiceField(
        choices=["stranger", "leaving", "running", "unnamed"],
        help_text="A process that is not ours; a replica that is ending; one that has more than it is "
        "promised; no process that is named, such as memory that the driver has yet to give back.",
    )
    pid = serializers.IntegerField(help_text="0 where no process is meant.")
    replica_id = serializers.CharField()
    command = serializers.CharField()
    memory_bytes = serializers.IntegerField(allow_null=True, help_text="null: the tool does not say.")


class MemoryWaitSerializer(serializers.Serializer[Any]):
    """What memory a launch waits for, as last seen by the node's agent."""

    place = serializers.CharField(help_text="UUID of the accelerator, or `host`.")
    needed_bytes = serializers.IntegerField()
    free_bytes = serializers.IntegerField()
    total_bytes = serializers.IntegerField()
    at_most_seconds = serializers.FloatField(
        allow_null=True,
        help_text="It is launched all the same after so long; null: processes that are not ours keep it out, "
        "and it is replaced elsewhere after a minute.",
    )
    holders = MemoryUserSerializer(many=True)


class ReplicaSerializer(serializers.ModelSerializer[Replica]):
    """One replica: what is wanted of it, what was seen of it, and its status."""

    deployment_name = serializers.CharField(source="deployment.name")
    model_name = serializers.CharField(source="release.model.name")
    release_number = serializers.IntegerField(source="release.number")
    node_name = serializers.CharField(source="node.name", default=None)
    leaving_because = serializers.CharField(
        source="departure.why",
        default="",
        help_text="Why its sessions leave it while it is ready; empty: they stay.",
    )
    memory_wait = MemoryWaitSerializer(
        read_only=True, allow_null=True, help_text="What memory its launch waits for; null: none."
    )
    accelerators: serializers.SlugRelatedField[Accelerator] = serializers.SlugRelatedField(
        "uuid", many=True, read_only=True
    )
    members = ReplicaMemberSerializer(
        many=True, read_only=True, help_text="Its parts, if it runs on several nodes; the first is its head."
    )

    class Meta:
        model = Replica
        fields: ClassVar[list[str]] = [
            "id",
            "name",
            "deployment",
            "deployment_name",
            "release",
            "release_number",
            "model_name",
            "node",
            "node_name",
            "accelerators",
            "memory_bytes",
            "node_count",
            "gang_epoch",
            "gang_began_at",
            "gang_ready_by",
            "gang_retry_at",
            "gang_crashes",
            "members",
            "role",
            "replaces",
            "wanted",
            "generation",
            "observed_generation",
            "attempt",
            "restarts",
            "pid",
            "address",
            "ports",
            "start_took_seconds",
            "exit_attempt",
            "exit_code",
            "exit_signal",
            "exit_after_seconds",
            "reach",
            "unroutable_reason",
            "held_by_pids",
            "held_since",
            "memory_wait",
            "memory_since",
            "sleep_state",
            "sleep_since",
            "sleep_note",
            "woke_in_seconds",
            "slow_since",
            "slow_reason",
            "status",
            "reason",
            "healing_note",
            "status_changed_at",
            "created_at",
            "ready_at",
            "stopped_at",
            "drain_deadline_at",
            "handed_over_at",
            "left_behind",
            "leaving_because",
        ]


class ReplicaDetailSerializer(ReplicaSerializer):
    """A replica with its newest telemetry."""

    live = serializers.DictField(
        allow_null=True, read_only=True, help_text="Newest telemetry; null where nothing was reported."
    )

    class Meta(ReplicaSerializer.Meta):
        fields: ClassVar[list[str]] = [*ReplicaSerializer.Meta.fields, "live"]
