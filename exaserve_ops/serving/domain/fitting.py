"""Whether a node has room for a replica, and with which of its accelerators. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

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


def why_never(request: PlacementRequest, node: NodeRoom) -> str:
    """Why the node could not run one of these if it were empty; empty where it could."""
    if refusal := node_refusal(request, node):
        return refusal
    could = (1 for a in node.accelerators if a.suits(request) and not a.emptied().objection(request))
    if sum(islice(could, request.accelerators)) == request.accelerators:
        return ""
    empty = replace(node, accelerators=tuple(a.emptied() for a in node.accelerators))
    found = free_accelerators(request, empty)
    return found if isinstance(found, str) else ""


@dataclass(frozen=True, slots=True)
class Ability:
    """Which nodes could run replicas of a deployment, full or not, and why the others could not."""

    node_ids: frozenset[str]
    others: tuple[tuple[str, int], ...]
    """Reasons, each with its number of nodes; the most frequent first."""


def find_able(request: PlacementRequest, nodes: Iterable[NodeRoom]) -> Ability:
    """Judge all nodes for a deployment: those that its replicas can be spread over.

    What is not known of the request, such as its memory, is held against no node.
    """
    known = replace(request, blocked="")
    reasons = {node.node_id: _why_not(known, node) for node in nodes}
    if request.spans_nodes:
        reasons |= _alone(reasons, nodes, request.nodes_per_replica)
    counts = Counter(reason for reason in reasons.values() if reason)
    others = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return Ability(frozenset(pk for pk, reason in reasons.items() if not reason), tuple(others))


def _why_not(request: PlacementRequest, node: NodeRoom) -> str:
    if request.spans_nodes and node.members_problem:
        return node.members_problem
    answers = [why_never(variant, node) for variant in request.variants()]
    return answers[0] if all(answers) else ""


def _alone(reasons: dict[str, str], nodes: Iterable[NodeRoom], wanted: int) -> dict[str, str]:
    """Of nodes that could run a part those that lack the others of one supernode."""
    able = [node for node in nodes if not reasons[node.node_id]]
    together = Counter(node.supernode for node in able)
    return {
        node.node_id: f"{together[node.supernode]} of {wanted} nodes that could run a part are in supernode "
        f"{node.supernode}"
        if node.supernode
        else "it is in no supernode"
        for node in able
        if not node.supernode or together[node.supernode] < wanted
    }


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
