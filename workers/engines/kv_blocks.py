"""Who holds which KV block: reference counts, prefix cache and eviction.

Pure bookkeeping on block numbers; the tensors themselves live elsewhere. Blocks come in extents,
which may be added and taken away at run time: a replica of a node's pool leases them, one with
memory of its own has a single extent for good. Not safe for use by several threads at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from workers.kv.tiers.heat import EvictionOrder, Heat
from workers.protocol.digests import KV_BLOCK_TOKENS

_REMEMBERED_EVICTIONS = 16_384
"""Digests of evicted blocks that are kept to tell why a prefix was missed: some 2 MB at most."""

CopyBlock = Callable[[int, int], None]
"""Copies the content of one block to another: (from, to)."""
LoseBlock = Callable[[int, bytes], None]
"""Told of a block and the digest of its content just before that is given up for other content."""


@dataclass(frozen=True, slots=True)
class BlockUse:
    """How a pool's blocks are used now; the three add up to `total`."""

    free: int
    """Those that could be had from the node's pool at once are counted in."""
    used: int
    """Held by at least one sequence."""
    cached: int
    """Held by none, kept for their content, evicted when needed."""

    @property
    def total(self) -> int:
        """All blocks of the pool."""
        return self.free + self.used + self.cached


@dataclass(frozen=True, slots=True)
class PromptUse:
    """A prompt's tokens by what the prefix cache had of them.

    Cached, evicted, unshared and partial ones add up to the prompt.
    """

    cached_tokens: int
    """In any tier; those that came from a lower one are counted there, too."""
    evicted_tokens: int = 0
    """In blocks that were in cache once and had to go."""
    unshared_tokens: int = 0
    """In blocks that no earlier sequence began with."""
    partial_tokens: int = 0
    """Beyond the last block that a prefix hit could cover: shorter than a block, or the last token's."""
    host_tokens: int = 0
    disk_tokens: int = 0

    @property
    def accelerator_tokens(self) -> int:
        """Cached tokens that were where they are computed with."""
        return self.cached_tokens - self.host_tokens - self.disk_tokens


@dataclass(frozen=True, slots=True)
class Vacated:
    """Extents that hold nothing any more and are no longer used, and where their content went."""

    extents: tuple[int, ...]
    moves: dict[int, int]
    """Old to new block number; every holder must follow at once."""


@dataclass(slots=True)
class _Extent:
    """One extent's blocks by state."""

    free: list[int]
    size: int
    live: set[int] = field(default_factory=set)
    used_at_seconds: float = 0.0
    """When a block of it was last taken, found again or released; only shown."""

    @property
    def cached(self) -> int:
        return self.size - len(self.free) - len(self.live)


class BlockAllocator:
    """Blocks with reference counts; unreferenced ones with known content stay until evicted.

    A block's content is named by the digest of the whole prefix that ends with it, so equal digests
    mean equal keys and values and the block may be shared. Blocks are taken from the fullest extent
    that has a free one, so that others become empty.
    """

    def __init__(
        self, total_blocks: int = 0, *, extent_blocks: int | None = None, heat: Heat | None = None
    ) -> None:
        """Make a pool of `total_blocks` in one extent; or, with `extent_blocks`, an empty one.

        `heat` says in which order cached blocks are evicted; without it, least recently used first.
        """
        if extent_blocks is None and total_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {total_blocks}")
        self.extent_blocks = extent_blocks or total_blocks
        self.obtainable_blocks = 0
        """Blocks that the node's pool would lend at once, as last heard; only shown."""
        self.now_seconds = 0.0
        """The caller's clock at its last step, by which last uses are told; nothing here is decided by it."""
        self._extents: dict[int, _Extent] = {}
        self._with_free: dict[int, dict[int, None]] = {}
        """Count of free blocks to the extents that have so many; full ones are left out."""
        self._free = 0
        self._references: dict[int, int] = {}
        self._heat = heat or Heat()
        self._idle: EvictionOrder[int] = EvictionOrder()
        """Cached blocks without a holder."""
        self._idle_since: dict[int, float] = {}
        self.on_evict: LoseBlock | None = None
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self.evicted_blocks = 0
        """Blocks whose content was given up for others', ever."""
        self.evicted_idle_since_seconds: float | None = None
        """Since when the block that was evicted last for lack of room had no holder, by `now_seconds`: what
        was used later is still cached, by and large. `None`: there was always room."""
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        """Digests of content that was evicted and has not come back, oldest first."""
        if extent_blocks is None:
            self.add_extents([0])
        self._heat.watch(self)

    # -- extents ---------------------------------------------------------------------------------
    @property
    def total_blocks(self) -> int:
        """Blocks of all extents that are there now."""
        return len(self._extents) * self.extent_blocks

    @property
    def extents_in_use(self) -> int:
        """Extents that hold anything, live or cached."""
        return len(self._extents) - len(self._with_free.get(self.extent_blocks, ()))

    def extent_facts(self) -> dict[int, tuple[int, int, float]]:
        """Live blocks, cached blocks and time of last use of every extent."""
        return {n: (len(e.live), e.cached, e.used_at_seconds) for n, e in self._extents.items()}

    def add_extents(self, numbers: Iterable[int]) -> None:
        """Take in extents; their blocks are free."""
        for number in numbers:
            if number in self._extents:
                raise ValueError(f"extent {number} is there already")
            first = number * self.extent_blocks
            blocks = list(range(first + self.extent_blocks - 1, first - 1, -1))
            self._extents[number] = _Extent(blocks, self.extent_blocks)
            self._free += self.extent_blocks
            self._file(number)

    def vacate(self, count: int, copy: CopyBlock, *, only_empty: bool = False) -> Vacated:
        """Give up to `count` extents up: empty ones first, then those with the fewest live blocks.

        Cached blocks in them are evicted, live ones are moved to other extents as far as there is
        room for them; what is live anywhere is never dropped. With `only_empty`, nothing moves.
        """
        order = sorted(self._extents, key=lambda n: (len(self._extents[n].live), self._extents[n].cached, -n))
        gone: list[int] = []
        moves: dict[int, int] = {}
        for number in order[:count]:
            extent = self._extents[number]
            room_elsewhere = self.available - len(extent.free) - extent.cached
            if len(extent.live) > room_elsewhere or (only_empty and len(extent.free) < extent.size):
                break
            moves.update(self._empty(number, copy))
            gone.append(number)
        return Vacated(tuple(gone), _end_points(moves))

    def _empty(self, number: int, copy: CopyBlock) -> dict[int, int]:
        extent = self._extents[number]
        for block in [b for b in self._blocks(number) if b in self._idle]:
            self._leave_idle(block)
            self._forget(block)
            self._put_free(block)
        self._unfile(number)  # nothing is allocated here any more
        self._free -= len(extent.free)
        moves = {}
        for block in sorted(extent.live):
            target = self._take_one()
            copy(block, target)
            self._references[target] = self._references.pop(block)
            digest = self._digest_of.pop(block, None)
            if digest is not None:
                self._digest_of[target] = digest
                self._block_of[digest] = target
            moves[block] = target
        del self._extents[number]
        return moves

    # -- blocks ----------------------------------------------------------------------------------
    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now: free ones and evictable ones."""
        return self._free + len(self._idle)

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return self._free

    @property
    def hot_cached(self) -> int:
        """Cached blocks without a holder that are hot."""
        return self._idle.hot

    def coldest(self, count: int) -> list[tuple[int, bytes, float]]:
        """The cached blocks that would be evicted first: block, digest, since when nobody holds it."""
        return [(b, self._digest_of[b], self._idle_since[b]) for b in islice(self._idle, count)]

    def refile(self, digest: bytes, *, coldest: bool) -> None:
        """Follow a change of heat."""
        block = self._block_of.get(digest)
        if block is not None and block in self._idle:
            self._idle.refile(block, hot=self._heat.is_hot(digest), coldest=coldest)

    def age(self) -> None:
        """Follow the halving of uses."""
        self._idle.age()

    def use(self) -> BlockUse:
        """Count the blocks by state."""
        cached = len(self._idle)
        used = self.total_blocks - self._free - cached
        return BlockUse(free=self._free + self.obtainable_blocks, used=used, cached=cached)

    def match(self, chain: Sequence[bytes]) -> list[int]:
        """Return the cached blocks of the longest known prefix of a hash chain."""
        blocks: list[int] = []
        for digest in chain:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def prompt_use(self, chain: Sequence[bytes], *, prompt_tokens: int, cached_blocks: int) -> PromptUse:
        """Say what a prompt found in cache, and why not the rest, as far as evictions are remembered.

        `chain` is the prompt's; at least one of its tokens is always computed.
        """
        whole = (prompt_tokens - 1) // KV_BLOCK_TOKENS
        missed = chain[cached_blocks:whole]
        evicted = sum(1 for digest in missed if digest in self._evicted)
        return PromptUse(
            cached_tokens=cached_blocks * KV_BLOCK_TOKENS,
            evicted_tokens=evicted * KV_BLOCK_TOKENS,
            unshared_tokens=(len(missed) - evicted) * KV_BLOCK_TOKENS,
            partial_tokens=prompt_tokens - whole * KV_BLOCK_TOKENS,
        )

    def count_idle(self, blocks: Iterable[int], *, hot_only: bool = False) -> int:
        """How many of these blocks nobody holds, so that acquiring them lowers `available`."""
        idle = (block for block in blocks if block not in self._references)
        return sum(1 for block in idle if not hot_only or self._heat.is_hot(self._digest_of[block]))

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a holder to blocks that `match` returned."""
        for block in blocks:
            self._heat.note_use(self._digest_of[block])
            if block not in self._references:
                self._leave_idle(block)
                self._references[block] = 0
                self._touch(block).live.add(block)
            self._references[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks for one holder, evicting the coldest cached ones.

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
            self._evicted.pop(digest, None)
            self._heat.note_use(digest)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one holder of each block of a sequence, given in the sequence's order.

        The end of a sequence becomes evictable before its beginning, which more others can share.
        """
        for block in reversed(blocks):
            if block not in self._references:
                raise ValueError(f"block {block} is released more often than it was taken")
            self._references[block] -= 1
            if self._references[block] > 0:
                continue
            del self._references[block]
            self._touch(block).live.remove(block)
            digest = self._digest_of.get(block)
            if digest is not None:
                self._idle.add(block, hot=self._heat.is_hot(digest), uses=self._heat.uses(digest))
                self._idle_since[block] = self.now_seconds
            else:
                self._put_free(block)

    def _take_one(self) -> int:
        """Take a free block, of the fullest extent that has one; else evict the coldest cached one."""
        if self._free:
            number = next(iter(self._with_free[min(self._with_free)]))
            self._unfile(number)
            block = self._extents[number].free.pop()
            self._free -= 1
            self._file(number)
        else:
            block = self._idle.pop()
            self.evicted_idle_since_seconds = self._idle_since.pop(block)
            self._forget(block)
        self._touch(block).live.add(block)
        return block

    def _put_free(self, block: int) -> None:
        number = block // self.extent_blocks
        self._unfile(number)
        self._extents[number].free.append(block)
        self._free += 1
        self._file(number)

    def _leave_idle(self, block: int) -> None:
        self._idle.remove(block)
        del self._idle_since[block]

    def _forget(self, block: int) -> None:
        digest = self._digest_of.pop(block)
        if self.on_evict is not None:
            self.on_evict(block, digest)
        del self._block_of[digest]
        self.evicted_blocks += 1
        self._evicted[digest] = None
        if len(self._evicted) > _REMEMBERED_EVICTIONS:
            self._evicted.popitem(last=False)

    def _file(self, number: int) -> None:
        free = len(self._extents[number].free)
        if free:
            self._with_free.setdefault(free, {})[number] = None

    def _unfile(self, number: int) -> None:
        free = len(self._extents[number].free)
        group = self._with_free.get(free)
        if group is not None:
            group.pop(number, None)
            if not group:
                del self._with_free[free]

    def _touch(self, block: int) -> _Extent:
        extent = self._extents[block // self.extent_blocks]
        extent.used_at_seconds = self.now_seconds
        return extent

    def _blocks(self, number: int) -> Collection[int]:
        return range(number * self.extent_blocks, (number + 1) * self.extent_blocks)


def _end_points(moves: dict[int, int]) -> dict[int, int]:
    """Join moves of a block that was moved twice: its holders know only where it lay first."""
    targets = set(moves.values())
    final = {}
    for start, end in moves.items():
        while end in moves:
            end = moves[end]  # noqa: PLW2901 - following the chain is the point
        if start not in targets:
            final[start] = end
    return final
