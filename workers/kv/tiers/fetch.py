"""Blocks on their way back to where they are computed with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from workers.kv.tiers.policy import LowerTier


class Fetch:
    """The next blocks of one prefix, brought into blocks that the caller holds.

    Whatever is missing or damaged ends it there: what lies before is used, the rest is computed.
    """

    def __init__(self, digests: Sequence[bytes], blocks: Sequence[int], *, began_at: float) -> None:
        """Bring the content of `digests` into `blocks`, one for one."""
        self.digests = tuple(digests)
        self.blocks = list(blocks)
        self.began_at = began_at
        self.asked = 0
        """Leading blocks that are in place or on their way."""
        self._arrived: dict[int, LowerTier] = {}
        self._limit = len(self.digests)
        self.ended = False
        """Nothing is written to its blocks any more."""

    @property
    def complete(self) -> bool:
        """Whether nothing more will come."""
        return self.ended or len(self._arrived) >= self._limit

    @property
    def in_place(self) -> int:
        """Leading blocks that may be used, once complete."""
        return next((n for n in range(self._limit) if n not in self._arrived), self._limit)

    @property
    def sources(self) -> Counter[LowerTier]:
        """How many of the blocks in place came from each tier."""
        return Counter(self._arrived[n] for n in range(self.in_place))

    def expects(self, index: int) -> bool:
        """Whether a block's content is still of use."""
        return not self.ended and index < self._limit

    @property
    def wanted(self) -> bool:
        """Whether more is to be asked for."""
        return not self.ended and self.asked < self._limit

    def note_arrival(self, index: int, tier: LowerTier) -> None:
        """Note that a block's content is in place."""
        self._arrived[index] = tier

    def cut(self, index: int) -> None:
        """Note that a block cannot be had: nothing behind it is of use."""
        self._limit = min(self._limit, index)
        for behind in [n for n in self._arrived if n >= self._limit]:
            del self._arrived[behind]

    def end(self) -> None:
        """Take what is in place, and nothing more."""
        self.cut(self.in_place)
        self.ended = True

    def follow(self, moves: Mapping[int, int]) -> None:
        """Go on with blocks that lie elsewhere now."""
        self.blocks = [moves.get(block, block) for block in self.blocks]
