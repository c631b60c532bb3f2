"""Whether a node has room for a replica, and with which of its accelerators. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from exaserve_ops.serving.domain.accelerator_wish import WHOLE
from exaserve_ops.serving.domain.rooms import TAKEN, AcceleratorRoom, NodeRoom, PlacementRequest

NOT_NAMED = "not among the deployment's nodes"


def node_refusal(request: PlacementRequest, node: NodeRoom) -> str:
    """Why the node will not do however much memory is free; empty where it may do."""
    if request.nodes and node.name not in request.nodes:
        return NOT_NAMED
    if not node.accepts:
        return node.refusal
    if node.node_id in request.avoid:
        return "a replica of this deployment failed here"
    if request.engine not in node.engines:
        return f"its agent has no engine '{request.engine}'"
    return request.blocked or _lacks(request, node)


def _lacks(request: PlacementRequest, node: NodeRoom) -> str:
    """What the node does not have at all, taken or free; empty where it has it."""
    if request.wish.mps is not None and node.mps_problem:
        return f"no MPS here: {node.mps_problem}"
    if request.wish.wants_slice and not any(a.suits(request) for a in node.accelerators):
        least = request.wish.slice_memory_bytes
        return f"has no {request.wish.noun}{f' of {mib(least)} MiB or more' if least else ''}"
    return ""


def find_room(request: PlacementRequest, node: NodeRoom) -> tuple[AcceleratorRoom, ...] | str:
    """Return the node's accelerators with room for the request, the best first, or why they are too few."""
    return node_refusal(request, node) or free_accelerators(request, node)


def free_accelerators(request: PlacementRequest, node: NodeRoom) -> tuple[AcceleratorRoom, ...] | str:
    """`find_room` on a node that may be used."""
    suitable = [a for a in node.accelerators if a.suits(request)]
    if len(suitable) < request.accelerators:
        return _too_few(request, node, len(suitable))
    objections = [a.objection(request) for a in suitable]
    fitting = [a for a, objection in zip(suitable, objections, strict=True) if not objection]
    if len(fitting) < request.accelerators:
        return _no_room(request, suitable, objections)
    return tuple(sorted(fitting, key=lambda a: _order(request, a)))


def _order(request: PlacementRequest, room: AcceleratorRoom) -> tuple[int, int, int, str]:
    """Which of a node's accelerators first: those that MPS shares already, then who keeps most free.

    Of slices the smallest: a large one is for who needs it.
    """
    size = room.memory_bytes if request.wish.wants_slice else 0
    return (-room.mps_percent, size, room.cost_bytes(request) - room.free_bytes, room.uuid)


def _too_few(request: PlacementRequest, node: NodeRoom, found: int) -> str:
    barred = [f"; {a.uuid} is quarantined: {a.quarantine}" for a in node.accelerators if a.quarantine]
    barred += [f"; {a.uuid} is in MIG mode: its slices count" for a in node.accelerators if a.split]
    noun = "whole cards" if request.wish.kind == WHOLE else "accelerators"
    return f"has {found} {noun}, needs {request.accelerators}{''.join(barred)}"


def _no_room(
    request: PlacementRequest, suitable: Sequence[AcceleratorRoom], objections: Sequence[str]
) -> str:
    """The objection of what comes nearest to fitting, or that all slices are taken."""
    if all(objection == TAKEN for objection in objections):
        return slices_taken(len(suitable), request)
    pairs = [(a, objection) for a, objection in zip(suitable, objections, strict=True) if objection]
    untaken = [pair for pair in pairs if pair[1] != TAKEN]
    nearest = max(untaken or pairs, key=lambda pair: (pair[0].free_bytes, pair[0].uuid))
    return slices_taken(1, request) if nearest[1] == TAKEN else nearest[1]


def slices_taken(count: int, request: PlacementRequest, where: str = "") -> str:
    """Such as `2 slices 3g.40gb in the fleet, both taken`."""
    noun = f"{'slice' if count == 1 else 'slices'} {request.wish.profile}".strip()
    which = {1: "taken", 2: "both taken"}.get(count, "all taken")
    return f"{count} {noun}{where}, {which}"


def mib(count: int) -> int:
    """Bytes in whole MiB, none below zero."""
    return max(0, count) // (1 << 20)
