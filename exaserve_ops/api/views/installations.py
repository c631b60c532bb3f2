"""Agents over SSH: what is asked for. Controllers do it."""

from __future__ import annotations

from typing import Any, ClassVar
from uuid import UUID

from django.db import transaction
from drf_spectacular.utils import extend_schema
from rest_framework import status
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from exaserve_ops.api.filters import InstallationFilter, SshHostKeyFilter
from exaserve_ops.api.idempotency import acts_once
from exaserve_ops.api.ports import credential_vault
from exaserve_ops.api.serializers.installations import (
    ConfirmationSerializer,
    HealingSettingSerializer,
    InstallationActionSerializer,
    InstallationDetailSerializer,
    InstallationRequestSerializer,
    InstallationSerializer,
    SshHostKeySerializer,
)
from exaserve_ops.api.serializers.strict import OptionalReasonSerializer
from exaserve_ops.api.views.base import ReadableViewSet
from exaserve_ops.inventory.domain.installation import Credentials
from exaserve_ops.inventory.models import NodeInstallation, SshHostKey
from exaserve_ops.inventory.services.installations import (
    InstallationWish,
    advance_installation,
    ask_installation,
    confirm_host_key,
    create_installation,
    forget_host_key,
    set_restart_when_dead,
)
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import InvalidInputError

MAY_INSTALL = "inventory.install_node"


class InstallationViewSet(ReadableViewSet[NodeInstallation]):
    """Agents that were, or are to be, put on machines over SSH."""

    queryset = NodeInstallation.objects.all()
    serializer_class = InstallationSerializer
    filterset_class = InstallationFilter
    ordering: ClassVar[list[str]] = ["-created_at"]
    ordering_fields: ClassVar[list[str]] = ["created_at", "status", "status_changed_at", "node_name", "host"]
    permission_by_action: ClassVar[dict[str, str]] = {
        "list": "inventory.view_nodeinstallation",
        "retrieve": "inventory.view_nodeinstallation",
        "create": MAY_INSTALL,
        "confirm": MAY_INSTALL,
        "act": MAY_INSTALL,
        "abandon": MAY_INSTALL,
        "healing": MAY_INSTALL,
    }

    @extend_schema(responses=InstallationDetailSerializer)
    def retrieve(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Return one installation with its steps and their logs."""
        return self._answer(self.get_object())

    @extend_schema(request=InstallationRequestSerializer, responses={201: InstallationDetailSerializer})
    @acts_once
    def create(self, request: Request) -> Response:  # noqa: ARG002 - DRF's signature
        """Ask for an agent on a machine. Its host key is fetched first, and has to be confirmed."""
        body = self.read_body(InstallationRequestSerializer)
        credentials = _take_credentials(body)
        _check_credentials(body["auth"], credentials)
        with transaction.atomic():
            made = create_installation(InstallationWish(**body), actor=self.actor, now=clock.now())
            _keep(made.pk, credentials)
        return self._answer(made, status.HTTP_201_CREATED)

    @extend_schema(request=ConfirmationSerializer, responses=InstallationDetailSerializer)
    @action(detail=True, methods=["post"])
    @acts_once
    def confirm(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Pin the host key that a person compared; the installation goes on."""
        body = self.read_body(ConfirmationSerializer)
        found = self.get_object()
        confirm_host_key(found.pk, body["fingerprint"], actor=self.actor, now=clock.now())
        return self._answer(self.get_object())

    @extend_schema(request=InstallationActionSerializer, responses=InstallationDetailSerializer)
    @action(detail=True, methods=["post"])
    @acts_once
    def act(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Install again, upgrade, remove, or restart the agent; new credentials may come along."""
        body = self.read_body(InstallationActionSerializer)
        credentials = _take_credentials(body)
        found = self.get_object()
        with transaction.atomic():
            ask_installation(
                found.pk, body["action"], reason=body["reason"], actor=self.actor, now=clock.now()
            )
            _keep(found.pk, credentials)
        return self._answer(self.get_object())

    @extend_schema(request=OptionalReasonSerializer, responses=InstallationDetailSerializer)
    @action(detail=True, methods=["post"])
    @acts_once
    def abandon(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Give up; nothing more is done on the machine, and what is there stays."""
        body = self.read_body(OptionalReasonSerializer)
        found = self.get_object()
        advance_installation(found.pk, "abandoned", reason=body["reason"], actor=self.actor, now=clock.now())
        credential_vault().forget(str(found.pk))
        return self._answer(self.get_object())

    @extend_schema(request=HealingSettingSerializer, responses=InstallationDetailSerializer)
    @action(detail=True, methods=["post"])
    @acts_once
    def healing(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Allow or forbid healing to restart the agent over SSH, once for each death of its node."""
        body = self.read_body(HealingSettingSerializer)
        found = self.get_object()
        set_restart_when_dead(found.pk, wanted=body["restart_when_dead"], actor=self.actor, now=clock.now())
        return self._answer(self.get_object())

    def _answer(self, row: NodeInstallation, code: int = status.HTTP_200_OK) -> Response:
        return Response(InstallationDetailSerializer(row).data, status=code)


class SshHostKeyViewSet(ReadableViewSet[SshHostKey]):
    """Host keys that people confirmed."""

    queryset = SshHostKey.objects.all()
    serializer_class = SshHostKeySerializer
    filterset_class = SshHostKeyFilter
    ordering: ClassVar[list[str]] = ["host", "port", "key_type"]
    ordering_fields: ClassVar[list[str]] = ["host", "port", "confirmed_at"]
    permission_by_action: ClassVar[dict[str, str]] = {
        "list": "inventory.view_sshhostkey",
        "retrieve": "inventory.view_sshhostkey",
        "destroy": "inventory.delete_sshhostkey",
    }

    def destroy(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Forget a pinned key, because the machine was set up anew."""
        forget_host_key(self.get_object().pk, actor=self.actor, now=clock.now())
        return Response(status=status.HTTP_204_NO_CONTENT)


def _take_credentials(body: dict[str, Any]) -> Credentials:
    names = ("password", "private_key", "passphrase")
    return Credentials(**{name: body.pop(name) for name in names})


def _check_credentials(auth: str, credentials: Credentials) -> None:
    needed = {"key": "private_key", "password": "password"}.get(auth)
    if needed is not None and not getattr(credentials, needed):
        raise InvalidInputError(needed, f"is needed to sign in by {auth}")


def _keep(installation_id: UUID, credentials: Credentials) -> None:
    if credentials != Credentials():
        credential_vault().keep(str(installation_id), credentials)
