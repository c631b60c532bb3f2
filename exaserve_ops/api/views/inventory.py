"""Nodes, accelerators and join tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import Any, ClassVar
from uuid import UUID

from django.db.models import QuerySet
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import status
from rest_framework.decorators import action
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from exaserve_ops.api.filters import AcceleratorFilter, JoinTokenFilter, NodeFilter
from exaserve_ops.api.idempotency import acts_once, acts_once_with_secret
from exaserve_ops.api.ports import replica_loads
from exaserve_ops.api.serializers.inventory import (
    AcceleratorSerializer,
    DrainRequestSerializer,
    EndProcessRequestSerializer,
    JoinTokenRequestSerializer,
    JoinTokenSerializer,
    NewJoinTokenSerializer,
    NodeDetailSerializer,
    NodeSerializer,
)
from exaserve_ops.api.serializers.kv import KvLimitsRequestSerializer, NodeKvSerializer
from exaserve_ops.api.serializers.machine import (
    NodeHistoryQuerySerializer,
    NodeHistorySerializer,
    NodeMachineSerializer,
)
from exaserve_ops.api.serializers.strict import NoBodySerializer, ReasonSerializer
from exaserve_ops.api.views.base import OpsViewSet, ReadableViewSet, without_store
from exaserve_ops.inventory.models import Accelerator, JoinToken, Node
from exaserve_ops.inventory.selectors import nodes_with_hardware
from exaserve_ops.inventory.services import cordon_node, create_join_token, uncordon_node
from exaserve_ops.inventory.services.drain import drain_node, undrain_node
from exaserve_ops.inventory.services.leftovers import ask_process_end
from exaserve_ops.inventory.services.quarantine import lift_quarantine
from exaserve_ops.lib import clock
from exaserve_ops.serving.services.kv_pools import ask_kv_limits
from exaserve_ops.serving.services.replicas import retire_lost_node
from exaserve_ops.telemetry.selectors import history_of_node

_MOST_POINTS = 1500
_CELL = ("owner", "live_ratio", "cached_ratio", "age")
_KV_FILTERS = [
    OpenApiParameter("replica", OpenApiTypes.UUID, description="Only the pools and figures of this replica."),
    OpenApiParameter("pool", OpenApiTypes.STR, description="Only the pool of this id, and its replicas."),
]


class NodeViewSet(ReadableViewSet[Node]):
    """Machines with an agent."""

    queryset = Node.objects.all()
    serializer_class = NodeSerializer
    filterset_class = NodeFilter
    ordering_fields: ClassVar[list[str]] = ["name", "liveness", "last_report_at", "created_at"]
    permission_by_action: ClassVar[dict[str, str]] = {
        "list": "inventory.view_node",
        "retrieve": "inventory.view_node",
        "cordon": "inventory.change_node",
        "uncordon": "inventory.change_node",
        "drain": "inventory.change_node",
        "undrain": "inventory.change_node",
        "retire": "inventory.delete_node",
        "end_process": "inventory.end_process",
        "kv_pool": "inventory.view_node",
        "machine": "inventory.view_node",
        "history": "inventory.view_node",
        "kv_limits": "serving.change_replica",
    }
    parameters_by_action: ClassVar[dict[str, Collection[str]]] = {
        "kv_pool": tuple(parameter.name for parameter in _KV_FILTERS),
        "history": tuple(NodeHistoryQuerySerializer().fields),
    }

    def get_queryset(self) -> QuerySet[Node]:
        """Nodes with accelerators and failure domains, in two queries."""
        return nodes_with_hardware()

    @extend_schema(responses=NodeDetailSerializer)
    def retrieve(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """One node, with its links and with what its probes could not find out."""
        return Response(NodeDetailSerializer(self.get_object()).data)

    @extend_schema(request=ReasonSerializer, responses=NodeSerializer)
    @action(detail=True, methods=["post"])
    @acts_once
    def cordon(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Place nothing new on the node; what runs there stays."""
        body = self.read_body(ReasonSerializer)
        cordon_node(self.get_object().pk, reason=body["reason"], actor=self.actor, now=clock.now())
        return Response(NodeSerializer(self.get_object()).data)

    @extend_schema(request=NoBodySerializer, responses=NodeSerializer)
    @action(detail=True, methods=["post"])
    @acts_once
    def uncordon(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Let the node take new replicas again."""
        self.read_body(NoBodySerializer)
        uncordon_node(self.get_object().pk, actor=self.actor, now=clock.now())
        return Response(NodeSerializer(self.get_object()).data)

    @extend_schema(request=DrainRequestSerializer, responses=NodeSerializer)
    @action(detail=True, methods=["post"])
    @acts_once
    def drain(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Cordon the node and have its replicas replaced elsewhere, then let go."""
        body, now = self.read_body(DrainRequestSerializer), clock.now()
        deadline_at = now + timedelta(seconds=body["deadline_seconds"])
        drain_node(
            self.get_object().pk, reason=body["reason"], deadline_at=deadline_at, actor=self.actor, now=now
        )
        return Response(NodeSerializer(self.get_object()).data)

    @extend_schema(request=NoBodySerializer, responses=NodeSerializer)
    @action(detail=True, methods=["post"])
    @acts_once
    def undrain(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Take the node back into use; it is no longer cordoned either."""
        self.read_body(NoBodySerializer)
        undrain_node(self.get_object().pk, actor=self.actor, now=clock.now())
        return Response(NodeSerializer(self.get_object()).data)

    @extend_schema(request=ReasonSerializer, responses=NodeSerializer)
    @action(detail=True, methods=["post"])
    @acts_once
    def retire(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Take a dead node out for good: its keys are revoked, and what ran there is written off."""
        body = self.read_body(ReasonSerializer)
        retire_lost_node(self.get_object().pk, reason=body["reason"], actor=self.actor, now=clock.now())
        return Response(NodeSerializer(self.get_object()).data)

    @extend_schema(request=EndProcessRequestSerializer, responses={202: NodeSerializer})
    @action(detail=True, methods=["post"], url_path="end-process")
    @acts_once
    def end_process(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Ask the agent to end a process that it provably left behind; the history says what became of it."""
        body = self.read_body(EndProcessRequestSerializer)
        ask_process_end(self.get_object().pk, **body, actor=self.actor, now=clock.now())
        return Response(NodeSerializer(self.get_object()).data, status=status.HTTP_202_ACCEPTED)

    @extend_schema(parameters=_KV_FILTERS, responses=NodeKvSerializer)
    @action(detail=True, methods=["get"], url_path="kv-pool")
    def kv_pool(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """KV memory of the node as last reported: pools with their map, and what the engines say of it."""
        node = self.get_object()
        return Response(_kv_of(node, request.query_params.dict()))

    @extend_schema(responses=NodeMachineSerializer)
    @action(detail=True, methods=["get"])
    def machine(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Processor, memory, disks, links and cards of the node, as last reported."""
        node = self.get_object()
        told = replica_loads().read_node(str(node.pk)) or {}
        body = {
            "received_at": told.get("received_at"),
            "simulated": node.simulated,
            "host": told.get("host") or None,
            "accelerators": told.get("accelerators") or (),
        }
        return Response(NodeMachineSerializer(body).data)

    @extend_schema(parameters=[NodeHistoryQuerySerializer], responses=NodeHistorySerializer)
    @action(detail=True, methods=["get"])
    def history(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """The node's machine over time, and first tokens and requests of its replicas. Kept for two weeks."""
        asked = NodeHistoryQuerySerializer(data=request.query_params.dict())
        asked.is_valid(raise_exception=True)
        return Response(_history_of(self.get_object(), asked.validated_data, clock.now()))

    @extend_schema(request=KvLimitsRequestSerializer, responses={202: NodeSerializer})
    @action(detail=True, methods=["post"], url_path="kv-pool/limits")
    @acts_once
    def kv_limits(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Ask the agent for other limits of a replica in its KV pool; its answer is in the history."""
        body = self.read_body(KvLimitsRequestSerializer)
        ask_kv_limits(self.get_object().pk, body.pop("replica"), **body, actor=self.actor, now=clock.now())
        return Response(NodeSerializer(self.get_object()).data, status=status.HTTP_202_ACCEPTED)


def _kv_of(node: Node, chosen: Mapping[str, str]) -> Any:  # noqa: ANN401 - as serializers give it
    told = replica_loads().read_kv(str(node.pk)) or {"received_at": None, "pools": [], "replicas": {}}
    replica, pool_id = chosen.get("replica", ""), chosen.get("pool", "")
    pools = [
        pool | {"cells": [dict(zip(_CELL, cell, strict=True)) for cell in pool["cells"]]}
        for pool in told["pools"]
        if pool_id in {"", pool["pool_id"]}
        and (not replica or any(member["replica_id"] == replica for member in pool["members"]))
    ]
    loads = {key: load for key, load in told["replicas"].items() if replica in {"", key}}
    if pool_id:
        pooled = {member["replica_id"] for pool in pools for member in pool["members"]}
        loads = {key: load for key, load in loads.items() if key in pooled}
    body = {
        "received_at": told["received_at"],
        "simulated": node.simulated,
        "pools": pools,
        "replicas": [{"replica_id": key, **load} for key, load in sorted(loads.items())],
    }
    return NodeKvSerializer(body).data


def _history_of(node: Node, asked: Mapping[str, Any], now: datetime) -> Any:  # noqa: ANN401 - as above
    until, step = asked.get("until", now), timedelta(minutes=asked["step_minutes"])
    try:
        since = asked.get("since", until - timedelta(hours=1))
    except OverflowError as error:
        raise ValidationError({"until": ["There is no hour before that."]}) from error
    if since > until:
        raise ValidationError({"since": ["It is after `until`: give an earlier one."]})
    if until - since > step * _MOST_POINTS:
        most = f"{_MOST_POINTS:,} steps of {asked['step_minutes']} min"
        raise ValidationError(
            {"since": [f"That is more than {most}: ask for longer steps (`step_minutes`) or a shorter time."]}
        )
    history = history_of_node(node.pk, since=since, until=until, step=step)
    body = {
        "step_minutes": asked["step_minutes"],
        "at": history.at,
        "lines": [
            {
                "name": line.measure.name,
                "unit": line.measure.unit,
                "kind": line.measure.kind,
                "accelerator": line.accelerator,
                "values": line.values,
            }
            for line in history.lines
        ],
    }
    return NodeHistorySerializer(body).data


class AcceleratorViewSet(ReadableViewSet[Accelerator]):
    """Accelerators, by UUID."""

    queryset = Accelerator.objects.all()
    serializer_class = AcceleratorSerializer
    filterset_class = AcceleratorFilter
    ordering: ClassVar[list[str]] = ["node", "ordinal"]
    ordering_fields: ClassVar[list[str]] = ["node", "ordinal", "kind", "memory_bytes"]
    lookup_value_converter = "str"
    permission_by_action: ClassVar[dict[str, str]] = {
        "list": "inventory.view_accelerator",
        "retrieve": "inventory.view_accelerator",
        "lift_quarantine": "inventory.change_node",
    }

    @extend_schema(request=ReasonSerializer, responses=AcceleratorSerializer)
    @action(detail=True, methods=["post"], url_path="lift-quarantine")
    @acts_once
    def lift_quarantine(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - DRF's signature
        """Let the accelerator take replicas again."""
        body = self.read_body(ReasonSerializer)
        found = lift_quarantine(
            self.get_object().pk, reason=body["reason"], actor=self.actor, now=clock.now()
        )
        return Response(AcceleratorSerializer(found).data)


class JoinTokenViewSet(OpsViewSet[JoinToken]):
    """Tokens with which new nodes join."""

    queryset = JoinToken.objects.all()
    serializer_class = JoinTokenSerializer
    filterset_class = JoinTokenFilter
    ordering: ClassVar[list[str]] = ["-created_at"]
    ordering_fields: ClassVar[list[str]] = ["created_at", "expires_at", "used_at"]
    permission_by_action: ClassVar[dict[str, str]] = {
        "list": "inventory.view_jointoken",
        "create": "inventory.add_jointoken",
    }

    def list(self, request: Request) -> Response:  # noqa: ARG002 - DRF's signature
        """Return one page of tokens, without their texts."""
        page = self.paginate_queryset(self.filter_queryset(self.get_queryset()))
        return self.get_paginated_response(self.get_serializer(page, many=True).data)

    @extend_schema(request=JoinTokenRequestSerializer, responses={201: NewJoinTokenSerializer})
    @acts_once_with_secret
    def create(self, request: Request) -> Response:  # noqa: ARG002 - DRF's signature
        """Make a token that enrols one node, or as many as asked for."""
        body = self.read_body(JoinTokenRequestSerializer)
        lifetime = timedelta(seconds=body["lifetime_seconds"])
        token, text = create_join_token(
            actor=self.actor,
            now=clock.now(),
            note=body["note"],
            lifetime=lifetime,
            max_uses=body["uses"],
        )
        answer = {**JoinTokenSerializer(token).data, "token": text}
        return without_store(Response(answer, status=status.HTTP_201_CREATED))
