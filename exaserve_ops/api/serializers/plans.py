"""Plans that are shown and not carried out, and what a loss would cost."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from exaserve_ops.api.serializers.serving import replica_count
from exaserve_ops.api.serializers.strict import StrictSerializer
from exaserve_ops.serving.domain.gangs import Member
from exaserve_ops.serving.domain.placement import Placement
from exaserve_ops.serving.domain.spread import DomainLoss, SpreadView
from exaserve_ops.serving.domain.steps import (
    ACTIONS,
    Create,
    FinishDeletion,
    Hold,
    LetGo,
    Place,
    Promote,
    Quarantine,
    Replace,
    StandDown,
    Step,
    Wait,
    Waiting,
)
from exaserve_ops.serving.models import Replica


class PlannedMemberSerializer(serializers.Serializer[Member]):
    """One part of a replica that would run on several nodes."""

    number = serializers.IntegerField()
    node = serializers.UUIDField(source="node_id")
    node_name = serializers.CharField()
    accelerators = serializers.ListField(child=serializers.CharField(), source="accelerator_uuids")
    adapters = serializers.ListField(
        child=serializers.CharField(allow_blank=True),
        help_text="The network adapter next to each accelerator; empty where none is known.",
    )
    reserved_bytes = serializers.IntegerField()


class PlanRequestSerializer(StrictSerializer):
    """Asks what a number of replicas would mean."""

    replicas = replica_count()


class PlanStepSerializer(serializers.Serializer[Step]):
    """One step that the controllers would take now, and why."""

    action = serializers.ChoiceField(choices=ACTIONS)
    why = serializers.CharField()
    count = serializers.IntegerField(required=False, help_text="Of `create`.")
    replica = serializers.UUIDField(required=False)
    node = serializers.UUIDField(required=False, help_text="Of `place`.")
    node_name = serializers.CharField(required=False)
    accelerators = serializers.ListField(child=serializers.CharField(), required=False)
    reserved_bytes = serializers.IntegerField(
        required=False, help_text="What is promised for it; weights that it shares cost nothing."
    )
    shares_weights = serializers.BooleanField(
        required=False, help_text="Its weights lie there already, for all replicas that use them."
    )
    members = PlannedMemberSerializer(
        many=True, required=False, help_text="Of a replica over several nodes all its parts, the head first."
    )
    role = serializers.ChoiceField(choices=Replica.Role.choices, required=False, help_text="Of `create`.")
    cause = serializers.CharField(required=False, help_text="Of `replace`, such as `node_lost`.")
    instead_of = serializers.UUIDField(
        required=False, help_text="Of `promote`: who becomes the standby, if anybody does."
    )

    def to_representation(self, instance: Step) -> dict[str, Any]:
        """Return the step as flat JSON."""
        match instance:
            case Create(count=count, why=why, role=role):
                return {"action": "create", "why": why, "count": count, "role": role}
            case Place(replica_id=replica, placement=to):
                return {
                    "action": "place",
                    "why": to.why,
                    "replica": replica,
                    "node": to.node_id,
                    "node_name": to.node_name,
                    **_taken(to),
                }
            case Wait(replica_id=replica, why=why):
                return {"action": "wait", "why": why, "replica": replica}
            case LetGo(replica_id=replica, event=event, why=why):
                return {"action": event, "why": why, "replica": replica}
            case FinishDeletion(why=why):
                return {"action": "finish", "why": why}
            case Promote() | StandDown() | Replace() | Hold() | Quarantine():
                return _healing_step(instance)


def _taken(to: Placement) -> dict[str, Any]:
    return {
        "accelerators": list(to.accelerator_uuids),
        "reserved_bytes": to.reserved_bytes,
        "shares_weights": to.shares_weights,
        **({"members": [PlannedMemberSerializer(m).data for m in to.members]} if to.members else {}),
    }


def _healing_step(step: Promote | StandDown | Replace | Hold | Quarantine) -> dict[str, Any]:
    match step:
        case Promote(replica_id=replica, instead_of=absent, why=why):
            swapped = {"instead_of": absent} if absent else {}
            return {"action": "promote", "why": why, "replica": replica, **swapped}
        case StandDown(replica_id=replica, why=why):
            return {"action": "stand_down", "why": why, "replica": replica}
        case Replace(replica_id=replica, placement=to, cause=cause, why=why):
            return {
                "action": "replace",
                "why": f"{why}; {to.why}",
                "replica": replica,
                "cause": cause,
                "node": to.node_id,
                "node_name": to.node_name,
                **_taken(to),
            }
        case Hold(replica_id=replica, why=why):
            return {"action": "hold", "why": why or "nothing holds it up any more", "replica": replica}
        case Quarantine(replica_id=replica, accelerator_uuids=uuids, why=why):
            return {"action": "quarantine", "why": why, "replica": replica, "accelerators": list(uuids)}


class WaitingSerializer(serializers.Serializer[Waiting]):
    """A replica for which something is still to come."""

    replica = serializers.UUIDField(source="replica_id")
    why = serializers.CharField()


class PlanSerializer(serializers.Serializer[dict[str, Any]]):
    """A plan that is shown and not carried out."""

    deployment = serializers.UUIDField()
    generation = serializers.IntegerField(help_text="Of the deployment when the plan was made.")
    replicas = serializers.IntegerField()
    steps = PlanStepSerializer(many=True)
    waiting = WaitingSerializer(many=True, help_text="What is not done now, and what it waits for.")


class DomainLossSerializer(serializers.Serializer[DomainLoss]):
    """What is gone with one failure domain."""

    kind = serializers.ChoiceField(choices=["rack", "node"])
    name = serializers.CharField()
    serving = serializers.IntegerField()
    standbys = serializers.IntegerField()
    lost_ratio = serializers.FloatField(help_text="Part of the serving replicas, 0-1.")
    fair_share = serializers.FloatField(
        help_text="Replicas that an even spread over the nodes that can run them would put here."
    )
    memory_bytes = serializers.IntegerField(
        help_text="What it takes elsewhere to have them again; weights that a node shares count once."
    )
    is_crowded = serializers.BooleanField(help_text="More than the fair share plus one.")


class UnableSerializer(serializers.Serializer[Any]):
    """Nodes that no replica of the deployment can run on, for one reason."""

    reason = serializers.CharField(source="0")
    nodes = serializers.IntegerField(source="1")


class SpreadSerializer(serializers.Serializer[SpreadView]):
    """How a deployment is spread over failure domains."""

    worst_ratio = serializers.FloatField(help_text="What the worst single loss costs, 0-1.")
    losses = DomainLossSerializer(many=True, help_text="The greatest first.")
    advice = serializers.ListField(child=serializers.CharField())
    able_nodes = serializers.IntegerField(
        help_text="Nodes that can run its replicas, full or not: fair shares are of these."
    )
    nodes = serializers.IntegerField(help_text="All nodes in service.")
    unable = UnableSerializer(many=True, help_text="Why the others cannot, the most frequent reason first.")
