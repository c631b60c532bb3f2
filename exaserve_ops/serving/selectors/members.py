"""Reading of replicas over several nodes: their members, and what plans of them need of nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple
from uuid import UUID

from django.db.models import Exists, OuterRef, Q, QuerySet

from exaserve_ops.inventory.domain.liveness import DEAD, RETIRED
from exaserve_ops.inventory.models import Node, NodeHardware
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.closeness import UNKNOWN, Closeness
from exaserve_ops.serving.domain.gang_rules import GangFacts, MemberFacts
from exaserve_ops.serving.domain.gangs import MEMBERS_SINCE_MINOR
from exaserve_ops.serving.models import Model, Replica, ReplicaMember
from exaserve_ops.weights.domain.held import READY
from exaserve_ops.weights.models import NodeWeights

KNOWN_TO_AGENTS = (*states.REPLICA.live[1:],)  # all but pending
WAITS_TO_START = Q(status=states.PLACED, wanted=Replica.Wanted.RUN, start_waits_since__isnull=False)
"""It has a place, and its agents are not told of it before it is its turn."""
MEMBER_WAITS = Q(
    replica__status=states.PLACED,
    replica__wanted=Replica.Wanted.RUN,
    replica__start_waits_since__isnull=False,
)
"""The same of its members."""
ONE_NODE = Q(node_count=1)
"""Replicas that have no members: the node in their row says where they are."""


def live_members() -> QuerySet[ReplicaMember]:
    """Members that take room on their nodes: nobody has seen the last of them."""
    return ReplicaMember.objects.filter(replica__status__in=KNOWN_TO_AGENTS, ended_at=None).order_by()


class MemberPlace(NamedTuple):
    """Where a member is, and what it holds there."""

    replica_id: UUID
    node_id: UUID
    accelerator_uuids: list[str]
    memory_bytes: int
    release_id: UUID


def member_places(replicas: Collection[UUID] | None = None) -> list[MemberPlace]:
    """Places of all live members, or of those of these replicas."""
    rows = live_members() if replicas is None else live_members().filter(replica__in=replicas)
    columns = ("replica", "node", "accelerator_uuids", "replica__memory_bytes", "replica__release")
    return [MemberPlace(*row) for row in rows.values_list(*columns)]


def member_nodes(replica_ids: Collection[UUID]) -> dict[UUID, tuple[UUID, ...]]:
    """Ids of the nodes of each of these that runs on several, in the order of its members."""
    found: dict[UUID, tuple[UUID, ...]] = {}
    rows = ReplicaMember.objects.filter(replica__in=replica_ids).order_by("replica", "number")
    for replica_id, node_id in rows.values_list("replica", "node"):
        found[replica_id] = (*found.get(replica_id, ()), node_id)
    return found


def gangs_to_follow() -> list[UUID]:
    """Replicas over several nodes that have places and have not ended."""
    rows = Replica.objects.filter(node_count__gt=1, status__in=KNOWN_TO_AGENTS)
    return list(rows.order_by("pk").values_list("pk", flat=True))


def gang_facts(replica: Replica, members: Iterable[ReplicaMember]) -> GangFacts:
    """What is decided from, of a replica with its deployment, release and model, and its members in order."""
    members = list(members)
    lacking = _without_weights(replica, members)
    return GangFacts(
        status=replica.status,
        wanted=replica.wanted,
        generation=replica.generation,
        epoch=replica.gang_epoch,
        began_at=replica.gang_began_at,
        ready_by=replica.gang_ready_by,
        ready_at=replica.ready_at,
        retry_at=replica.gang_retry_at,
        crashes=replica.gang_crashes,
        start_seconds=float(replica.deployment.start_seconds),
        may_start=replica.start_waits_since is None,
        members=tuple(
            MemberFacts(
                number=member.number,
                node_name=member.node.name,
                state=member.state,
                epoch=member.epoch,
                generation=member.generation,
                reason=_reason(member),
                node_dead=member.node.liveness in {DEAD, RETIRED},
                has_weights=member.node_id not in lacking,
                ended=member.ended_at is not None,
                problem=members_problem_of(member.node),
            )
            for member in members
        ),
    )


def _reason(member: ReplicaMember) -> str:
    """How it ended, where that is known of its last process; else what its agent says."""
    is_over = member.state in (states.FAILED, states.BACKING_OFF)
    knows = is_over and member.exit_text and member.exit_attempt == member.attempt
    return member.exit_text if knows else member.reason


def _without_weights(replica: Replica, members: Iterable[ReplicaMember]) -> set[UUID]:
    """Nodes on whose disks the weights are still to come; asked only before a start."""
    if replica.gang_began_at is not None or replica.release.model.storage != Model.Storage.NODE:
        return set()
    nodes = {member.node_id for member in members}
    here = NodeWeights.objects.filter(node__in=nodes, revision=replica.release.model.digest, state=READY)
    return nodes - set(here.values_list("node", flat=True))


def closeness_of_nodes() -> dict[UUID, Closeness]:
    """How near accelerators and adapters are to one another, of the nodes whose tools tell."""
    rows = NodeHardware.objects.exclude(topology=None).values_list("node", "topology")
    return {node_id: _closeness(topology) for node_id, topology in rows}


def _closeness(topology: Any) -> Closeness:  # noqa: ANN401 - JSON as it was recorded
    ends = topology.get("endpoints", [])
    if not ends:
        return UNKNOWN
    ways = {
        frozenset((ends[link["a"]]["name"], ends[link["b"]]["name"])): int(link["rank"])
        for link in topology.get("links", [])
    }
    return Closeness(ways, tuple(end["name"] for end in ends if not end["accelerator"]))


def on_node(node_id: UUID) -> Q:
    """Replicas that run on a node, or that have a member there of which something may be left."""
    member = ReplicaMember.objects.filter(replica=OuterRef("pk"), node=node_id, ended_at=None)
    return Q(ONE_NODE, node=node_id) | Q(Exists(member))


def members_problem_of(node: Node) -> str:
    """Why no part of a replica over several nodes can run on a node; empty where one can.

    An agent that does not know of members would start its part as a replica of its own.
    """
    if node.protocol_minor >= MEMBERS_SINCE_MINOR:
        return ""
    return f"its agent speaks 1.{node.protocol_minor}, and parts need 1.{MEMBERS_SINCE_MINOR}: update it"
