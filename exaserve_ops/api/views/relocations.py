"""Moves of conversations."""

from __future__ import annotations

from typing import ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from exaserve_ops.api.filters import RelocationFilter, check_parameters
from exaserve_ops.api.serializers.relocations import RelocationPlanSerializer, RelocationSerializer
from exaserve_ops.api.views.base import ReadableViewSet
from exaserve_ops.lib import clock
from exaserve_ops.sessions.domain.relocation import NO_BALANCE, Budget, RelocationPlan, plan_relocations
from exaserve_ops.sessions.models import Relocation
from exaserve_ops.sessions.selectors import movable_fleet


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
    def plan(self, request: Request) -> Response:
        """What would move now, and why, and what waits; nothing is changed by asking."""
        check_parameters(request.query_params, (), ())
        fleet = movable_fleet(now=clock.now(), capacities={})
        return Response(_described(plan_relocations(fleet, Budget(), NO_BALANCE)))


def _described(plan: RelocationPlan) -> dict[str, list[dict[str, object]]]:
    return {
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
            }
            for move in plan.moves
        ],
        "stays": [
            {"session": int(stay.session_id), "replica": stay.replica_id, "why": stay.why}
            for stay in plan.stays
        ],
    }
