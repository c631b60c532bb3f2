"""Starts in turns: how they go, how they went, and the limits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import ClassVar
from uuid import UUID

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.decorators import action
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from exaserve_ops.api.filters import StagedStartFilter
from exaserve_ops.api.idempotency import acts_once
from exaserve_ops.api.serializers.starts import (
    StagedStartSerializer,
    StartLimitsRequestSerializer,
    StartLimitsSerializer,
    StartOutlookSerializer,
)
from exaserve_ops.api.views.base import ReadableViewSet
from exaserve_ops.lib import clock
from exaserve_ops.serving.models import Deployment, StagedStart
from exaserve_ops.serving.selectors.start_outlook import start_outlook
from exaserve_ops.serving.selectors.starts import start_limits
from exaserve_ops.serving.services.starts import set_start_limits


class StagedStartViewSet(ReadableViewSet[StagedStart]):
    """Times in which more replicas were to start than could at once, the latest first."""

    queryset = StagedStart.objects.all()
    serializer_class = StagedStartSerializer
    filterset_class = StagedStartFilter
    ordering: ClassVar[list[str]] = ["-began_at"]
    ordering_fields: ClassVar[list[str]] = ["began_at", "ended_at", "replicas"]
    permission_by_action: ClassVar[dict[str, str]] = {
        "list": "serving.view_stagedstart",
        "retrieve": "serving.view_stagedstart",
        "now": "serving.view_stagedstart",
        "limits": "serving.change_startrules",
    }
    parameters_by_action: ClassVar[dict[str, Collection[str]]] = {"now": ("deployment",)}

    @extend_schema(
        parameters=[OpenApiParameter("deployment", UUID, description="Of this deployment alone.")],
        responses=StartOutlookSerializer,
        filters=False,
    )
    @action(detail=False, methods=["get"], pagination_class=None)
    def now(self, request: Request) -> Response:
        """Say who starts, who waits and why, in which waves, and for how long yet."""
        outlook = start_outlook(now=clock.now(), deployment_id=_deployment(request))
        return Response(StartOutlookSerializer(outlook).data)

    @extend_schema(request=StartLimitsRequestSerializer, responses=StartLimitsSerializer, filters=False)
    @action(detail=False, methods=["post"], pagination_class=None)
    @acts_once
    def limits(self, request: Request) -> Response:  # noqa: ARG002 - DRF's signature
        """Set how much may start at once; what starts already goes on."""
        body = self.read_body(StartLimitsRequestSerializer)
        reason = body.pop("reason")
        limits = replace(start_limits(), **body)
        set_start_limits(limits, actor=self.actor, now=clock.now(), reason=reason)
        return Response(StartLimitsSerializer(limits).data)


def _deployment(request: Request) -> UUID | None:
    text = request.query_params.get("deployment")
    if text is None:
        return None
    try:
        deployment_id = UUID(text)
    except ValueError as error:
        raise ValidationError({"deployment": ["Give the id of a deployment."]}) from error
    if not Deployment.objects.filter(pk=deployment_id).exists():
        raise ValidationError({"deployment": ["There is no such deployment."]})
    return deployment_id
