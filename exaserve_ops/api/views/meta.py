"""Liveness, readiness, the schema and its page, and the answer to unknown addresses."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.views import redirect_to_login
from django.db import Error, connection
from django.http import HttpRequest, JsonResponse
from django.views.decorators.http import require_safe
from drf_spectacular.utils import extend_schema
from drf_spectacular.views import SpectacularJSONAPIView, SpectacularSwaggerSplitView
from rest_framework import status
from rest_framework.exceptions import NotAuthenticated, NotFound
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView


@login_not_required
@require_safe
def healthz(_request: HttpRequest) -> JsonResponse:
    """Say that this process answers."""
    return JsonResponse({"status": "ok"})


@login_not_required
@require_safe
def readyz(_request: HttpRequest) -> JsonResponse:
    """Say whether this process reaches its database; nothing else."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except Error:
        return JsonResponse({"status": "unavailable"}, status=503)
    return JsonResponse({"status": "ok"})


class SchemaView(SpectacularJSONAPIView):
    """The OpenAPI schema, for whoever is signed in."""

    authentication_classes = APIView.authentication_classes
    permission_classes = [IsAuthenticated]


class DocsView(SpectacularSwaggerSplitView):
    """The schema as a page. Its script is a request of its own, so that no inline script is needed."""

    authentication_classes = APIView.authentication_classes
    permission_classes = [IsAuthenticated]
    template_name = "api/docs.html"
    url_name = "api-schema"

    def handle_exception(self, exc: Exception) -> Response:
        """Send browsers without a login to it."""
        if isinstance(exc, NotAuthenticated):
            address = redirect_to_login(self.request.get_full_path()).url
            return Response(status=status.HTTP_302_FOUND, headers={"Location": address})
        return super().handle_exception(exc)


@extend_schema(exclude=True)
class UnknownAddressView(APIView):
    """Answers 404 as JSON, and 401 to strangers, who learn nothing about which addresses exist."""

    permission_classes = [IsAuthenticated]

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - DRF's signature
        """Refuse whatever the method."""
        super().initial(request, *args, **kwargs)
        raise NotFound(f"There is no {request.path}; /api/v1/docs lists what there is.")
