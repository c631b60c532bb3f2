"""How many replicas there are of what is wanted, and who is too many. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.facts import SERVING, DeploymentSnapshot, ReplicaFacts
from exaserve_ops.serving.domain.steps import Create

FIRST_TO_GO = {
    status: rank
    for rank, status in enumerate(
        (
            states.PENDING,
            states.FAILED,
            states.UNREACHABLE,
            states.BACKING_OFF,
            states.PLACED,
            states.STARTING,
            states.LOADING,
            states.READY,
        )
    )
}


class Count:
    """Counts replicas by role. One that ails and its replacement are one."""

    def __init__(
        self,
        kept: tuple[ReplicaFacts, ...],
        cover: Mapping[str, ReplicaFacts],
        snapshot: DeploymentSnapshot,
    ) -> None:
        """Count those that are `kept`; `cover` says who takes whose place."""
        self._cover = cover
        self._snapshot = snapshot
        self._by_id = {r.id: r for r in kept}
        self._heads = [r for r in kept if r.id not in cover]
        self._replaced = {r.replaces for r in kept}
        self._kept = kept
        self._crowd: Counter[str] | None = None

    def victims(self, role: str) -> list[ReplicaFacts]:
        """Those that are too many, the first to go first; each with the one whose place it takes."""
        return [r for head in self.surplus(role) for r in self.pair(head)]

    def surplus(self, role: str) -> list[ReplicaFacts]:
        """The same without those whose places they take."""
        own = self.of(role)
        many = len(own) - self._snapshot.wanted(role)
        return sorted(own, key=self.rank)[:many] if many > 0 else []

    def of(self, role: str) -> list[ReplicaFacts]:
        """Those that count."""
        return [r for r in self._heads if r.role == role]

    def lack(self, role: str) -> int:
        """How many are missing."""
        return max(0, self._snapshot.wanted(role) - len(self.of(role)))

    def missing(self, role: str) -> list[Create]:
        """What must be made."""
        lack = self.lack(role)
        if not lack:
            return []
        noun, wanted = "replicas" if role == SERVING else "standbys", self._snapshot.wanted(role)
        return [Create(lack, f"{wanted - lack} of {wanted} {noun} exist", role)]

    def rank(self, replica: ReplicaFacts) -> tuple[int, bool, int, int, int, int, int, float, str]:
        """Lower goes first: who serves nobody, who makes way or was replaced, who spilled, the idlest.

        Then the most crowded, then the newest.
        """
        if self._crowd is None:
            self._crowd = Counter(r.node.domain for r in self._kept if r.node is not None)
        crowd = self._crowd[replica.node.domain] if replica.node is not None else 0
        return (
            FIRST_TO_GO[replica.status],
            not replica.sleeps,
            -int(replica.roll is not None),
            -int(replica.id in self._replaced),
            -int(replica.spilled),
            replica.active_sessions,
            -crowd,
            -replica.created_at.timestamp(),
            replica.name,
        )

    def pair(self, head: ReplicaFacts) -> list[ReplicaFacts]:
        """One that counts, with the one whose place it takes."""
        is_cover = self._cover.get(head.replaces) is head
        return [head, self._by_id[head.replaces]] if is_cover else [head]
