"""What all lists and objects of REST have in common."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar, TypeVar, cast

from django.contrib.auth.models import AbstractUser
from django.db import models
from django.db.models import QuerySet
from django_filters.rest_framework import DjangoFilterBackend, FilterSet
from rest_framework.filters import BaseFilterBackend
from rest_framework.permissions import SAFE_METHODS
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import BaseSerializer
from rest_framework.viewsets import GenericViewSet

from exaserve_ops.api.filters import StableOrdering, check_parameters
from exaserve_ops.api.parsers import BoundedJSONParser

M = TypeVar("M", bound=models.Model)
R = TypeVar("R")


class OpsViewSet(GenericViewSet[M]):
    """Objects addressed by id; each action names its permission, and filters apply to lists alone."""

    http_method_names = ["get", "head", "post", "patch", "delete"]
    filter_backends: Sequence[type[BaseFilterBackend]] = (DjangoFilterBackend, StableOrdering)
    ordering: ClassVar[list[str]] = ["name"]
    parser_classes = [BoundedJSONParser]
    lookup_value_converter = "uuid"
    permission_by_action: ClassVar[dict[str, str]] = {}
    parameters_by_action: ClassVar[dict[str, Collection[str]]] = {}
    """What may stand in the query of what is read; nothing, unless said. Lists have their filters."""

    filterset_class: ClassVar[type[FilterSet]]
    ordering_fields: ClassVar[list[str]] = []

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - DRF's signature
        """Refuse parameters that do not exist, once it is known who asks. Raises `ValidationError`."""
        super().initial(request, *args, **kwargs)
        if request.method in SAFE_METHODS and self.action != "list":
            check_parameters(
                request.query_params, self.parameters_by_action.get(self.action, ()), (), paged=False
            )

    def filter_queryset(self, queryset: QuerySet[M, R]) -> QuerySet[M, R]:
        """Filter lists; an object that was asked for by id is found whatever its state.

        Raises `ValidationError` for parameters and orders that do not exist: a misspelt filter would
        show everything, and be taken for an answer.
        """
        if self.action != "list":
            return queryset
        filters = self.filterset_class.base_filters
        check_parameters(self.request.query_params, filters, self.ordering_fields)
        return super().filter_queryset(queryset)

    @property
    def user(self) -> AbstractUser:
        """Who calls; permissions have seen to it that somebody does."""
        return cast("AbstractUser", self.request.user)

    @property
    def actor(self) -> str:
        """Who calls, for the audit record."""
        return f"user:{self.user.get_username()}"

    def read_body(self, serializer: type[BaseSerializer[Any]]) -> dict[str, Any]:
        """Return the validated body. Raises `ValidationError`."""
        body = serializer(data=self.request.data)
        body.is_valid(raise_exception=True)
        return cast("dict[str, Any]", body.validated_data)


class ReadableViewSet(OpsViewSet[M]):
    """List and retrieve."""

    def list(self, request: Request) -> Response:  # noqa: ARG002 - DRF's signature
        """Return one page."""
        page = self.paginate_queryset(self.filter_queryset(self.get_queryset()))
        return self.get_paginated_response(self.get_serializer(page, many=True).data)

    def retrieve(self, request: Request, pk: Any) -> Response:  # noqa: ANN401, ARG002 - each kind has its own ids
        """Return one object."""
        return Response(self.get_serializer(self.get_object()).data)


def without_store(response: Response) -> Response:
    """Keep an answer with a secret out of every cache."""
    response["Cache-Control"] = "no-store"
    return response
