"""How the memory of replicas counts on an accelerator: what is held once, what each, what is claimed. Pure.

Every sum that is planned with is made here, so that no two places count differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from exaserve_ops.serving.domain.accelerator_wish import MpsShare

MARGIN_RATIO = 0.02
"""Part of every accelerator that is never planned with: contexts, fragmentation, what nobody counts."""
CPU = "cpu"
_MILLION = 1_000_000
_MARGIN_MILLIONTHS = round(MARGIN_RATIO * _MILLION)


class AcceleratorSize(NamedTuple):
    """What of an accelerator decides how replicas count on it."""

    kind: str
    total_bytes: int
    shares_memory: bool = False
    """Of a card: replicas hold the same weights on it once."""


UNKNOWN_SIZE = AcceleratorSize(CPU, 0)


@dataclass(frozen=True, slots=True)
class Terms:
    """How one replica's memory counts, beyond being so many bytes."""

    copy: str = ""
    """Names weights that all who name them hold once on a CPU; empty: weights of its own."""
    copy_bytes: int = 0
    """Size of that copy: part of what a replica needs."""
    card_copy: str = ""
    """The same of a card whose memory can be shared, where weights may have another type."""
    card_copy_bytes: int = 0
    claimed_millionths: int = 0
    """Of an accelerator that is no CPU, this share is taken. 0: what is needed and no more."""
    mps: MpsShare | None = None
    host_bytes: int = 0
    """Memory of the machine that it takes beside its accelerator's; a CPU's is the same memory."""

    def copy_on(self, size: AcceleratorSize) -> tuple[str, int]:
        """Name and bytes of the copy that it shares on such an accelerator; an empty name: it shares none."""
        if size.kind == CPU:
            return self.copy, self.copy_bytes
        # A client of MPS allocates all by itself: shared memory would go round its limit.
        if size.shares_memory and self.mps is None:
            return self.card_copy, self.card_copy_bytes
        return "", 0

    def own_bytes(self, needed_bytes: int, size: AcceleratorSize) -> int:
        """What it alone adds to an accelerator, beside a copy that it shares.

        `needed_bytes`: of this accelerator, weights included.
        """
        if self.claimed_millionths and size.kind != CPU:
            return max(self.claimed_bytes(size.total_bytes), needed_bytes)
        if self.mps is not None and self.mps.memory_bytes:
            return max(self.mps.memory_bytes, needed_bytes)
        beside = self.host_bytes if size.kind == CPU else 0
        return needed_bytes - self.copy_on(size)[1] + beside

    def claimed_bytes(self, total_bytes: int) -> int:
        """The share of an accelerator of this size that the engine takes. Rounded down: shares add up."""
        return total_bytes * self.claimed_millionths // _MILLION


PLAIN = Terms()


@dataclass(frozen=True, slots=True)
class Holding:
    """What one live replica holds of one accelerator."""

    uuid: str
    needed_bytes: int
    """Of this accelerator, weights included."""
    terms: Terms = PLAIN


@dataclass(slots=True)
class Promise:
    """All that is promised of one accelerator."""

    reserved_bytes: int = 0
    replicas: int = 0
    mps_replicas: int = 0
    mps_percent: int = 0
    copies: dict[str, int] = field(default_factory=dict)
    """Size of each copy of weights that lies there, by its name."""


NOTHING_PROMISED = Promise()
"""Of an accelerator that nobody holds. Nobody changes it."""


def tally(holdings: Iterable[Holding], sizes: Mapping[str, AcceleratorSize]) -> dict[str, Promise]:
    """Add up what is promised of each accelerator, in whatever order. `sizes` are by UUID.

    A copy of weights counts once while anybody who shares it is left, and is gone with the last one.
    """
    promises: dict[str, Promise] = {}
    for held in holdings:
        size, terms = sizes.get(held.uuid, UNKNOWN_SIZE), held.terms
        promise = promises.setdefault(held.uuid, Promise())
        promise.replicas += 1
        promise.reserved_bytes += terms.own_bytes(held.needed_bytes, size)
        name, copy_bytes = terms.copy_on(size)
        if name and name not in promise.copies:
            promise.copies[name] = copy_bytes
            promise.reserved_bytes += copy_bytes
        if terms.mps is not None:
            promise.mps_replicas += 1
            promise.mps_percent += terms.mps.thread_percent
    return promises


def margin_bytes(total_bytes: int) -> int:
    """What of an accelerator of this size is never planned with."""
    return total_bytes * _MARGIN_MILLIONTHS // _MILLION
