"""What engines compiled for a model: brought to nodes beside its weights."""

from __future__ import annotations

from typing import ClassVar
from uuid import UUID

from drf_spectacular.utils import extend_schema
from rest_framework import status
from rest_framework.exceptions import NotFound
from rest_framework.request import Request
from rest_framework.response import Response

from exaserve_ops.api.idempotency import acts_once
from exaserve_ops.api.ports import compiled_folder_reader
from exaserve_ops.api.serializers.compiled import (
    CompiledRemovedSerializer,
    CompiledRequestSerializer,
    CompiledSetsSerializer,
)
from exaserve_ops.api.serializers.strict import NoBodySerializer
from exaserve_ops.api.views.base import OpsViewSet
from exaserve_ops.lib import clock
from exaserve_ops.serving.models import CompiledSet, Model
from exaserve_ops.serving.selectors.compiled import compiled_of
from exaserve_ops.serving.services.compiled import COPIES_STAY, register_compiled, remove_compiled
from exaserve_ops.weights.domain.wanted import Origin


class CompiledViewSet(OpsViewSet[Model]):
    """Compiled files of one model. Compiled code is code: it takes the right to register models."""

    queryset = Model.objects.all()
    serializer_class = CompiledSetsSerializer
    permission_by_action: ClassVar[dict[str, str]] = {
        "retrieve": "serving.view_model",
        "register": "serving.add_model",
        "remove": "serving.add_model",
    }

    @extend_schema(responses=CompiledSetsSerializer)
    def retrieve(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """List what was compiled for a model, by engine and hardware, and how many nodes have it."""
        return self._answer(self.get_object())

    @extend_schema(request=CompiledRequestSerializer, responses={201: CompiledSetsSerializer})
    @acts_once
    def register(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Have a folder's files in the caches of an engine, on nodes that have the model and this hardware.

        Replaces what was registered for the same engine and hardware. Launches never wait for it.
        """
        body = self.read_body(CompiledRequestSerializer)
        model = self.get_object()
        register_compiled(
            model.pk,
            compiled_folder_reader().read(body["folder"]),
            engine=body["engine"],
            hardware=body["hardware"],
            origins=[Origin(**place) for place in body["origins"]],
            actor=self.actor,
            now=clock.now(),
            reason=body["reason"],
        )
        return self._answer(model, status.HTTP_201_CREATED)

    @extend_schema(request=NoBodySerializer, responses=CompiledRemovedSerializer)
    def remove(self, request: Request, pk: UUID, compiled_id: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Put a set into no more caches. Copies in engines' caches stay; the answer's note says so."""
        model = self.get_object()
        try:
            remove_compiled(model.pk, compiled_id, actor=self.actor, now=clock.now())
        except CompiledSet.DoesNotExist as error:
            raise NotFound from error
        told = {"model": model.pk, "sets": compiled_of(model.pk), "note": COPIES_STAY}
        return Response(CompiledRemovedSerializer(told).data)

    def _answer(self, model: Model, code: int = status.HTTP_200_OK) -> Response:
        told = {"model": model.pk, "sets": compiled_of(model.pk)}
        return Response(CompiledSetsSerializer(told).data, status=code)
