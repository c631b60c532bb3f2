"""Engines and their options; pasted launches."""

from __future__ import annotations

from typing import ClassVar

from drf_spectacular.utils import OpenApiExample, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from exaserve_ops.api.serializers.engines import DraftsSerializer, EngineSerializer, LaunchImportSerializer
from exaserve_ops.api.views.base import OpsViewSet
from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.serving.domain.launch_words import PasteError
from exaserve_ops.serving.domain.paste_import import read_paste
from exaserve_ops.serving.models import Deployment
from exaserve_ops.serving.selectors.engines import known_engines

_COMMAND = OpenApiExample(
    "A command",
    value={"text": "vllm serve meta-llama/Llama-3.1-8B -tp 2 --max_model_len=16384 --port 8000"},
    request_only=True,
)


class EngineViewSet(OpsViewSet[Deployment]):
    """What engines take, and what pasted launches of them mean. Nothing is changed."""

    queryset = Deployment.objects.none()

    permission_by_action: ClassVar[dict[str, str]] = {
        "known": "serving.view_deployment",
        "read_launch": "serving.add_deployment",
    }

    @extend_schema(responses={200: EngineSerializer(many=True)}, filters=False)
    def known(self, request: Request) -> Response:  # noqa: ARG002 - DRF's signature
        """Return the engines whose options are known, with the versions that nodes have."""
        return Response(EngineSerializer(known_engines(), many=True).data)

    @extend_schema(request=LaunchImportSerializer, responses={200: DraftsSerializer}, examples=[_COMMAND])
    def read_launch(self, request: Request) -> Response:  # noqa: ARG002 - DRF's signature
        """Read a pasted launch into drafts of deployments, saying what was not understood. Stores nothing."""
        body = self.read_body(LaunchImportSerializer)
        try:
            pasted = read_paste(body["text"])
        except PasteError as error:
            raise InvalidInputError("text", f"this cannot be read: {error}") from error
        return Response(DraftsSerializer({"drafts": pasted.drafts}).data)
