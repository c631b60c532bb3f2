"""Models."""

from __future__ import annotations

from typing import ClassVar
from uuid import UUID

from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema
from rest_framework import status
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import BaseSerializer

from exaserve_ops.api.filters import ModelFilter
from exaserve_ops.api.idempotency import acts_once
from exaserve_ops.api.ports import model_folder_reader, replica_loads
from exaserve_ops.api.serializers.serving import (
    FolderReadingSerializer,
    ModelDetailSerializer,
    ModelRequestSerializer,
    ModelSerializer,
)
from exaserve_ops.api.serializers.swarms import SwarmSerializer
from exaserve_ops.api.views.base import ReadableViewSet
from exaserve_ops.lib import clock
from exaserve_ops.serving.models import Model
from exaserve_ops.serving.selectors.swarms import model_swarm
from exaserve_ops.serving.services.models import FolderReading, register_model

RETRY_SECONDS = 1


class ModelViewSet(ReadableViewSet[Model]):
    """Weights and tokenizers, by digest; immutable."""

    queryset = Model.objects.all()
    filterset_class = ModelFilter
    ordering_fields: ClassVar[list[str]] = ["name", "created_at", "weights_bytes", "parameter_count"]
    permission_by_action: ClassVar[dict[str, str]] = {
        "list": "serving.view_model",
        "retrieve": "serving.view_model",
        "create": "serving.add_model",
        "swarm": "serving.view_model",
    }

    def get_queryset(self) -> QuerySet[Model]:
        """Models; with their files where one is asked for."""
        models = super().get_queryset()
        return models if self.action == "list" else models.prefetch_related("files")

    def get_serializer_class(self) -> type[BaseSerializer[Model]]:
        """Lists leave the files out."""
        return ModelSerializer if self.action == "list" else ModelDetailSerializer

    @extend_schema(
        request=ModelRequestSerializer,
        responses={
            200: ModelDetailSerializer,
            201: ModelDetailSerializer,
            202: FolderReadingSerializer,
        },
    )
    @acts_once
    def create(self, request: Request) -> Response:  # noqa: ARG002 - DRF's signature
        """Register a model from a folder. The same bytes under the same name again: 200, no change.

        Large weights take long to hash: the answer is then 202 with how far that is, and nothing is
        registered yet. Send the same request again after `Retry-After` seconds, until it is 201 or 200.
        """
        body = self.read_body(ModelRequestSerializer)
        facts = model_folder_reader().read(body["folder"])
        if isinstance(facts, FolderReading):
            answer = Response(FolderReadingSerializer(facts).data, status=status.HTTP_202_ACCEPTED)
            answer["Retry-After"] = str(RETRY_SECONDS)
            return answer
        now = clock.now()
        model = register_model(name=body["name"], facts=facts, actor=self.actor, now=now)
        is_new = model.created_at == now
        code = status.HTTP_201_CREATED if is_new else status.HTTP_200_OK
        return Response(ModelDetailSerializer(model).data, status=code)

    @extend_schema(responses={200: SwarmSerializer})
    @action(detail=True, methods=["get"])
    def swarm(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Say how the weights go from node to node: who has how much, from whom, how fast, and what is wrong.

        A swarm that is over is told for a day, with what the origin gave.
        """
        return Response(SwarmSerializer(model_swarm(self.get_object(), replica_loads())).data)
