"""How weights go from node to node, put together from what nodes say and what the leader notes. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from exaserve_ops.weights.domain.held import (
    FAILED,
    FETCHING,
    PAUSED,
    READY,
    HeldWeights,
    PullSight,
    StoreSight,
)
from exaserve_ops.weights.domain.swarm_notes import EgressPoint, SwarmNotes

PEER = "peer"
"""Kind of a source that is another node."""
ORIGIN = "origin"
"""Stands among parents for where the weights come from in the first place."""
FLOWING, STARVED, DONE = "flowing", "starved", "done"
"""Stages of a stripe: bytes come; the parent lives and has nothing new; all of it is here."""
NETWORK, PARENT_CAP = "network", "parent_cap"
"""What holds a stripe up, as its child sees it; and what that is where the parent says so."""

NO_SWARM, LIVE, OVER = "none", "live", "over"
"""States of a swarm. `over`: all of its nodes are whole, or nobody wants it any more."""


_NODE_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""As it stands in reasons that planner, judge and agents give."""


@dataclass(frozen=True, slots=True)
class Place:
    """A node as people know it."""

    name: str
    rack: str = ""


@dataclass(frozen=True, slots=True)
class MemberHealth:
    """One node of a swarm."""

    node_id: str
    name: str
    rack: str
    state: str
    have_ratio: float
    bytes_per_second: float
    eta_seconds: float | None
    """By the speed that is measured; `None` while nothing comes."""
    gives_bytes_per_second: float
    gives_to: int
    """Streams that it gives."""
    peer_bytes: int
    """Verified bytes that came from other nodes."""
    origin_bytes: int
    damaged_pieces: int
    stripes: tuple[PullSight, ...]
    reason: str

    @property
    def whole(self) -> bool:
        """Whether it has everything, verified."""
        return self.state == READY


@dataclass(frozen=True, slots=True)
class Trouble:
    """One node that is not as it should be."""

    node_id: str
    name: str
    kind: str
    """`barred`, `slow`, `unreachable`, `failed` or `waiting`."""
    why: str


@dataclass(frozen=True, slots=True)
class Feed:
    """Where one node gets one stripe: as it is, or as it is planned where nothing comes yet."""

    child: str
    stripe: int
    parent: str
    """A node's id, or `origin`."""
    why: str
    """Why the plan has it so."""


@dataclass(frozen=True, slots=True)
class SwarmHealth:
    """All nodes that want a revision, or have it for others."""

    state: str
    nodes: int
    whole_nodes: int
    total_bytes: int
    """Of one copy."""
    stripes: int
    pieces: int
    """That its nodes need, all together; 0 where no node tells of pieces."""
    whole_pieces: int
    coming_pieces: int
    """On their way now: one on each stream."""
    bytes_per_second: float
    """That nodes take in, all together."""
    eta_seconds: float | None
    """Until the last node is whole, by what is measured now; `None` while one of them gets nothing."""
    origin_bytes: int
    """That left the origin: since the swarm began, where the leader has counted."""
    origin_copies: float
    """Of the whole revision."""
    peer_bytes: int
    began_at_seconds: float | None
    """Since 1970, as the next."""
    ended_at_seconds: float | None
    members: tuple[MemberHealth, ...]
    feeds: tuple[Feed, ...]
    troubles: tuple[Trouble, ...]
    points: tuple[EgressPoint, ...]


@dataclass(frozen=True, slots=True)
class SwarmFacts:
    """All that the health of a swarm is made of."""

    revision: str
    total_bytes: int
    sights: Mapping[str, StoreSight]
    """By node id."""
    places: Mapping[str, Place] = field(default_factory=dict)
    notes: SwarmNotes | None = None


def swarm_health(facts: SwarmFacts) -> SwarmHealth:
    """Put together what nodes say of one revision; those that neither want nor give it are left out."""
    held = {
        node_id: one
        for node_id, sight in facts.sights.items()
        for one in sight.held
        if one.revision == facts.revision and (one.wanted or one.swarm is not None)
    }
    order = sorted(held, key=lambda node_id: (_place(facts, node_id).name, node_id))
    capped = {
        (child, parent) for parent, one in held.items() if one.swarm is not None for child in one.swarm.capped
    }
    members = tuple(_member(facts, node_id, held[node_id], capped) for node_id in order)
    pieces = [_pieces(one) for one in held.values()]
    notes = facts.notes
    origin = notes.origin_bytes if notes is not None else sum(member.origin_bytes for member in members)
    peer = notes.peer_bytes if notes is not None else sum(member.peer_bytes for member in members)
    return SwarmHealth(
        state=_state(held.values(), notes),
        nodes=len(members),
        whole_nodes=sum(member.whole for member in members),
        total_bytes=facts.total_bytes,
        stripes=notes.stripes if notes is not None else 0,
        pieces=sum(needed for needed, _ in pieces),
        whole_pieces=sum(have for _, have in pieces),
        coming_pieces=sum(pull.stage == FLOWING for member in members for pull in member.stripes),
        bytes_per_second=sum(member.bytes_per_second for member in members),
        eta_seconds=_eta(members),
        origin_bytes=origin,
        origin_copies=origin / facts.total_bytes if facts.total_bytes else 0.0,
        peer_bytes=peer,
        began_at_seconds=notes.began_at_seconds if notes is not None else None,
        ended_at_seconds=notes.ended_at_seconds if notes is not None else None,
        members=members,
        feeds=tuple(_feeds(facts, members)),
        troubles=tuple(_troubles(facts, members)),
        points=notes.points if notes is not None else (),
    )


def _state(held: Iterable[HeldWeights], notes: SwarmNotes | None) -> str:
    if notes is not None:
        return LIVE if notes.ended_at_seconds is None else OVER
    return LIVE if any(one.swarm is not None and one.swarm.pulls for one in held) else NO_SWARM


def _member(
    facts: SwarmFacts, node_id: str, held: HeldWeights, capped: Collection[tuple[str, str]]
) -> MemberHealth:
    swarm, place = held.swarm, _place(facts, node_id)
    return MemberHealth(
        node_id=node_id,
        name=place.name,
        rack=place.rack,
        state=held.state,
        have_ratio=held.have_bytes / held.total_bytes if held.total_bytes else 0.0,
        bytes_per_second=held.bytes_per_second,
        eta_seconds=held.eta_seconds,
        gives_bytes_per_second=sum(rate for _, rate in swarm.streams) if swarm is not None else 0.0,
        gives_to=len(swarm.streams) if swarm is not None else 0,
        peer_bytes=sum(count for kind, _, count in held.sources if kind == PEER),
        origin_bytes=sum(count for kind, _, count in held.sources if kind != PEER),
        damaged_pieces=held.damaged_pieces,
        stripes=tuple(_pull(node_id, pull, capped) for pull in swarm.pulls) if swarm is not None else (),
        reason=held.reason,
    )


def _pull(child: str, pull: PullSight, capped: Collection[tuple[str, str]]) -> PullSight:
    """Name the parent's cap where the child only sees a slow network."""
    is_capped = pull.bottleneck == NETWORK and (child, pull.parent) in capped
    return replace(pull, bottleneck=PARENT_CAP) if is_capped else pull


def _place(facts: SwarmFacts, node_id: str) -> Place:
    return facts.places.get(node_id, Place(node_id[:8]))


def _pieces(held: HeldWeights) -> tuple[int, int]:
    """Pieces that a node needs, and that it has."""
    if held.swarm is None or not held.swarm.pieces:
        return (0, 0)
    pieces = held.swarm.pieces
    return (pieces, pieces if held.state == READY else held.swarm.have_pieces)


def _eta(members: Sequence[MemberHealth]) -> float | None:
    left = [member for member in members if member.state not in (READY, FAILED, PAUSED)]
    known = [member.eta_seconds for member in left if member.eta_seconds is not None]
    return max(known) if known and len(known) == len(left) else None


def _named(facts: SwarmFacts, why: str) -> str:
    """Put names for the ids of nodes."""
    return _NODE_ID.sub(lambda found: _place(facts, found.group()).name, why)


def _feeds(facts: SwarmFacts, members: Sequence[MemberHealth]) -> Iterator[Feed]:
    notes = facts.notes
    planned = {(feed.child, feed.stripe): feed for feed in notes.feeds} if notes is not None else {}
    for member in members:
        pulls = {pull.stripe: pull for pull in member.stripes}
        for stripe in sorted({*pulls, *range(notes.stripes if notes is not None else 0)}):
            pull, plan = pulls.get(stripe), planned.get((member.node_id, stripe))
            if member.whole or (pull is not None and pull.stage == DONE) or (pull is None and plan is None):
                continue
            parent = (pull.parent if pull is not None else "") or (plan.parent if plan is not None else "")
            if parent:
                kept = plan is not None and plan.parent == parent
                yield Feed(member.node_id, stripe, parent, _named(facts, plan.why) if plan and kept else "")


# -- what is wrong -------------------------------------------------------------------------------
def _troubles(facts: SwarmFacts, members: Sequence[MemberHealth]) -> Iterator[Trouble]:
    """The worst first; one node may have several."""

    notes = facts.notes
    said = [(m.node_id, "failed", m.reason or "it says no reason") for m in members if m.state == FAILED]
    if notes is not None and notes.ended_at_seconds is None:
        said += _judged(notes)
    said += [(m.node_id, "waiting", why) for m in members if (why := _waits_for(m, facts))]
    for node_id, kind, why in said:
        yield Trouble(node_id, _place(facts, node_id).name, kind, _named(facts, why))


def _judged(notes: SwarmNotes) -> list[tuple[str, str, str]]:
    judged = notes.judged
    return [
        *((node, "barred", f"nobody pulls from it: {why}") for node, why in sorted(judged.barred.items())),
        *(
            (node, "slow", f"its streams brought {_megabytes(rate)} in all; those of others bring far more")
            for node, rate in sorted(judged.slow_givers.items())
        ),
        *(
            (node, "slow", f"it takes in {_megabytes(rate)} from parents that serve others well")
            for node, rate in sorted(judged.slow_takers.items())
        ),
        *((child, "unreachable", f"it cannot pull from {parent}") for child, parent in judged.parted),
    ]


def _waits_for(member: MemberHealth, facts: SwarmFacts) -> str:
    """Why nothing comes to a node that fetches; empty where something does, or nothing should."""
    if member.state != FETCHING or any(pull.stage == FLOWING for pull in member.stripes):
        return ""
    planned = dict(facts.notes.waiting) if facts.notes is not None else {}
    if member.node_id in planned:
        return planned[member.node_id]
    asked = next((pull for pull in member.stripes if pull.stage != "done"), None)
    if asked is None:
        return member.reason
    if asked.stage == STARVED:
        parent = "the origin" if asked.parent == ORIGIN else _place(facts, asked.parent).name
        return f"{parent} has nothing newer"
    return asked.why or member.reason


def _megabytes(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e6:.1f} MB/s"
