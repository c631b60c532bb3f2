"""Imports of models: asked for, watched, tried again, given up."""

from __future__ import annotations

from typing import ClassVar
from uuid import UUID

from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema
from rest_framework import status
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from exaserve_ops.api.filters import ModelImportFilter
from exaserve_ops.api.idempotency import acts_once
from exaserve_ops.api.serializers.imports import ModelImportRequestSerializer, ModelImportSerializer
from exaserve_ops.api.serializers.strict import ReasonSerializer
from exaserve_ops.api.views.base import ReadableViewSet
from exaserve_ops.lib import clock
from exaserve_ops.serving.models import ModelImport
from exaserve_ops.serving.services.imports import ImportWish, begin_import, cancel_import, retry_import
from exaserve_ops.weights.domain.wanted import Origin


class ModelImportViewSet(ReadableViewSet[ModelImport]):
    """Models on their way from a hub, a server or a bucket, the latest first."""

    queryset = ModelImport.objects.all()
    serializer_class = ModelImportSerializer
    filterset_class = ModelImportFilter
    ordering: ClassVar[list[str]] = ["-created_at"]
    ordering_fields: ClassVar[list[str]] = ["created_at", "ended_at", "name", "status"]
    permission_by_action: ClassVar[dict[str, str]] = {
        "list": "serving.view_modelimport",
        "retrieve": "serving.view_modelimport",
        "create": "serving.add_modelimport",
        "cancel": "serving.change_modelimport",
        "retry": "serving.change_modelimport",
    }

    def get_queryset(self) -> QuerySet[ModelImport]:
        """Imports with their nodes."""
        return super().get_queryset().select_related("node")

    @extend_schema(request=ModelImportRequestSerializer, responses={201: ModelImportSerializer})
    @acts_once
    def create(self, request: Request) -> Response:  # noqa: ARG002 - DRF's signature
        """Have a node fetch a model; it is registered when all of it is there and checked.

        The control plane itself fetches nothing from elsewhere.
        """
        body = self.read_body(ModelImportRequestSerializer)
        wish = ImportWish(
            name=body["name"],
            origin=Origin(body["kind"], body["location"], body["secret"]),
            revision=body["revision"],
            files=tuple(body["files"]),
            node_id=body["node"],
        )
        made = begin_import(wish, actor=self.actor, now=clock.now(), reason=body["reason"])
        return Response(ModelImportSerializer(made).data, status=status.HTTP_201_CREATED)

    @extend_schema(request=ReasonSerializer, responses=ModelImportSerializer)
    @action(detail=True, methods=["post"])
    @acts_once
    def cancel(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Give it up; its node drops what it fetched."""
        body = self.read_body(ReasonSerializer)
        row = cancel_import(self.get_object().pk, actor=self.actor, now=clock.now(), reason=body["reason"])
        return Response(ModelImportSerializer(row).data)

    @extend_schema(request=ReasonSerializer, responses=ModelImportSerializer)
    @action(detail=True, methods=["post"])
    @acts_once
    def retry(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Have one that failed tried again; its node goes on with what it has."""
        body = self.read_body(ReasonSerializer)
        row = retry_import(self.get_object().pk, actor=self.actor, now=clock.now(), reason=body["reason"])
        return Response(ModelImportSerializer(row).data)
