"""Weights on a node's disk: what the control plane wants there, and what is there. Since 1.5."""

from __future__ import annotations

import enum

from workers.protocol.imports import ImportSeen
from workers.protocol.part import Part


class WeightsSource(Part, frozen=True, kw_only=True):
    """One place that has a revision's files; a node tries them in the order that it is told."""

    kind: str
    """`folder`, `http`, `s3`, `hub` or `peer`; an agent passes over kinds that it does not know."""
    location: str
    """`file:///folder`, `https://host/path`, `s3://bucket/prefix`, `https://hub/owner/name/resolve/commit`."""
    secret: str = ""
    """Name of a secret that lies on the node (`secrets/<name>` in the agent's home), never the secret."""


class SwarmParent(Part, frozen=True, kw_only=True):
    """One whom pieces may be pulled from: a node, or `origin`, which has no address here."""

    node_id: str
    host: str = ""
    port: int = 0


class SwarmOrder(Part, frozen=True, kw_only=True):
    """A node's part in the swarm of one revision, as planned."""

    epoch: int
    """Of the key; rises with each new one, and the one before holds on for its time."""
    key: str
    """64 hex digits: signs and checks requests for pieces of this revision."""
    valid_seconds: float
    """How long the key holds, on the clock of who was told it."""
    stripes: tuple[tuple[SwarmParent, ...], ...] = ()
    """For each stripe whom to pull from, the planned parent first; none: nobody yet, or it has all."""


class SwarmPull(Part, frozen=True, kw_only=True):
    """How one stripe comes."""

    stripe: int
    parent: str
    stage: str
    """`waiting`, `connecting`, `starved` (the parent has nothing new), `flowing`, `done` or `failed`."""
    bytes_per_second: float = 0.0
    starved_ratio: float = 0.0
    """Share of the last seconds in which the parent had nothing new."""
    lasted_seconds: float = 0.0
    """Since this parent is pulled from."""
    bottleneck: str = ""
    """What most time went into: `parent`, `network`, `check`, `disk` or `cap`."""
    why: str = ""
    """What last went wrong."""


class SwarmComplaint(Part, frozen=True, kw_only=True):
    """What a node has to say against a parent."""

    parent: str
    bad_pieces: int = 0
    unreachable: bool = False


class SwarmStream(Part, frozen=True, kw_only=True):
    """What goes to one child."""

    child: str
    bytes_per_second: float = 0.0
    capped_ratio: float = 0.0
    """Share of the last seconds in which this node's own caps held it back. Since 1.6."""


class SwarmSeen(Part, frozen=True, kw_only=True):
    """A node's part in a swarm, as it goes."""

    pulls: tuple[SwarmPull, ...] = ()
    complaints: tuple[SwarmComplaint, ...] = ()
    streams: tuple[SwarmStream, ...] = ()
    pieces: int = 0
    """Of the revision; 0: not known. Since 1.6, as `have_pieces`."""
    have_pieces: int = 0


class WeightsWanted(Part, frozen=True, kw_only=True):
    """One revision as this node should have it."""

    revision: str
    manifest_digest: str
    """Names the bytes of the manifest, which the node reads from Redis (`manifest.key_of`)."""
    total_bytes: int
    """Of all its files: judged against the disk before the manifest is there."""
    name: str = ""
    """For people."""
    sources: tuple[WeightsSource, ...] = ()
    """Nearest first."""
    paused: bool = False
    bytes_per_second: float = 0.0
    """0: as fast as it goes."""
    priority: int = 0
    """What is fetched first where several are wanted: the higher one. Replicas wait for 100 and more."""
    swarm: SwarmOrder | None = None
    """Its pieces come as this says, and from the sources only for whom it sends there; none: from these."""
    engine_cache: str = ""
    """Not weights, but what this engine compiled: put into its cache on the node. Since 1.6."""


class WeightsState(enum.Enum):
    """How a revision stands on a node."""

    WAITING = "waiting"
    """Wanted; the reason says what it waits for."""
    FETCHING = "fetching"
    PAUSED = "paused"
    READY = "ready"
    """Whole, verified, and in its place: a replica can start from it."""
    FAILED = "failed"
    """Cannot be had as things are; the reason says why. Tried again, ever more rarely."""


class WeightsFrom(Part, frozen=True, kw_only=True):
    """What came from one source, in bytes that were verified."""

    kind: str
    bytes: int
    name: str = ""
    """Host or node that it came from."""


class WeightsHeld(Part, frozen=True, kw_only=True):
    """One revision as it stands on this node."""

    revision: str
    state: WeightsState
    total_bytes: int = 0
    have_bytes: int = 0
    """Verified and on disk."""
    bytes_per_second: float = 0.0
    eta_seconds: float | None = None
    reason: str = ""
    wanted: bool = False
    """False: kept because there was room; the first to go when there is not."""
    in_use: bool = False
    """A replica here runs or starts from it."""
    sources: tuple[WeightsFrom, ...] = ()
    damaged_pieces: int = 0
    """Pieces that were not what the manifest says, on their way or on the disk."""
    unused_seconds: float = 0.0
    swarm: SwarmSeen | None = None
    """`None`: it is in no swarm here."""
    spoilt: bool = False
    """Not to be had by fault of the weights: their sources give other bytes than the manifest says, or what
    it says can be loaded by no engine. Since 1.6."""


class WeightsReport(Part, frozen=True, kw_only=True):
    """All weights on a node's disk."""

    revision: int = 0
    """Of the newest `ApplyWeights` that was taken in."""
    disk_total_bytes: int = 0
    disk_free_bytes: int = 0
    used_bytes: int = 0
    """By weights, staged ones included."""
    problem: str = ""
    """Why nothing can be stored here; empty: all is well."""
    held: tuple[WeightsHeld, ...] = ()
    in_swarms: bool = False
    """Whether this node can be in swarms: give pieces to others, and take them from there."""
    piece_port: int = 0
    """Where it gives pieces, on its own address; 0 while it is in no swarm."""
    imports: tuple[ImportSeen, ...] = ()
    """Every import that it was told of. Since 1.6."""
