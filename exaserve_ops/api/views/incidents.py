"""Incidents: to be read, and to be decided."""

from __future__ import annotations

from typing import ClassVar
from uuid import UUID

from drf_spectacular.utils import extend_schema
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from exaserve_ops.api.filters import IncidentFilter
from exaserve_ops.api.idempotency import acts_once
from exaserve_ops.api.serializers.incidents import IncidentSerializer
from exaserve_ops.api.serializers.strict import ReasonSerializer
from exaserve_ops.api.views.base import ReadableViewSet
from exaserve_ops.health.models import Incident
from exaserve_ops.health.services.incidents import confirm_incident, dismiss_incident
from exaserve_ops.lib import clock


class IncidentViewSet(ReadableViewSet[Incident]):
    """Times that the control plane suspected itself instead of the nodes."""

    queryset = Incident.objects.all()
    serializer_class = IncidentSerializer
    filterset_class = IncidentFilter
    ordering: ClassVar[list[str]] = ["-opened_at"]
    ordering_fields: ClassVar[list[str]] = ["opened_at", "resolved_at", "kind", "status"]
    permission_by_action: ClassVar[dict[str, str]] = {
        "list": "health.view_incident",
        "retrieve": "health.view_incident",
        "confirm": "health.change_incident",
        "dismiss": "health.change_incident",
    }

    @extend_schema(request=ReasonSerializer, responses=IncidentSerializer)
    @action(detail=True, methods=["post"])
    @acts_once
    def confirm(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """The silent nodes are really dead: declare them so, and heal."""
        body = self.read_body(ReasonSerializer)
        incident = confirm_incident(
            self.get_object().pk, reason=body["reason"], actor=self.actor, now=clock.now()
        )
        return Response(IncidentSerializer(incident).data)

    @extend_schema(request=ReasonSerializer, responses=IncidentSerializer)
    @action(detail=True, methods=["post"])
    @acts_once
    def dismiss(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Leave the silent nodes unjudged until they report, and let healing of all others go on."""
        body = self.read_body(ReasonSerializer)
        incident = dismiss_incident(
            self.get_object().pk, reason=body["reason"], actor=self.actor, now=clock.now()
        )
        return Response(IncidentSerializer(incident).data)
