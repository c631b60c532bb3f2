"""Weights on a node's disk: what the control plane wants there, and what is there. Since 1.5."""

from __future__ import annotations

import enum

from workers.protocol.part import Part


class WeightsSource(Part, frozen=True, kw_only=True):
    """One place that has a revision's files; a node tries them in the order that it is told."""

    kind: str
    """`folder`, `http`, `s3`, `hub` or `peer`; an agent passes over kinds that it does not know."""
    location: str
    """`file:///folder`, `https://host/path`, `s3://bucket/prefix`, `https://hub/owner/name/resolve/commit`."""
    secret: str = ""
    """Name of a secret that lies on the node (`secrets/<name>` in the agent's home), never the secret."""


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
