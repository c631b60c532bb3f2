"""A swarm in the middle of its work, as nodes and the leader tell it: the plan is the planner's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from exaserve_ops.rollouts.domain.swarm import Origin, Peer, Swarm
from exaserve_ops.rollouts.domain.swarm_planning import plan_swarm
from exaserve_ops.weights.domain.held import HeldWeights, PullSight, StoreSight, SwarmSight
from exaserve_ops.weights.domain.swarm_notes import Carried, EgressPoint, FeedNote, Judged, SwarmNotes

RATE = 100e6
PIECE = 4 << 20


@dataclass
class ToldSwarm:
    """What pages and REST read."""

    sights: dict[str, StoreSight] = field(default_factory=dict)
    notes: dict[str, SwarmNotes] = field(default_factory=dict)


def told_swarm(
    revision: str,
    nodes: Sequence[tuple[str, str]],
    *,
    total_bytes: int = 1000 * PIECE,
    ratios: Mapping[str, float] | None = None,
    began_at_seconds: float = 1e9,
    **noted: object,
) -> ToldSwarm:
    """A swarm of (node id, rack), of which each has its ratio (0.5 where none is given); 1 is whole."""
    have = {node_id: (ratios or {}).get(node_id, 0.5) for node_id, _ in nodes}
    peers = tuple(Peer(node_id, rack, have[node_id], RATE, RATE) for node_id, rack in nodes)
    plan = plan_swarm(Swarm(total_bytes, PIECE, peers, Origin(RATE)))
    pulls: dict[str, list[PullSight]] = {}
    for feed in plan.feeds:
        seen = PullSight(feed.stripe, feed.parent, "flowing", RATE / 2, 0.0, 9.0, "network")
        pulls.setdefault(feed.child, []).append(seen)
    fed_by = {feed.child: feed.parent for feed in plan.feeds}
    told = ToldSwarm()
    for node_id, _ in nodes:
        here = int(total_bytes * have[node_id])
        is_whole = have[node_id] >= 1.0
        kind = "http" if fed_by.get(node_id, "origin") == "origin" else "peer"
        held = HeldWeights(
            revision,
            "ready" if is_whole else "fetching",
            total_bytes,
            here,
            bytes_per_second=0.0 if is_whole else RATE,
            eta_seconds=None if is_whole else (total_bytes - here) / RATE,
            wanted=True,
            sources=((kind, "there", here),),
            swarm=SwarmSight(
                pulls=tuple(pulls.get(node_id, ())),
                streams=tuple((f.child, RATE / 2) for f in plan.feeds if f.parent == node_id),
                pieces=total_bytes // PIECE,
                have_pieces=here // PIECE,
            ),
        )
        told.sights[node_id] = StoreSight(1, held=(held,), in_swarms=True, piece_port=7000)
    facts: dict[str, object] = {
        "stripes": plan.stripes,
        "pace_bytes_per_second": plan.pace_bytes_per_second,
        "feeds": tuple(FeedNote(f.child, f.stripe, f.parent, f.depth, f.why) for f in plan.feeds),
        "waiting": tuple((one.node_id, one.why) for one in plan.waiting),
        "judged": Judged(),
        "counted": {node_id: Carried(0, 0) for node_id, _ in nodes},
        "origin_bytes": total_bytes // 2,
        "peer_bytes": total_bytes // 2 * (len(nodes) - 1),
        "points": tuple(
            EgressPoint(began_at_seconds + 2 * n, total_bytes * n // 20, 0, 0, RATE * len(nodes))
            for n in range(11)
        ),
    }
    told.notes[revision] = SwarmNotes(revision, total_bytes, began_at_seconds, **(facts | noted))  # type: ignore[arg-type]  # fields of a test
    return told
