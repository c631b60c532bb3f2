"""Deployments: what is wanted."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any, ClassVar
from uuid import UUID

from django.db.models import QuerySet
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import status
from rest_framework.decorators import action
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from exaserve_ops.api.errors import PreconditionRequiredError
from exaserve_ops.api.filters import DeploymentFilter
from exaserve_ops.api.idempotency import acts_once
from exaserve_ops.api.ports import replica_loads
from exaserve_ops.api.preconditions import if_match, precondition, stamp
from exaserve_ops.api.serializers.capacity import DeploymentMemorySerializer
from exaserve_ops.api.serializers.plans import PlanRequestSerializer, PlanSerializer, SpreadSerializer
from exaserve_ops.api.serializers.serving import (
    DeploymentChangeSerializer,
    DeploymentRequestSerializer,
    DeploymentSerializer,
)
from exaserve_ops.api.views.base import ReadableViewSet
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.serving.domain.lifecycle import STOPPED
from exaserve_ops.serving.domain.reconcile import DeploymentSnapshot, make_plan
from exaserve_ops.serving.domain.spread import view_spread
from exaserve_ops.serving.models import Deployment
from exaserve_ops.serving.selectors import (
    deployment_snapshot,
    deployments_with_counts,
    node_rooms,
    request_of_new,
)
from exaserve_ops.serving.selectors.memory_numbers import memory_of, used_bytes_of
from exaserve_ops.serving.services.deployments import (
    DeploymentWish,
    create_deployment,
    delete_deployment,
    update_deployment,
)
from exaserve_ops.sessions.selectors import active_sessions_by_replica

_IF_MATCH = OpenApiParameter(
    "If-Match", OpenApiTypes.STR, OpenApiParameter.HEADER, description="ETag that you read; else 412."
)


class DeploymentViewSet(ReadableViewSet[Deployment]):
    """A model, how many replicas of it, how they run and where."""

    queryset = Deployment.objects.all()
    serializer_class = DeploymentSerializer
    filterset_class = DeploymentFilter
    ordering_fields: ClassVar[list[str]] = ["name", "created_at", "updated_at", "replicas", "status"]
    permission_by_action: ClassVar[dict[str, str]] = {
        "list": "serving.view_deployment",
        "retrieve": "serving.view_deployment",
        "create": "serving.add_deployment",
        "partial_update": "serving.change_deployment",
        "destroy": "serving.delete_deployment",
        "plan": "serving.view_deployment",
        "plan_for": "serving.view_deployment",
        "spread": "serving.view_deployment",
        "memory": "serving.view_deployment",
    }

    def get_queryset(self) -> QuerySet[Deployment]:
        """Deployments with counts of their replicas, in one query."""
        return deployments_with_counts()

    def retrieve(self, request: Request, pk: UUID) -> Response:
        """Return one deployment; its ETag is its generation."""
        response = super().retrieve(request, pk)
        return stamp(response, response.data["generation"])

    @extend_schema(request=DeploymentRequestSerializer, responses={201: DeploymentSerializer})
    @acts_once
    def create(self, request: Request) -> Response:  # noqa: ARG002 - DRF's signature
        """Ask for a new deployment; controllers start its replicas."""
        body = self.read_body(DeploymentRequestSerializer)
        model_id, nodes = body.pop("model"), tuple(body.pop("nodes"))
        wish = DeploymentWish(model_id=model_id, nodes=nodes, **body)
        made = create_deployment(wish, actor=self.actor, now=clock.now())
        return self._answer(made.pk, status.HTTP_201_CREATED)

    @extend_schema(parameters=[_IF_MATCH], request=DeploymentChangeSerializer, responses=DeploymentSerializer)
    def partial_update(self, request: Request, pk: UUID) -> Response:
        """Change replicas, nodes or times. Replicas alone need no generation; the rest does (428)."""
        changes = self.read_body(DeploymentChangeSerializer)
        generation = _expected_generation(request, changes.pop("generation", None))
        if not changes:
            raise ValidationError({"replicas": ["Name at least one field to change."]})
        if generation is None and set(changes) != {"replicas"} and "If-Match" not in request.headers:
            raise PreconditionRequiredError(
                "Send If-Match with the ETag you read, or `generation`; without, only `replicas` can change."
            )
        with precondition(request):
            update_deployment(
                self.get_object().pk,
                changes,
                actor=self.actor,
                now=clock.now(),
                expected_generation=generation,
            )
        return self._answer(pk, status.HTTP_200_OK)

    @extend_schema(parameters=[_IF_MATCH], responses={202: DeploymentSerializer})
    def destroy(self, request: Request, pk: UUID) -> Response:
        """Drain and stop all replicas, then forget the name. The answer is what is going: 202."""
        with precondition(request):
            delete_deployment(
                self.get_object().pk,
                actor=self.actor,
                now=clock.now(),
                expected_generation=_expected_generation(request, None),
            )
        return self._answer(pk, status.HTTP_202_ACCEPTED)

    @extend_schema(responses=PlanSerializer)
    @action(detail=True, methods=["get"])
    def plan(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Say what the controllers do now, why, and what they wait for."""
        now = clock.now()
        return self._plan(self._snapshot(now), now)

    @extend_schema(request=PlanRequestSerializer, responses=PlanSerializer)
    @plan.mapping.post
    def plan_for(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Say what the controllers would do at once for this number of replicas. Changes nothing."""
        body = self.read_body(PlanRequestSerializer)
        now = clock.now()
        return self._plan(replace(self._snapshot(now), replicas_wanted=body["replicas"]), now)

    @extend_schema(responses=SpreadSerializer)
    @action(detail=True, methods=["get"])
    def spread(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Say what the loss of each failure domain would cost."""
        deployment = self.get_object()
        nodes = node_rooms(deployment.pk, now=clock.now())
        return Response(SpreadSerializer(view_spread(nodes, request_of_new(deployment))).data)

    @extend_schema(responses=DeploymentMemorySerializer)
    @action(detail=True, methods=["get"])
    def memory(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Say what a replica needs, what is reserved for it, and what replicas are seen to take."""
        deployment = self.get_object()
        rows = list(deployment.replica_set.exclude(status=STOPPED).prefetch_related("accelerators"))
        told = (replica_loads().read_node(node) for node in {str(row.node_id) for row in rows if row.node_id})
        used = used_bytes_of((report for report in told if report), now_seconds=clock.unix_seconds())
        return Response(DeploymentMemorySerializer(memory_of(deployment, rows, used)).data)

    def _snapshot(self, now: datetime) -> DeploymentSnapshot:
        deployment = self.get_object()
        active = active_sessions_by_replica(deployment.pk, now=now)
        snapshot = deployment_snapshot(deployment.pk, active_sessions=active, now=now)
        if snapshot is None:
            raise ConflictError(f"deployment '{deployment.name}' is {deployment.status}")
        return snapshot

    def _plan(self, snapshot: DeploymentSnapshot, now: datetime) -> Response:
        plan = make_plan(snapshot, now=now)
        body = {
            "deployment": snapshot.id,
            "generation": self.get_object().generation,
            "replicas": snapshot.replicas_wanted,
            "steps": plan.steps,
            "waiting": plan.waiting,
        }
        return Response(PlanSerializer(body).data)

    def _answer(self, pk: UUID, code: int) -> Response:
        data: dict[str, Any] = dict(DeploymentSerializer(self.get_queryset().get(pk=pk)).data)
        return stamp(Response(data, status=code), data["generation"])


def _expected_generation(request: Request, in_body: int | None) -> int | None:
    in_header = if_match(request)
    if in_header is not None and in_body is not None and in_header != in_body:
        raise ValidationError({"generation": ["If-Match says another generation; send one of them."]})
    return in_body if in_header is None else in_header
