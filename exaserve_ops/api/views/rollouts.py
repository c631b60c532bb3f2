"""Rollouts: planned, asked for, approved, paused, turned back."""

from __future__ import annotations

from typing import Any, ClassVar
from uuid import UUID

from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema
from rest_framework import status
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from exaserve_ops.api.filters import ReleaseFilter, RolloutFilter
from exaserve_ops.api.idempotency import acts_once
from exaserve_ops.api.serializers.rollouts import (
    ReleaseSerializer,
    RolloutDetailSerializer,
    RolloutPlanRequestSerializer,
    RolloutPlanSerializer,
    RolloutRequestSerializer,
    RolloutSerializer,
)
from exaserve_ops.api.serializers.strict import ReasonSerializer
from exaserve_ops.api.views.base import ReadableViewSet
from exaserve_ops.lib import clock
from exaserve_ops.rollouts.domain.policy import RolloutPolicy
from exaserve_ops.rollouts.models import Rollout
from exaserve_ops.rollouts.selectors import rollouts_with_releases
from exaserve_ops.rollouts.services.rollouts import (
    act_on_rollout,
    checked_policy,
    create_rollout,
    preview_rollout,
)
from exaserve_ops.serving.models import Release
from exaserve_ops.serving.services.releases import ReleaseWish

_MAY_CHANGE = "rollouts.change_rollout"


class ReleaseViewSet(ReadableViewSet[Release]):
    """What replicas run, counted within each deployment."""

    queryset = Release.objects.select_related("deployment", "model")
    serializer_class = ReleaseSerializer
    filterset_class = ReleaseFilter
    ordering: ClassVar[list[str]] = ["-created_at"]
    ordering_fields: ClassVar[list[str]] = ["created_at", "number"]
    permission_by_action: ClassVar[dict[str, str]] = {
        "list": "serving.view_release",
        "retrieve": "serving.view_release",
    }


class RolloutViewSet(ReadableViewSet[Rollout]):
    """Deployments on their way to another release, the latest first."""

    queryset = Rollout.objects.all()
    serializer_class = RolloutSerializer
    filterset_class = RolloutFilter
    ordering: ClassVar[list[str]] = ["-created_at"]
    ordering_fields: ClassVar[list[str]] = ["created_at", "started_at", "ended_at", "status"]
    permission_by_action: ClassVar[dict[str, str]] = {
        "list": "rollouts.view_rollout",
        "retrieve": "rollouts.view_rollout",
        "plan_for": "rollouts.view_rollout",
        "create": "rollouts.add_rollout",
        "approve": "rollouts.approve_rollout",
        "cancel": _MAY_CHANGE,
        "pause": _MAY_CHANGE,
        "resume": _MAY_CHANGE,
        "roll_back": _MAY_CHANGE,
    }

    def get_queryset(self) -> QuerySet[Rollout]:
        """Rollouts with what they move."""
        return rollouts_with_releases()

    @extend_schema(responses=RolloutDetailSerializer)
    def retrieve(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Return one rollout with its waves and what their gates say."""
        return self._answer(self.get_object())

    @extend_schema(request=RolloutPlanRequestSerializer, responses=RolloutPlanSerializer, filters=False)
    @action(detail=False, methods=["post"], url_path="plan", pagination_class=None)
    def plan_for(self, request: Request) -> Response:  # noqa: ARG002 - DRF's signature
        """Say what a rollout would do: waves, moves, bytes and time. Changes nothing."""
        deployment_id, wish, policy = _asked(self.read_body(RolloutPlanRequestSerializer))
        plan = preview_rollout(deployment_id, wish, policy, actor=self.actor, now=clock.now())
        return Response(RolloutPlanSerializer(plan).data)

    @extend_schema(request=RolloutRequestSerializer, responses={201: RolloutDetailSerializer})
    @acts_once
    def create(self, request: Request) -> Response:  # noqa: ARG002 - DRF's signature
        """Begin the rollout whose plan you read, or have it wait for a second person's approval."""
        body = self.read_body(RolloutRequestSerializer)
        deployment_id, wish, policy = _asked(body)
        made = create_rollout(
            deployment_id,
            wish,
            policy,
            reason=body["reason"],
            confirmed=body["plan"],
            actor=self.actor,
            now=clock.now(),
        )
        return self._answer(made, status.HTTP_201_CREATED)

    @extend_schema(request=ReasonSerializer, responses=RolloutDetailSerializer)
    @action(detail=True, methods=["post"])
    @acts_once
    def approve(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Agree to what somebody else asked for: it begins."""
        return self._act("approve")

    @extend_schema(request=ReasonSerializer, responses=RolloutDetailSerializer)
    @action(detail=True, methods=["post"])
    @acts_once
    def cancel(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Take back what has not begun."""
        return self._act("cancel")

    @extend_schema(request=ReasonSerializer, responses=RolloutDetailSerializer)
    @action(detail=True, methods=["post"])
    @acts_once
    def pause(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Have nothing more begin; both releases serve on."""
        return self._act("pause")

    @extend_schema(request=ReasonSerializer, responses=RolloutDetailSerializer)
    @action(detail=True, methods=["post"])
    @acts_once
    def resume(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Let it go on: after a pause, past a wave that waited for it, or in spite of what halted it."""
        return self._act("resume")

    @extend_schema(request=ReasonSerializer, responses=RolloutDetailSerializer)
    @action(detail=True, methods=["post"], url_path="roll-back")
    @acts_once
    def roll_back(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Turn back: replicas of the new release make way for the old one."""
        return self._act("roll_back")

    def _act(self, act: str) -> Response:
        body = self.read_body(ReasonSerializer)
        now = clock.now()
        return self._answer(
            act_on_rollout(self.get_object().pk, act, actor=self.actor, now=now, reason=body["reason"])
        )

    def _answer(self, rollout: Rollout, code: int = status.HTTP_200_OK) -> Response:
        fresh = self.get_queryset().prefetch_related("waves").get(pk=rollout.pk)
        return Response(RolloutDetailSerializer(fresh).data, status=code)


def _asked(body: dict[str, Any]) -> tuple[UUID, ReleaseWish, RolloutPolicy]:
    wish = ReleaseWish(
        model_id=body["model"],
        engine=body["engine"],
        engine_options=body["engine_options"],
        replica_memory_bytes=body["replica_memory_bytes"],
    )
    return body["deployment"], wish, checked_policy(body["policy"])
