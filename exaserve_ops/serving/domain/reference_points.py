"""Fleets that operators run, as plans that anybody can compute again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exaserve_ops.serving.domain.engine_launch import read_launch
from exaserve_ops.serving.domain.fleet_plan import STATED, Load, NodeKind, Rates, Workload
from exaserve_ops.serving.domain.memory_plan import AcceleratorMemory, ModelFigures

GIB = 1 << 30

LLAMA_8B: Mapping[str, Any] = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
LLAMA_8B_BYTES = 16_060_522_496
LLAMA_13B: Mapping[str, Any] = {
    "model_type": "llama",
    "torch_dtype": "float16",
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
LLAMA_13B_BYTES = 26_031_738_880
SECONDS_PER_REQUEST = 8.0
"""A chat answer of 128 tokens at 16 tokens a second."""
CHAT_TOKENS = (384, 128, 4096)
"""Prompt and answer on average, 512 together, and the longest: the mix that static reservation fails at."""


@dataclass(frozen=True, slots=True)
class ReferencePoint:
    """A fleet, and the question that it answers."""

    name: str
    nodes: int
    replicas_per_node: int
    workload: Workload
    kind: NodeKind

    @property
    def replicas(self) -> int:
        """Of all nodes."""
        return self.nodes * self.replicas_per_node


def reference_points() -> tuple[ReferencePoint, ...]:
    """The four fleets: 64 x 8, 128 x 12, 256 x 12 and 512 x 8."""
    middling = ModelFigures("13B chat", LLAMA_13B, LLAMA_13B_BYTES)
    small = ModelFigures("8B chat", LLAMA_8B, LLAMA_8B_BYTES)
    return (
        # One 13B replica on each of eight 48 GiB cards.
        _point(64, 8, middling, sequences=24, card_gib=48, cards=8),
        # Three 8B replicas on each of four 80 GiB cards.
        _point(128, 12, small, sequences=32, card_gib=80, cards=4),
        _point(256, 12, small, sequences=32, card_gib=80, cards=4),
        # One 8B replica on each of eight 24 GiB cards.
        _point(512, 8, small, sequences=16, card_gib=24, cards=8),
    )


def _point(
    nodes: int, each: int, model: ModelFigures, *, sequences: int, card_gib: int, cards: int
) -> ReferencePoint:
    prompt, output, limit = CHAT_TOKENS
    asked = nodes * each * sequences / SECONDS_PER_REQUEST
    workload = Workload(
        model,
        read_launch("vllm", {}),
        Load(prompt, output, limit, requests_per_second=asked),
        Rates(SECONDS_PER_REQUEST, STATED),
        sequences=sequences,
    )
    kind = NodeKind(AcceleratorMemory(card_gib * GIB, f"{card_gib} GiB card"), cards)
    return ReferencePoint(f"{nodes} x {each}", nodes, each, workload, kind)
