"""A memory plan as parts of one accelerator, for a bar and a list."""

from __future__ import annotations

from dataclasses import dataclass

from exaserve_ops.serving.domain.fleet_plan import WorkloadPlan
from exaserve_ops.serving.domain.memory_plan import AcceleratorMemory
from exaserve_ops.serving.domain.reservation import margin_bytes

WEIGHTS, KV, OVERHEAD, CLAIMED, FREE, MARGIN = "weights", "kv", "overhead", "claimed", "free", "margin"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of an accelerator's memory."""

    kind: str
    name: str
    bytes: int
    start_ratio: float
    """Where it begins, 0-1."""
    ratio: float
    detail: str = ""


def breakdown(plan: WorkloadPlan, room: AcceleratorMemory) -> tuple[Part, ...]:
    """What one accelerator is filled with by the replicas of a plan; parts add up to all of it."""
    memory, count = plan.memory, plan.per_group
    copies = 1 if plan.shares_weights else count
    weights = copies * memory.weights_bytes
    kv = count * memory.wanted_kv_bytes
    overhead = count * memory.overhead_bytes
    taken = weights + count * max(plan.bytes_each, memory.claim.bytes) - count * memory.weights_bytes
    margin = margin_bytes(room.total_bytes)
    beyond = max(0, taken - weights - kv - overhead)
    free = max(0, room.total_bytes - margin - weights - kv - overhead - beyond)
    told = [
        (WEIGHTS, "Weights", weights, f"{copies} x {memory.weights_bytes:,}"),
        (KV, "KV of what is asked for", kv, f"{count} x {memory.wanted_kv_bytes:,}"),
        (OVERHEAD, "Overhead, at most", overhead, f"{count} x {memory.overhead_bytes:,}"),
        (CLAIMED, "More KV, by its flags", beyond, memory.claim.rule),
        (FREE, "Free", free, ""),
        (MARGIN, "Margin", min(margin, max(0, room.total_bytes - weights - kv - overhead - beyond)), ""),
    ]
    parts, start = [], 0.0
    for kind, name, size, detail in told:
        ratio = min(size / room.total_bytes, 1 - start) if room.total_bytes else 0.0
        if size:
            parts.append(Part(kind, name, size, start, ratio, detail))
        start += ratio
    return tuple(parts)
