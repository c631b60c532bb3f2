"""What nodes say that they have on their disks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ABSENT = "absent"
WAITING = "waiting"
FETCHING = "fetching"
PAUSED = "paused"
READY = "ready"
FAILED = "failed"
STATES = (WAITING, FETCHING, PAUSED, READY, FAILED)

IMPORT_WAITING = "waiting"
IMPORT_LISTING = "listing"
IMPORT_FETCHING = "fetching"
IMPORT_FOUND = "found"
IMPORT_FAILED = "failed"

NOTE_BYTES = 1 << 30
"""Progress of less is not worth a row."""


@dataclass(frozen=True, slots=True)
class PullSight:
    """How one stripe comes to a node; the words are those of the protocol."""

    stripe: int
    parent: str
    stage: str
    bytes_per_second: float = 0.0
    starved_ratio: float = 0.0
    lasted_seconds: float = 0.0
    bottleneck: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class ComplaintSight:
    """What a node has to say against a parent."""

    parent: str
    bad_pieces: int = 0
    unreachable: bool = False


@dataclass(frozen=True, slots=True)
class SwarmSight:
    """A node's part in a swarm, as it goes."""

    pulls: tuple[PullSight, ...] = ()
    complaints: tuple[ComplaintSight, ...] = ()
    streams: tuple[tuple[str, float], ...] = ()
    """(child, bytes per second) of what it gives."""
    capped: frozenset[str] = frozenset()
    """Children whose streams this node's own caps hold back."""
    pieces: int = 0
    """Of the revision; 0: not known."""
    have_pieces: int = 0


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """One revision as a node has it; sizes in bytes."""

    revision: str
    state: str
    total_bytes: int = 0
    have_bytes: int = 0
    bytes_per_second: float = 0.0
    eta_seconds: float | None = None
    reason: str = ""
    wanted: bool = False
    in_use: bool = False
    sources: tuple[tuple[str, str, int], ...] = ()
    """(kind, host or node, bytes) of what came from each."""
    damaged_pieces: int = 0
    spoilt: bool = False
    """Not to be had by fault of the weights themselves, not of the node or of a source that is away."""
    swarm: SwarmSight | None = None


@dataclass(frozen=True, slots=True)
class ImportSight:
    """A model that a node takes in from elsewhere, as it goes; the words are those of the protocol."""

    import_id: str
    state: str
    attempt: int = 1
    reason: str = ""
    location: str = ""
    """The place as it stays; empty until it is listed."""
    files: int = 0
    files_done: int = 0
    total_bytes: int = 0
    have_bytes: int = 0
    bytes_per_second: float = 0.0
    eta_seconds: float | None = None
    findings_digest: str = ""


@dataclass(frozen=True, slots=True)
class StoreSight:
    """All weights of one node."""

    revision: int
    """Of the newest wish that it has taken in."""
    disk_total_bytes: int = 0
    disk_free_bytes: int = 0
    used_bytes: int = 0
    problem: str = ""
    held: tuple[HeldWeights, ...] = ()
    in_swarms: bool = False
    """Whether it can give pieces to other nodes, and take them from there."""
    piece_port: int = 0
    """Where it gives them; 0 while it is in no swarm."""
    imports: tuple[ImportSight, ...] = ()


@dataclass(frozen=True, slots=True)
class WeightsOnNode:
    """Whether a replica on that node could start from a revision now, and if not, why not."""

    state: str = ABSENT
    reason: str = ""
    have_bytes: int = 0
    total_bytes: int = 0
    spoilt: bool = False
    """The weights themselves are at fault."""

    @property
    def ready(self) -> bool:
        """Whole, verified and in its place."""
        return self.state == READY


def mark_of(held: HeldWeights) -> tuple[object, ...]:
    """Equal for what is not worth writing down at once: speeds are not, nor progress."""
    return (
        held.state,
        held.reason if held.state in (FAILED, WAITING) else "",
        held.total_bytes,
        held.damaged_pieces,
        held.in_use,
        held.spoilt,
    )


def marks_of(sight: StoreSight) -> Mapping[str, tuple[object, ...]]:
    """The mark of each revision."""
    return {held.revision: mark_of(held) for held in sight.held}


def progress_of(sight: StoreSight) -> tuple[int, ...]:
    """How far all of it is, in steps that are worth writing down now and then."""
    return tuple(held.have_bytes // NOTE_BYTES for held in sight.held)
