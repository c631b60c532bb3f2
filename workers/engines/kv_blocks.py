"""Who holds which KV block: reference counts, prefix cache and eviction.

Pure bookkeeping on block numbers; the tensors themselves live elsewhere. Not safe for use by several
threads at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockUse:
    """How a pool's blocks are used now; the three add up to `total`."""

    free: int
    used: int
    """Held by at least one sequence."""
    cached: int
    """Held by none, kept for their content, evicted when needed."""

    @property
    def total(self) -> int:
        """All blocks of the pool."""
        return self.free + self.used + self.cached


class BlockAllocator:
    """Blocks with reference counts; unreferenced ones with known content stay until evicted.

    A block's content is named by the digest of the whole prefix that ends with it, so equal digests
    mean equal keys and values and the block may be shared.
    """

    def __init__(self, total_blocks: int) -> None:
        """Make a pool of `total_blocks`, all free."""
        if total_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {total_blocks}")
        self.total_blocks = total_blocks
        self._references = [0] * total_blocks
        self._free = list(range(total_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Cached blocks without a holder, least recently used first."""
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now: free ones and evictable ones."""
        return len(self._free) + len(self._idle)

    def use(self) -> BlockUse:
        """Count the blocks by state."""
        free, cached = len(self._free), len(self._idle)
        return BlockUse(free=free, used=self.total_blocks - free - cached, cached=cached)

    def match(self, chain: Sequence[bytes]) -> list[int]:
        """Return the cached blocks of the longest known prefix of a hash chain."""
        blocks: list[int] = []
        for digest in chain:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_idle(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody holds, so that acquiring them lowers `available`."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a holder to blocks that `match` returned."""
        for block in blocks:
            if self._references[block] == 0:
                del self._idle[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks for one holder, evicting the least recently used cached ones.

        Returns `None`, and takes nothing, when there are not enough.
        """
        if count > self.available:
            return None
        blocks = [self._take_one() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def register(self, block: int, digest: bytes) -> None:
        """Name the content of a held, full block. The first block with a content keeps the name."""
        if digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one holder of each block of a sequence, given in the sequence's order.

        The end of a sequence becomes evictable before its beginning, which more others can share.
        """
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise ValueError(f"block {block} is released more often than it was taken")
            self._references[block] -= 1
            if self._references[block] > 0:
                continue
            if block in self._digest_of:
                self._idle[block] = None
            else:
                self._free.append(block)

    def _take_one(self) -> int:
        if self._free:
            return self._free.pop()
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._digest_of.pop(block)]
        return block
