"""Replicas: what runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any, ClassVar
from uuid import UUID

from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from exaserve_ops.api.filters import ReplicaFilter
from exaserve_ops.api.idempotency import acts_once
from exaserve_ops.api.ports import replica_loads
from exaserve_ops.api.serializers.logs import (
    ExitLogQuerySerializer,
    ExitLogSerializer,
    ReplicaLogQuerySerializer,
    ReplicaLogSerializer,
)
from exaserve_ops.api.serializers.serving import ReplicaDetailSerializer, ReplicaSerializer
from exaserve_ops.api.serializers.strict import OptionalReasonSerializer, ReasonSerializer
from exaserve_ops.api.views.base import ReadableViewSet
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError, NotFoundError
from exaserve_ops.lib.hints import ring
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.selectors.logs import LOG_HINT, LogSource, ending_of, find_log
from exaserve_ops.serving.services.replicas import replace_replica, restart_replica
from exaserve_ops.telemetry.domain.pictures import LogEntry

LOG_ENTRIES = 200
LOG_CHARACTERS = 200_000
"""Of the lines of one answer."""


class ReplicaViewSet(ReadableViewSet[Replica]):
    """Running copies of a deployment, from the wish to the end of the process group."""

    queryset = Replica.objects.all()
    serializer_class = ReplicaSerializer
    filterset_class = ReplicaFilter
    ordering_fields: ClassVar[list[str]] = ["name", "status", "status_changed_at", "created_at", "restarts"]
    permission_by_action: ClassVar[dict[str, str]] = {
        "list": "serving.view_replica",
        "retrieve": "serving.view_replica",
        "restart": "serving.change_replica",
        "replace": "serving.change_replica",
        "exit_log": "serving.view_replica",
        "log": "serving.view_replica",
    }
    parameters_by_action: ClassVar[dict[str, Collection[str]]] = {
        "log": ("member", "after"),
        "exit_log": ("member",),
    }

    def get_queryset(self) -> QuerySet[Replica]:
        """Replicas with what they point to, in four queries."""
        related = Replica.objects.select_related("deployment", "release__model", "node")
        return related.prefetch_related("accelerators", "members__node")

    @extend_schema(responses=ReplicaDetailSerializer)
    def retrieve(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Return one replica with its newest telemetry."""
        replica = self.get_object()
        return Response({**ReplicaSerializer(replica).data, "live": _live(replica)})

    @extend_schema(request=OptionalReasonSerializer, responses=ReplicaSerializer)
    @action(detail=True, methods=["post"])
    @acts_once
    def restart(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Start a failed replica afresh, its crash count forgotten."""
        body = self.read_body(OptionalReasonSerializer)
        restart_replica(self.get_object().pk, why=body["reason"], actor=self.actor, now=clock.now())
        return Response(ReplicaSerializer(self.get_object()).data)

    @extend_schema(request=ReasonSerializer, responses=ReplicaSerializer)
    @action(detail=True, methods=["post"])
    @acts_once
    def replace(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Let a replica go; its deployment makes a new one."""
        body = self.read_body(ReasonSerializer)
        replace_replica(self.get_object().pk, why=body["reason"], actor=self.actor, now=clock.now())
        return Response(ReplicaSerializer(self.get_object()).data)

    @extend_schema(parameters=[ExitLogQuerySerializer], responses=ExitLogSerializer)
    @action(detail=True, methods=["get"], url_path="exit-log")
    def exit_log(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Return how the last attempt ended, with its last lines; of one member of several."""
        replica = self.get_object()
        asked = _asked(ExitLogQuerySerializer, request)
        return Response(ExitLogSerializer(ending_of(replica, _log_of(replica, asked["member"]))).data)

    @extend_schema(parameters=[ReplicaLogQuerySerializer], responses=ReplicaLogSerializer)
    @action(detail=True, methods=["get"])
    def log(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Return the newest lines of a log, and have its node send more for half a minute.

        The first answer may have none yet: ask again after a second, with its `position`.
        """
        replica = self.get_object()
        asked = _asked(ReplicaLogQuerySerializer, request)
        source = _log_of(replica, asked["member"])
        if source.problem:
            raise ConflictError(source.problem)
        ring(LOG_HINT, source.key)
        kept = replica_loads().read_log(str(replica.pk), source.number, asked["after"], LOG_ENTRIES)
        return Response(ReplicaLogSerializer(_log_body(source, asked["after"], kept)).data)


def _asked(kind: type[ExitLogQuerySerializer], request: Request) -> dict[str, str]:
    """The parameters of a question for a log. Raises `ValidationError`."""
    asked = kind(data=request.query_params.dict())
    asked.is_valid(raise_exception=True)
    return {name: str(value) for name, value in asked.validated_data.items()}


def _log_of(replica: Replica, member: str) -> LogSource:
    """The log of a member. Raises `InvalidInputError` where the replica has no such one."""
    source = find_log(replica.pk, member)
    if source is None:
        raise NotFoundError("there is no such replica any more")
    return source


def _log_body(source: LogSource, after: str, entries: Sequence[LogEntry]) -> dict[str, Any]:
    """As many whole entries as an answer may be long; what is left comes with the next one."""
    sizes = accumulate(sum(map(len, entry.lines)) for entry in entries)
    shown = [
        e
        for number, (e, size) in enumerate(zip(entries, sizes, strict=True))
        if not number or size <= LOG_CHARACTERS
    ]
    return {
        "member": source.number,
        "node_name": source.node_name,
        "position": shown[-1].position if shown else after,
        "lines": [{"attempt": entry.attempt, "text": line} for entry in shown for line in entry.lines],
        "dropped": sum(entry.dropped_lines for entry in shown),
    }


def _live(replica: Replica) -> Any:  # noqa: ANN401 - telemetry as the node reported it
    if replica.node_id is None:
        return None
    node = replica_loads().read_node(str(replica.node_id))
    return (node or {}).get("replicas", {}).get(str(replica.pk))
