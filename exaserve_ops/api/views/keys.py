"""API keys."""

from __future__ import annotations

from typing import ClassVar, cast
from uuid import UUID

from django.contrib.auth import get_user_model
from django.contrib.auth.models import AbstractUser
from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema
from rest_framework import status
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from exaserve_ops.access.domain.roles import MANAGE_KEYS_OF_OTHERS
from exaserve_ops.access.models import ApiKey
from exaserve_ops.access.selectors import keys_managed_by, may_make_keys_for
from exaserve_ops.access.services import change_key_limits, create_api_key, revoke_api_key
from exaserve_ops.api.filters import ApiKeyFilter
from exaserve_ops.api.idempotency import acts_once, acts_once_with_secret
from exaserve_ops.api.serializers.records import (
    ApiKeyRequestSerializer,
    ApiKeySerializer,
    KeyLimitsRequestSerializer,
    NewApiKeySerializer,
    limits_of,
)
from exaserve_ops.api.serializers.strict import NoBodySerializer
from exaserve_ops.api.views.base import ReadableViewSet, without_store
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import DeniedError


class ApiKeyViewSet(ReadableViewSet[ApiKey]):
    """Keys of the caller; of everybody for those who may manage them."""

    queryset = ApiKey.objects.none()
    serializer_class = ApiKeySerializer
    filterset_class = ApiKeyFilter
    ordering_fields: ClassVar[list[str]] = ["name", "created_at", "expires_at"]
    permission_by_action: ClassVar[dict[str, str]] = {
        "list": "access.view_apikey",
        "retrieve": "access.view_apikey",
        "create": "access.add_apikey",
        "revoke": "access.change_apikey",
        "limits": MANAGE_KEYS_OF_OTHERS,
    }

    def get_queryset(self) -> QuerySet[ApiKey]:
        """Keys that the caller may see."""
        if not self.request.user.is_authenticated:
            return super().get_queryset()  # the schema is drawn up without a caller
        return keys_managed_by(self.user)

    @extend_schema(request=ApiKeyRequestSerializer, responses={201: NewApiKeySerializer})
    @acts_once_with_secret
    def create(self, request: Request) -> Response:  # noqa: ARG002 - DRF's signature
        """Make a key; its text is in this answer and nowhere else."""
        body = self.read_body(ApiKeyRequestSerializer)
        key, text = create_api_key(
            user=self._owner(body.get("user")),
            name=body["name"],
            scopes=body["scopes"],
            actor=self.actor,
            now=clock.now(),
            expires_at=body["expires_at"],
            limits=limits_of(body),
        )
        answer = {**ApiKeySerializer(key).data, "key": text}
        return without_store(Response(answer, status=status.HTTP_201_CREATED))

    @extend_schema(request=NoBodySerializer, responses=ApiKeySerializer)
    @action(detail=True, methods=["post"])
    @acts_once
    def revoke(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Revoke a key: at once for REST, within seconds at every gateway."""
        self.read_body(NoBodySerializer)
        key = revoke_api_key(self.get_object(), actor=self.actor, now=clock.now())
        return Response(ApiKeySerializer(key).data)

    @extend_schema(request=KeyLimitsRequestSerializer, responses=ApiKeySerializer)
    @action(detail=True, methods=["post"])
    @acts_once
    def limits(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Set what a key may use at the gateway: all three at once, within seconds at every gateway."""
        body = self.read_body(KeyLimitsRequestSerializer)
        key = change_key_limits(
            self.get_object(), limits_of(body), actor=self.actor, reason=body["reason"], now=clock.now()
        )
        return Response(ApiKeySerializer(key).data)

    def _owner(self, name: str | None) -> AbstractUser:
        """Whose rights the key shall have. One answer for unknown and forbidden: names stay private."""
        if name is None or name == self.user.get_username():
            return self.user
        owner = get_user_model().objects.filter(username=name).first()
        if owner is None or not may_make_keys_for(self.user, owner):
            raise DeniedError(f"You may not make keys for '{name}', or there is no such user.")
        return cast("AbstractUser", owner)
