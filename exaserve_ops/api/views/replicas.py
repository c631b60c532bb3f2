"""Replicas: what runs."""

from __future__ import annotations

from typing import Any, ClassVar
from uuid import UUID

from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from exaserve_ops.api.filters import ReplicaFilter
from exaserve_ops.api.idempotency import acts_once
from exaserve_ops.api.ports import replica_loads
from exaserve_ops.api.serializers.serving import (
    ExitLogSerializer,
    ReplicaDetailSerializer,
    ReplicaSerializer,
)
from exaserve_ops.api.serializers.strict import OptionalReasonSerializer, ReasonSerializer
from exaserve_ops.api.views.base import ReadableViewSet
from exaserve_ops.lib import clock
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.services.replicas import replace_replica, restart_replica


class ReplicaViewSet(ReadableViewSet[Replica]):
    """Running copies of a deployment, from the wish to the end of the process group."""

    queryset = Replica.objects.all()
    serializer_class = ReplicaSerializer
    filterset_class = ReplicaFilter
    ordering_fields: ClassVar[list[str]] = ["name", "status", "status_changed_at", "created_at", "restarts"]
    permission_by_action: ClassVar[dict[str, str]] = {
        "list": "serving.view_replica",
        "retrieve": "serving.view_replica",
        "restart": "serving.change_replica",
        "replace": "serving.change_replica",
        "exit_log": "serving.view_replica",
    }

    def get_queryset(self) -> QuerySet[Replica]:
        """Replicas with what they point to, in four queries."""
        related = Replica.objects.select_related("deployment", "release__model", "node")
        return related.prefetch_related("accelerators", "members__node")

    @extend_schema(responses=ReplicaDetailSerializer)
    def retrieve(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Return one replica with its newest telemetry."""
        replica = self.get_object()
        return Response({**ReplicaSerializer(replica).data, "live": _live(replica)})

    @extend_schema(request=OptionalReasonSerializer, responses=ReplicaSerializer)
    @action(detail=True, methods=["post"])
    @acts_once
    def restart(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Start a failed replica afresh, its crash count forgotten."""
        body = self.read_body(OptionalReasonSerializer)
        restart_replica(self.get_object().pk, why=body["reason"], actor=self.actor, now=clock.now())
        return Response(ReplicaSerializer(self.get_object()).data)

    @extend_schema(request=ReasonSerializer, responses=ReplicaSerializer)
    @action(detail=True, methods=["post"])
    @acts_once
    def replace(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Let a replica go; its deployment makes a new one."""
        body = self.read_body(ReasonSerializer)
        replace_replica(self.get_object().pk, why=body["reason"], actor=self.actor, now=clock.now())
        return Response(ReplicaSerializer(self.get_object()).data)

    @extend_schema(responses=ExitLogSerializer)
    @action(detail=True, methods=["get"], url_path="exit-log")
    def exit_log(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Return how the last attempt ended, with its last lines."""
        return Response(ExitLogSerializer(self.get_object()).data)


def _live(replica: Replica) -> Any:  # noqa: ANN401 - telemetry as the node reported it
    if replica.node_id is None:
        return None
    node = replica_loads().read_node(str(replica.node_id))
    return (node or {}).get("replicas", {}).get(str(replica.pk))
