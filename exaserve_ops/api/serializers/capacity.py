"""Capacity plans: the question, and the answer with its arithmetic."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from exaserve_ops.api.serializers.strict import StrictSerializer
from exaserve_ops.serving.domain.engine_launch import SGLANG, TORCH, VLLM
from exaserve_ops.serving.domain.fleet_plan import (
    ASKED,
    MEMORY,
    RATE,
    FleetPlan,
    WorkloadPlan,
    WorkloadRefusal,
)
from exaserve_ops.serving.domain.kv_bytes import KvBytes, KvTerm
from exaserve_ops.serving.domain.memory_fixes import Fix
from exaserve_ops.serving.domain.memory_overhead import Estimate
from exaserve_ops.serving.domain.memory_plan import FITS, NOT, TIGHT, MemoryPlan
from exaserve_ops.serving.selectors.memory_numbers import DeploymentMemory, Observed

MAX_BYTES = 1 << 50
MAX_TOKENS = 100_000_000
MAX_REQUESTS = 10_000_000
MAX_WORKLOADS = 20
MAX_PER_NODE = 1024


def _tokens(help_text: str, **more: Any) -> serializers.IntegerField:  # noqa: ANN401 - of the field
    return serializers.IntegerField(min_value=1, max_value=MAX_TOKENS, help_text=help_text, **more)


def _bytes(help_text: str) -> serializers.IntegerField:
    return serializers.IntegerField(
        min_value=1, max_value=MAX_BYTES, required=False, allow_null=True, default=None, help_text=help_text
    )


def _count(help_text: str) -> serializers.IntegerField:
    return serializers.IntegerField(
        min_value=1,
        max_value=MAX_REQUESTS,
        required=False,
        allow_null=True,
        default=None,
        help_text=help_text,
    )


def _rate(help_text: str) -> serializers.FloatField:
    return serializers.FloatField(
        min_value=1e-6, max_value=1e9, required=False, allow_null=True, default=None, help_text=help_text
    )


class CapacityAcceleratorSerializer(StrictSerializer):
    """Accelerators of a node."""

    name = serializers.CharField(
        max_length=120,
        required=False,
        default="",
        help_text="As nodes of this fleet report it; gives the size.",
    )
    kind = serializers.ChoiceField(choices=["gpu", "cpu"], required=False, default="gpu")
    memory_bytes = _bytes("Of one accelerator; not needed with a name that the fleet has.")
    per_node = serializers.IntegerField(
        min_value=1, max_value=MAX_PER_NODE, required=False, allow_null=True, default=None
    )


class CapacityLoadSerializer(StrictSerializer):
    """What clients ask of one model."""

    prompt_tokens = _tokens("Mean of a request.")
    output_tokens = _tokens("Mean of a request.")
    limit_tokens = _tokens("Prompt and answer of the longest request.")
    requests_per_second = _rate("Mean, in the busiest minutes.")
    concurrency = _count("Requests that run at once, where that is what is known.")
    sessions = _count("Conversations whose KV shall stay, whether they run or not.")
    replicas = _count("As many as that, whatever the load.")


class CapacityWorkloadSerializer(StrictSerializer):
    """One model, how it runs, and its load."""

    model = serializers.CharField(
        max_length=120, required=False, default="", help_text="Name of a registered model."
    )
    name = serializers.CharField(max_length=120, required=False, default="", help_text="With `config`.")
    config = serializers.DictField(
        required=False, default=dict, help_text="A model's config.json, where it is not registered."
    )
    weights_bytes = _bytes("Sum of its weight files; of a registered model it is known.")
    engine = serializers.ChoiceField(choices=[VLLM, SGLANG, TORCH], required=False, default=VLLM)
    engine_version = serializers.RegexField(r"^[0-9A-Za-z.+-]*$", max_length=40, required=False, default="")
    engine_options = serializers.DictField(
        required=False, default=dict, help_text="As on the engine's command line, with or without dashes."
    )
    load = CapacityLoadSerializer()
    sequences_per_replica = _count("To be held by each replica at once; without: all that its memory holds.")
    memory_per_replica_bytes = _bytes(
        "Set aside on each accelerator, as a deployment of the torch engine does."
    )
    seconds_per_request = _rate("How long a request runs, on average.")
    tokens_per_second_per_replica = _rate("Most output tokens of one replica.")
    measured_from = serializers.CharField(
        max_length=60,
        required=False,
        default="",
        help_text="A deployment whose rates stand in for these two.",
    )
    measured_kv_bytes_per_token = _bytes("As an engine reported it; for a layout that is not known.")
    accept_upper_bound = serializers.BooleanField(
        required=False, default=False, help_text="Plan an unknown layout with its upper bound."
    )


class CapacityRequestSerializer(StrictSerializer):
    """Asks what fits and how many nodes a load needs."""

    accelerator = CapacityAcceleratorSerializer()
    spare_ratio = serializers.FloatField(
        min_value=0.0,
        max_value=0.9,
        required=False,
        default=0.0,
        help_text="Of all nodes: failures, standbys.",
    )
    workloads = serializers.ListField(
        child=CapacityWorkloadSerializer(), min_length=1, max_length=MAX_WORKLOADS
    )


class KvTermSerializer(serializers.Serializer[KvTerm]):
    """One product of the arithmetic."""

    name = serializers.CharField()
    formula = serializers.CharField()
    bytes = serializers.IntegerField()
    per = serializers.CharField(help_text="`token`, `token up to 4,096` or `sequence`.")


class KvWindowSerializer(serializers.Serializer[Any]):
    """Layers that keep no more than so many of the newest tokens."""

    bytes_per_token = serializers.IntegerField()
    window_tokens = serializers.IntegerField()


class KvBytesSerializer(serializers.Serializer[KvBytes]):
    """KV memory of one sequence."""

    element_type = serializers.CharField(source="element.name")
    growth_bytes_per_token = serializers.IntegerField(help_text="Of the whole model, before any split.")
    growth_bytes_per_token_each = serializers.IntegerField(
        source="growth_bytes_each", help_text="Of the accelerator that holds most."
    )
    windows = KvWindowSerializer(many=True, source="whole.windows")
    capped_bytes = serializers.IntegerField(
        source="whole.capped_bytes", help_text="What windows hold at most."
    )
    state_bytes = serializers.IntegerField(source="whole.state_bytes", help_text="Fixed, for each sequence.")
    terms = KvTermSerializer(many=True)


class EstimateSerializer(serializers.Serializer[Estimate]):
    """A figure between two bounds."""

    name = serializers.CharField()
    low_bytes = serializers.IntegerField()
    high_bytes = serializers.IntegerField()
    known_from = serializers.CharField(source="source")


class FixSerializer(serializers.Serializer[Fix]):
    """A change that would make it fit, tried in full."""

    kind = serializers.CharField()
    text = serializers.CharField()
    options = serializers.SerializerMethodField()
    verdict = serializers.ChoiceField(choices=[FITS, TIGHT])

    def get_options(self, fix: Fix) -> dict[str, str]:
        """Options to set."""
        return dict(fix.options)


class MemoryPlanSerializer(serializers.Serializer[MemoryPlan]):
    """One replica on one accelerator."""

    verdict = serializers.ChoiceField(choices=[FITS, TIGHT, NOT])
    why = serializers.CharField()
    weights_bytes = serializers.IntegerField()
    needed_low_bytes = serializers.IntegerField(help_text="Weights, one longest sequence, least overhead.")
    needed_bytes = serializers.IntegerField(help_text="The same with most overhead.")
    wanted_bytes = serializers.IntegerField(help_text="With all sequences that are asked for.")
    reserved_bytes = serializers.IntegerField(source="claim.bytes", help_text="What its flags take.")
    reserved_by = serializers.CharField(source="claim.rule")
    kv_pool_low_bytes = serializers.IntegerField(source="claim.pool_low_bytes")
    kv_pool_high_bytes = serializers.IntegerField(source="claim.pool_high_bytes")
    overhead = EstimateSerializer(many=True)
    limit_tokens = serializers.IntegerField(help_text="Longest sequence that is served.")
    limit_by = serializers.CharField(source="length.why")
    most_tokens = serializers.IntegerField(help_text="Longest sequence that its KV memory surely holds.")
    sequence_at_limit_bytes = serializers.IntegerField()
    sequence_at_mean_bytes = serializers.IntegerField()
    sequences_at_mean = serializers.IntegerField(help_text="Held at once, surely.")
    sequences_at_limit = serializers.IntegerField()
    kv = KvBytesSerializer()
    problems = serializers.ListField(child=serializers.CharField())


class WorkloadPlanSerializer(serializers.Serializer[WorkloadPlan]):
    """The answer for one model."""

    name = serializers.CharField()
    memory = MemoryPlanSerializer()
    accelerators_per_replica = serializers.IntegerField(source="ways")
    replicas_per_group = serializers.IntegerField(
        source="per_group", help_text="On one accelerator, or on one group of those that hold one replica."
    )
    replicas_per_group_without_sharing = serializers.IntegerField(source="per_group_unshared")
    replicas_per_group_with_sharing = serializers.IntegerField(
        source="per_group_shared", help_text="If replicas share one copy of the weights."
    )
    shares_weights = serializers.BooleanField(help_text="Whether they do, on such accelerators.")
    bytes_per_replica = serializers.IntegerField(source="bytes_each")
    sequences_per_replica = serializers.IntegerField(source="sequences_each")
    concurrency = serializers.FloatField(allow_null=True, help_text="Requests at once; null: not known.")
    replicas_for_memory = serializers.IntegerField(allow_null=True)
    replicas_for_rate = serializers.IntegerField(allow_null=True)
    replicas = serializers.IntegerField()
    decided_by = serializers.ChoiceField(choices=[MEMORY, RATE, ASKED])
    share_option = serializers.SerializerMethodField(
        help_text="Option to set so that so many replicas start beside one another."
    )
    fixes = FixSerializer(many=True)
    assumptions = serializers.ListField(child=serializers.CharField())

    def get_share_option(self, plan: WorkloadPlan) -> dict[str, str]:
        """The option and its value; empty if none is needed."""
        return dict([plan.share_hint]) if plan.share_hint else {}


class WorkloadRefusalSerializer(serializers.Serializer[WorkloadRefusal]):
    """Why one model cannot be planned, and what would help."""

    name = serializers.CharField()
    reason = serializers.CharField()
    upper_bound_bytes_per_token = serializers.IntegerField(allow_null=True)
    memory = MemoryPlanSerializer(allow_null=True)
    fixes = FixSerializer(many=True)


class CapacityPlanSerializer(serializers.Serializer[FleetPlan]):
    """How many nodes, and why."""

    nodes = serializers.IntegerField(help_text="Spare ones included.")
    nodes_for_load = serializers.IntegerField()
    nodes_spare = serializers.IntegerField()
    replicas = serializers.IntegerField()
    workloads = WorkloadPlanSerializer(many=True)
    refusals = WorkloadRefusalSerializer(many=True, help_text="Models that are not counted.")
    assumptions = serializers.ListField(child=serializers.CharField())


class ObservedMemorySerializer(serializers.Serializer[Observed]):
    """What one replica takes."""

    replica = serializers.UUIDField(source="replica.pk")
    name = serializers.CharField(source="replica.name")
    bytes = serializers.IntegerField()
    over_bytes = serializers.IntegerField(help_text="Clearly beyond what is reserved; 0: within.")


class DeploymentMemorySerializer(serializers.Serializer[DeploymentMemory]):
    """Three numbers of one replica, told apart."""

    needed_low_bytes = serializers.IntegerField(allow_null=True)
    needed_bytes = serializers.IntegerField(allow_null=True, help_text="With overhead at its highest.")
    needed_unknown = serializers.CharField(source="unknown", help_text="Why these are not known.")
    reserved_bytes = serializers.IntegerField(help_text="What placement counts with; 0: not known.")
    reserved_by = serializers.CharField()
    observed_bytes = serializers.IntegerField(allow_null=True, help_text="Most of a replica; null: not told.")
    observed = ObservedMemorySerializer(many=True)
    verdict = serializers.CharField(help_text="Of the plan; empty without one.")
    complaint = serializers.SerializerMethodField(
        help_text="What an engine said that ended for want of memory."
    )
    complaint_options = serializers.SerializerMethodField(help_text="Options that would make it start.")

    def get_complaint(self, memory: DeploymentMemory) -> str:
        """In words; empty without."""
        return memory.complaint.text if memory.complaint else ""

    def get_complaint_options(self, memory: DeploymentMemory) -> dict[str, str]:
        """By name; empty without."""
        return dict(memory.complaint.options) if memory.complaint else {}
