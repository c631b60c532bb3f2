"""Validations: asked for, read as a report, cancelled."""

from __future__ import annotations

from typing import ClassVar
from uuid import UUID

from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema
from rest_framework import status
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from exaserve_ops.api.filters import ValidationFilter
from exaserve_ops.api.idempotency import acts_once
from exaserve_ops.api.serializers.strict import ReasonSerializer
from exaserve_ops.api.serializers.validations import (
    ValidationReportSerializer,
    ValidationRequestSerializer,
    ValidationSerializer,
)
from exaserve_ops.api.views.base import ReadableViewSet
from exaserve_ops.lib import clock
from exaserve_ops.validation.models import Validation
from exaserve_ops.validation.selectors import validations_with_model
from exaserve_ops.validation.services import ValidationWish, ask_validation, cancel_validation


class ValidationViewSet(ReadableViewSet[Validation]):
    """Validations of models, the latest first."""

    queryset = Validation.objects.all()
    serializer_class = ValidationSerializer
    filterset_class = ValidationFilter
    ordering: ClassVar[list[str]] = ["-created_at"]
    ordering_fields: ClassVar[list[str]] = ["created_at", "started_at", "ended_at", "status"]
    permission_by_action: ClassVar[dict[str, str]] = {
        "list": "validation.view_validation",
        "retrieve": "validation.view_validation",
        "create": "validation.add_validation",
        "cancel": "validation.change_validation",
    }

    def get_queryset(self) -> QuerySet[Validation]:
        """Validations with what they validate."""
        return validations_with_model()

    @extend_schema(responses=ValidationReportSerializer)
    def retrieve(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Return the report of one validation: every check with what it found."""
        return self._answer(self.get_object())

    @extend_schema(request=ValidationRequestSerializer, responses={201: ValidationReportSerializer})
    @acts_once
    def create(self, request: Request) -> Response:  # noqa: ARG002 - DRF's signature
        """Have a model validated. It begins by itself, runs a replica of its own, and clears it away."""
        body = self.read_body(ValidationRequestSerializer)
        wish = ValidationWish(
            model_id=body["model"],
            engines=tuple(body["engines"]),
            engine_options=body["engine_options"],
            replica_memory_bytes=body["replica_memory_bytes"],
            accelerators_per_replica=body["accelerators_per_replica"],
            nodes_per_replica=body["nodes_per_replica"],
            nodes=tuple(body["nodes"]),
            idle_seconds=body["idle_seconds"],
            most_at_once=body["most_at_once"],
            most_launches=body["most_launches"],
            ttft_limit_seconds=body["ttft_limit_seconds"],
            itl_limit_seconds=body["itl_limit_seconds"],
        )
        made = ask_validation(wish, reason=body["reason"], actor=self.actor, now=clock.now())
        return self._answer(made, status.HTTP_201_CREATED)

    @extend_schema(request=ReasonSerializer, responses=ValidationReportSerializer)
    @action(detail=True, methods=["post"])
    @acts_once
    def cancel(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """End it before its last check; what it runs is cleared away."""
        body = self.read_body(ReasonSerializer)
        ended = cancel_validation(
            self.get_object().pk, reason=body["reason"], actor=self.actor, now=clock.now()
        )
        return self._answer(ended)

    def _answer(self, validation: Validation, code: int = status.HTTP_200_OK) -> Response:
        fresh = self.get_queryset().prefetch_related("checks").get(pk=validation.pk)
        return Response(ValidationReportSerializer(fresh).data, status=code)
