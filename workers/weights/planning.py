"""What a store does next: which revisions it fetches, which go to make room, and why the others wait.

Pure: facts in, a plan with reasons out. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StorePolicy:
    """How a store is kept."""

    margin_bytes: int = 4 << 30
    """Always left free on the disk."""
    limit_bytes: int = 0
    """Of all weights together. 0: the disk."""
    at_once: int = 2
    """Revisions that are fetched at the same time."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One revision that is to be here."""

    revision: str
    total_bytes: int
    priority: int = 0
    paused: bool = False
    blocked: str = ""
    """Why it cannot be fetched now, such as that its manifest is not here."""


@dataclass(frozen=True, slots=True)
class Ready:
    """One whole revision."""

    own_bytes: int
    """What removing it frees."""
    used: int
    """Number of its last use; the smallest goes first."""
    in_use: bool


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """One moment of a store."""

    wanted: Sequence[Wanted]
    ready: Mapping[str, Ready]
    staged: Mapping[str, int]
    """Bytes that each staged revision takes on the disk already."""
    free_bytes: int
    used_bytes: int
    damaged_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StorePlan:
    """What to do, in this order: drop, make room, fetch."""

    drop: tuple[str, ...] = ()
    """Staged revisions that nobody wants any more."""
    delete_damaged: bool = False
    evict: tuple[str, ...] = ()
    fetch: tuple[str, ...] = ()
    """To be fetched now; what is fetched and not named stops."""
    waits: Mapping[str, str] = field(default_factory=dict)
    """Why each other wanted revision is not fetched now."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why it cannot be had as things are."""


def plan_store(facts: StoreFacts, policy: StorePolicy) -> StorePlan:
    """Decide. What is fetched is admitted by its whole size first; nothing is evicted in vain."""
    names = {one.revision for one in facts.wanted}
    missing = sorted(
        (one for one in facts.wanted if one.revision not in facts.ready),
        key=lambda one: (-one.priority, one.revision),
    )
    room = _Room(facts, policy, names)
    fetch: list[str] = []
    waits: dict[str, str] = {}
    refused: dict[str, str] = {}
    for one in missing:
        if one.blocked or one.paused:
            waits[one.revision] = one.blocked or "paused"
        elif len(fetch) >= policy.at_once:
            waits[one.revision] = f"{policy.at_once} others are fetched first"
        elif why_not := room.admit(one):
            refused[one.revision] = why_not
        else:
            fetch.append(one.revision)
    return StorePlan(
        drop=tuple(sorted(facts.staged.keys() - names)),
        delete_damaged=room.deletes_damaged,
        evict=tuple(room.evicted),
        fetch=tuple(fetch),
        waits=waits,
        refused=refused,
    )


class _Room:
    """Room on the disk while the plan is made."""

    def __init__(self, facts: StoreFacts, policy: StorePolicy, wanted: set[str]) -> None:
        self._facts = facts
        self._policy = policy
        dropped = sum(size for revision, size in facts.staged.items() if revision not in wanted)
        self._left = facts.free_bytes - policy.margin_bytes + dropped
        if policy.limit_bytes:
            self._left = min(self._left, policy.limit_bytes - facts.used_bytes + dropped)
        self._candidates = sorted(
            (
                (ready.used, revision, ready.own_bytes)
                for revision, ready in facts.ready.items()
                if revision not in wanted and not ready.in_use
            ),
            reverse=True,
        )
        self._damaged = facts.damaged_bytes
        self.deletes_damaged = False
        self.evicted: list[str] = []

    def admit(self, one: Wanted) -> str:
        """Set room aside for a revision; returns why there is none."""
        need = max(0, one.total_bytes - self._facts.staged.get(one.revision, 0))
        may_go = self._damaged + sum(size for _, _, size in self._candidates)
        if need > self._left + may_go:
            return (
                f"insufficient space: {need:,} bytes are needed beyond a margin of "
                f"{self._policy.margin_bytes:,}; {max(0, self._left):,} are left and {may_go:,} may go"
            )
        if need > self._left and self._damaged:
            self.deletes_damaged = True
            self._left += self._damaged
            self._damaged = 0
        while need > self._left:
            _, revision, size = self._candidates.pop()
            self.evicted.append(revision)
            self._left += size
        self._left -= need
        return ""
