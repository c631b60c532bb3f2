"""What the tiers need of their surroundings, and what they say of themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from workers.kv.tiers.policy import DemotionRules, LowerTier
from workers.kv.tiers.thrash import ThrashRules


class BlockMover(Protocol):
    """Copies blocks between the memory that is computed in and host memory."""

    block_bytes: int

    def to_host(self, block: int, slot: int) -> None:
        """Copy a block to a slot of host memory."""
        ...

    def from_host(self, slot: int, block: int) -> None:
        """Copy a slot of host memory to a block."""
        ...

    def read_host(self, slot: int) -> bytes:
        """Content of a slot of host memory."""
        ...

    def export(self, block: int) -> bytes:
        """Content of a block."""
        ...

    def load(self, block: int, content: bytes | bytearray) -> None:
        """Replace a block's content."""
        ...


class CachedBlocks(Protocol):
    """The tier above: blocks where they are computed with."""

    now_seconds: float

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        ...

    @property
    def total_blocks(self) -> int:
        """All blocks."""
        ...

    def coldest(self, count: int) -> list[tuple[int, bytes, float]]:
        """The cached blocks that would be evicted first: block, digest, since when nobody holds it."""
        ...


@dataclass(frozen=True, slots=True)
class StoreRules:
    """How much is moved, and when."""

    demotion: DemotionRules = field(default_factory=DemotionRules)
    thrash: ThrashRules = field(default_factory=ThrashRules)
    step_blocks: int = 64
    """At most so many are copied up from host memory in one step."""
    reads_in_flight: int = 64
    fetch_seconds: float = 5.0
    """A fetch that takes longer is ended, and what is missing is computed."""


@dataclass(slots=True)
class Swapped:
    """What moved, since the start."""

    blocks_in: dict[LowerTier, int] = field(default_factory=lambda: {"host": 0, "disk": 0})
    blocks_out: dict[LowerTier, int] = field(default_factory=lambda: {"host": 0, "disk": 0})
    fetch_waits: int = 0
    fetch_seconds: float = 0.0
    checksum_failures: int = 0
    dropped_blocks: int = 0
    """Content that a lower tier gave up, or could not take, so that it is nowhere below."""


@dataclass(frozen=True, slots=True)
class TierUse:
    """One lower tier, for people."""

    used_blocks: int
    capacity_blocks: int
    off_reason: str = ""


@dataclass(frozen=True, slots=True)
class TierFacts:
    """All tiers below one replica's blocks at one moment."""

    uses: Mapping[LowerTier, TierUse]
    swapped: Swapped
    block_bytes: int
    thrash_reason: str = ""
    thrash_starts: int = 0
