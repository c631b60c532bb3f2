"""Sessions and events."""

from __future__ import annotations

from typing import ClassVar

from django_filters.rest_framework import DjangoFilterBackend
from drf_spectacular.utils import extend_schema
from rest_framework import status
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import BaseSerializer

from exaserve_ops.api.filters import EventFilter, SessionFilter
from exaserve_ops.api.idempotency import acts_once
from exaserve_ops.api.pagination import EventCursor
from exaserve_ops.api.ports import gateway_reports
from exaserve_ops.api.serializers.records import (
    EventSerializer,
    GatewayReportSerializer,
    SessionDetailSerializer,
    SessionSerializer,
)
from exaserve_ops.api.serializers.relocations import MoveRequestSerializer, RelocationSerializer
from exaserve_ops.api.views.base import ReadableViewSet
from exaserve_ops.audit.models import Event
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.sessions.models import InferenceSession
from exaserve_ops.sessions.services.relocations import ask_move


class SessionViewSet(ReadableViewSet[InferenceSession]):
    """Conversations and where they run."""

    queryset = InferenceSession.objects.all()
    serializer_class = SessionSerializer
    filterset_class = SessionFilter
    ordering: ClassVar[list[str]] = ["-last_turn_at"]
    ordering_fields: ClassVar[list[str]] = ["last_turn_at", "first_turn_at", "turns", "context_tokens"]
    lookup_value_converter = "int"
    permission_by_action: ClassVar[dict[str, str]] = {
        "list": "inference_sessions.view_inferencesession",
        "retrieve": "inference_sessions.view_inferencesession",
        "move": "inference_sessions.add_relocation",
        "gateways": "inference_sessions.view_inferencesession",
    }

    @extend_schema(responses=GatewayReportSerializer(many=True), filters=False)
    @action(detail=False, methods=["get"], pagination_class=None)
    def gateways(self, request: Request) -> Response:  # noqa: ARG002 - DRF's signature
        """How living gateways keep sessions at their replicas; 409 while the store is away."""
        reports = gateway_reports().read()
        if reports is None:
            raise ConflictError("Redis does not answer: nothing is known of the gateways now")
        return Response(GatewayReportSerializer(reports, many=True).data)

    @extend_schema(request=MoveRequestSerializer, responses={202: RelocationSerializer})
    @action(detail=True, methods=["post"])
    @acts_once
    def move(self, request: Request, pk: int) -> Response:  # noqa: ARG002 - DRF's signature
        """Have the conversation moved to another replica before its next turn, if no turn runs."""
        body, session = self.read_body(MoveRequestSerializer), self.get_object()
        row = ask_move(session.pk, body["target"], reason=body["reason"], actor=self.actor, now=clock.now())
        return Response(RelocationSerializer(row).data, status=status.HTTP_202_ACCEPTED)

    def get_serializer_class(self) -> type[BaseSerializer[InferenceSession]]:
        """One conversation alone comes with its course."""
        return SessionDetailSerializer if self.action == "retrieve" else SessionSerializer


class EventViewSet(ReadableViewSet[Event]):
    """What happened, newest first."""

    queryset = Event.objects.all()
    serializer_class = EventSerializer
    filterset_class = EventFilter
    pagination_class = EventCursor
    filter_backends = (DjangoFilterBackend,)  # the cursor orders
    lookup_value_converter = "int"
    permission_by_action: ClassVar[dict[str, str]] = {
        "list": "audit.view_event",
        "retrieve": "audit.view_event",
    }
