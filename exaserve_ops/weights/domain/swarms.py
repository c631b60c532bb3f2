"""How a revision's weights go from node to node, put together from what nodes say. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from exaserve_ops.weights.domain.held import READY, HeldWeights, PullSight, StoreSight

PEER = "peer"
"""Kind of a source that is another node."""


@dataclass(frozen=True, slots=True)
class MemberHealth:
    """One node of a swarm."""

    node_id: str
    state: str
    have_ratio: float
    bytes_per_second: float
    gives_bytes_per_second: float
    peer_bytes: int
    """Verified bytes that came from other nodes."""
    origin_bytes: int
    damaged_pieces: int
    stripes: tuple[PullSight, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class SwarmHealth:
    """All nodes that want a revision, or have it for others."""

    nodes: int
    whole_nodes: int
    bytes_per_second: float
    """That nodes take in, all together."""
    origin_bytes: int
    origin_copies: float
    """Of the whole revision, that left the origin so far."""
    peer_bytes: int
    members: tuple[MemberHealth, ...]


def swarm_health(revision: str, total_bytes: int, sights: Mapping[str, StoreSight]) -> SwarmHealth:
    """Put together what nodes say of one revision; those that neither want nor give it are left out."""
    members = [
        _member(node_id, held)
        for node_id, sight in sorted(sights.items())
        for held in sight.held
        if held.revision == revision and (held.wanted or held.swarm is not None)
    ]
    origin = sum(member.origin_bytes for member in members)
    return SwarmHealth(
        nodes=len(members),
        whole_nodes=sum(member.state == READY for member in members),
        bytes_per_second=sum(member.bytes_per_second for member in members),
        origin_bytes=origin,
        origin_copies=origin / total_bytes if total_bytes else 0.0,
        peer_bytes=sum(member.peer_bytes for member in members),
        members=tuple(members),
    )


def _member(node_id: str, held: HeldWeights) -> MemberHealth:
    swarm = held.swarm
    return MemberHealth(
        node_id=node_id,
        state=held.state,
        have_ratio=held.have_bytes / held.total_bytes if held.total_bytes else 0.0,
        bytes_per_second=held.bytes_per_second,
        gives_bytes_per_second=sum(rate for _, rate in swarm.streams) if swarm is not None else 0.0,
        peer_bytes=sum(count for kind, _, count in held.sources if kind == PEER),
        origin_bytes=sum(count for kind, _, count in held.sources if kind != PEER),
        damaged_pieces=held.damaged_pieces,
        stripes=swarm.pulls if swarm is not None else (),
        reason=held.reason,
    )
