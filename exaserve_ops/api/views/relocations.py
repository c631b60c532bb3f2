"""Moves of conversations."""

from __future__ import annotations

from dataclasses import asdict
from typing import ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from exaserve_ops.api.filters import RelocationFilter
from exaserve_ops.api.ports import move_limits, replica_loads
from exaserve_ops.api.serializers.relocations import RelocationPlanSerializer, RelocationSerializer
from exaserve_ops.api.views.base import ReadableViewSet
from exaserve_ops.lib import clock
from exaserve_ops.sessions.domain.pace import MoveLimits
from exaserve_ops.sessions.domain.relocation import FleetSessions, Rates, RelocationPlan, rooms_of
from exaserve_ops.sessions.domain.relocation_plan import plan_relocations
from exaserve_ops.sessions.models import Relocation
from exaserve_ops.sessions.selectors.moves import movable_fleet


class RelocationViewSet(ReadableViewSet[Relocation]):
    """Moves of conversations between replicas, the latest first."""

    queryset = Relocation.objects.select_related("session")
    serializer_class = RelocationSerializer
    filterset_class = RelocationFilter
    ordering: ClassVar[list[str]] = ["-created_at"]
    ordering_fields: ClassVar[list[str]] = ["created_at", "ended_at", "status", "sent_bytes"]
    permission_by_action: ClassVar[dict[str, str]] = {
        "list": "inference_sessions.view_relocation",
        "retrieve": "inference_sessions.view_relocation",
        "plan": "inference_sessions.view_relocation",
    }

    @extend_schema(responses=RelocationPlanSerializer, filters=False)
    @action(detail=False, methods=["get"], pagination_class=None)
    def plan(self, request: Request) -> Response:  # noqa: ARG002 - DRF's signature
        """What would move now, and why, and what waits; nothing is changed by asking."""
        reader, limits = replica_loads(), move_limits()
        fleet = movable_fleet(
            now=clock.now(), rooms=lambda nodes: rooms_of(reader.read_nodes(nodes)), looks_at_all=True
        )
        return Response(_described(fleet, plan_relocations(fleet, limits.rested), limits))


def _described(fleet: FleetSessions, plan: RelocationPlan, limits: MoveLimits) -> dict[str, object]:
    return {
        "limits": asdict(limits),
        "underway": len(fleet.underway),
        "deployments": [_deployment(key, rates, fleet, plan) for key, rates in fleet.rates],
        "replicas": [{"replica": key, "pressure": pressure} for key, pressure in plan.pressures],
        "moves": [
            {
                "session": int(move.session_id),
                "replica": move.source_id,
                "target": move.target_id,
                "way": move.estimate.way,
                "context_tokens": move.context_tokens,
                "kv_bytes": move.estimate.kv_bytes,
                "estimate": move.estimate.sentence(),
                "why": move.why,
                "trigger": move.trigger,
            }
            for move in plan.moves
        ],
        "stays": [
            {"session": int(stay.session_id), "replica": stay.replica_id, "why": stay.why}
            for stay in plan.stays
        ],
    }


def _deployment(key: str, rates: Rates, fleet: FleetSessions, plan: RelocationPlan) -> dict[str, object]:
    return {
        "deployment": key,
        "balances": key in dict(fleet.thresholds),
        "balancing": dict(plan.notes).get(key),
        "prefill_tokens_per_second": rates.prefill_tokens_per_second,
        "same_node_bytes_per_second": rates.same_node.bytes_per_second,
        "same_node_talk_seconds": rates.same_node.talk_seconds,
        "across_bytes_per_second": rates.across.bytes_per_second,
        "across_talk_seconds": rates.across.talk_seconds,
        "kv_bytes_per_token": rates.kv_bytes_per_token or None,
    }
