"""Capacity: what fits, and how many nodes a load needs."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import OpenApiExample, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from exaserve_ops.api.serializers.capacity import CapacityPlanSerializer, CapacityRequestSerializer
from exaserve_ops.api.views.base import OpsViewSet
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.serving.domain.fleet_plan import Load, NodeKind, plan_fleet
from exaserve_ops.serving.domain.memory_plan import AcceleratorMemory
from exaserve_ops.serving.domain.reference_points import CHAT_TOKENS, LLAMA_8B, LLAMA_8B_BYTES
from exaserve_ops.serving.models import Model
from exaserve_ops.serving.selectors.capacity import CapacityAsk, accelerator_kinds, workload_of

_PROMPT, _OUTPUT, _LIMIT = CHAT_TOKENS
_FLEET_OF_1536 = OpenApiExample(
    "128 nodes of 12 replicas",
    value={
        "accelerator": {"memory_bytes": 80 << 30, "per_node": 4},
        "workloads": [
            {
                "name": "8B chat",
                "config": dict(LLAMA_8B),
                "weights_bytes": LLAMA_8B_BYTES,
                "sequences_per_replica": 32,
                "seconds_per_request": 8,
                "load": {
                    "prompt_tokens": _PROMPT,
                    "output_tokens": _OUTPUT,
                    "limit_tokens": _LIMIT,
                    "requests_per_second": 6144,
                },
            }
        ],
    },
    request_only=True,
)
_REGISTERED = OpenApiExample(
    "A registered model on cards of this fleet",
    value={
        "accelerator": {"name": "NVIDIA H100 80GB HBM3"},
        "spare_ratio": 0.1,
        "workloads": [
            {
                "model": "llama-3.1-8b",
                "engine": "vllm",
                "engine_options": {"max_model_len": 32768, "kv_cache_dtype": "fp8"},
                "measured_from": "chat",
                "load": {
                    "prompt_tokens": 2000,
                    "output_tokens": 300,
                    "limit_tokens": 32768,
                    "requests_per_second": 50,
                },
            }
        ],
    },
    request_only=True,
)


class CapacityViewSet(OpsViewSet[Model]):
    """Questions about capacity; nothing is changed by asking."""

    permission_by_action: ClassVar[dict[str, str]] = {"plan_for": "serving.view_model"}

    @extend_schema(
        request=CapacityRequestSerializer,
        responses={200: CapacityPlanSerializer},
        examples=[_FLEET_OF_1536, _REGISTERED],
    )
    def plan_for(self, request: Request) -> Response:  # noqa: ARG002 - DRF's signature
        """Say what fits on an accelerator and how many nodes a load needs, with the arithmetic."""
        body = self.read_body(CapacityRequestSerializer)
        kind = _node_kind(body["accelerator"], body["spare_ratio"])
        now = clock.now()
        asks = [_ask_of(workload) for workload in body["workloads"]]
        plan = plan_fleet([workload_of(ask, now=now) for ask in asks], kind)
        return Response(CapacityPlanSerializer(plan).data)


def _node_kind(asked: dict[str, Any], spare_ratio: float) -> NodeKind:
    memory_bytes, per_node, kind = asked["memory_bytes"], asked["per_node"], asked["kind"]
    shares_memory = False
    if asked["name"]:
        known = next((found for found in accelerator_kinds() if found.name == asked["name"]), None)
        if known is not None:
            memory_bytes, per_node = memory_bytes or known.memory_bytes, per_node or known.per_node
            kind, shares_memory = known.kind, known.shares_memory
        elif memory_bytes is None:
            raise InvalidInputError("accelerator.name", f"no node has a '{asked['name']}'; give memory_bytes")
    if memory_bytes is None:
        raise InvalidInputError("accelerator.memory_bytes", "give the memory of one accelerator, or its name")
    return NodeKind(
        AcceleratorMemory(memory_bytes, kind, shares_memory=shares_memory), per_node or 1, spare_ratio
    )


def _ask_of(body: dict[str, Any]) -> CapacityAsk:
    return CapacityAsk(
        load=Load(**body["load"]),
        model=body["model"],
        name=body["name"],
        config=body["config"],
        weights_bytes=body["weights_bytes"] or 0,
        engine=body["engine"],
        engine_version=body["engine_version"],
        engine_options=body["engine_options"],
        sequences=body["sequences_per_replica"],
        budget_bytes=body["memory_per_replica_bytes"],
        seconds_per_request=body["seconds_per_request"],
        tokens_per_second=body["tokens_per_second_per_replica"],
        measured_from=body["measured_from"],
        measured_kv_bytes_per_token=body["measured_kv_bytes_per_token"],
        accepts_upper_bound=body["accept_upper_bound"],
    )
