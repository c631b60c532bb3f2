"""What a replica has in its prefix cache, as far as its events tell.

Blocks are known by their content: a chain of digests over their tokens. So two ranks, or two media, that
hold the same prefix hold one thing, whatever they call it, and it is gone when the last of them lets it
go. Engines let go of what was used longest ago; how long ago that was is what gateways want to know: all
that was used later is cached still. A block was used when it was stored and when anything was stored
behind it; that a prompt met it whole and added nothing is not told.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from workers.engines.kv_events import Batch, BlockName, Cleared, Event, Removed, Stored, extend_chain

MOST_BLOCKS = 131_072
"""Of one replica: about 30 MB. Beyond, the oldest are forgotten, which makes nothing evicted."""
_ROOT = b"\0" * 16

Holding = tuple[int, int, BlockName]
"""Rank, group, and what the engine calls the block there."""


@dataclass(slots=True)
class _Held:
    digest: bytes
    media: tuple[str, ...]
    """Where the block lies: accelerator, host memory, storage."""


@dataclass(slots=True)
class _Content:
    parent: bytes
    used_seconds: float
    tokens: int
    holders: int = 0


class KvSight:
    """Takes in events of one replica in order; times are monotonic seconds. For one thread."""

    def __init__(self, *, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._held: OrderedDict[Holding, _Held] = OrderedDict()
        self._contents: dict[bytes, _Content] = {}
        self._partial_groups: set[int] = set()
        self._evicted_until: float = -math.inf
        self.cached_tokens = 0
        """Of distinct content."""

    def __len__(self) -> int:
        """Blocks of distinct content that it has."""
        return len(self._contents)

    def __contains__(self, digest: bytes) -> bool:
        """Whether it has the content of this digest."""
        return digest in self._contents

    def evicted_idle_seconds(self, now: float) -> float | None:
        """How long ago what was evicted last had been used; `None` if nothing was."""
        return None if math.isinf(self._evicted_until) else max(0.0, now - self._evicted_until)

    def drop(self, now: float) -> None:
        """Forget everything: it has nothing that anybody knows of."""
        self._held.clear()
        self._contents.clear()
        self.cached_tokens = 0
        self._evicted_until = max(self._evicted_until, now)

    def take(self, batch: Batch, *, rank: int, now: float) -> None:
        """Take in one batch of one rank."""
        for event in batch.events:
            self._take_event(event, rank, now)
        while len(self._held) > self._most_blocks:
            _, held = self._held.popitem(last=False)
            self._release(held.digest)

    def _take_event(self, event: Event, rank: int, now: float) -> None:
        match event:
            case Stored():
                self._store(event, rank, now)
            case Removed():
                self._remove(event, rank)
            case Cleared():
                self._clear(rank, now)

    def _store(self, event: Stored, rank: int, now: float) -> None:
        if not event.whole_prefix:
            self._partial_groups.add(event.group)
            return
        parent = self._parent_of(event, rank)
        for name, tokens, apart in zip(event.names, event.tokens, event.apart, strict=True):
            digest = extend_chain(parent, tokens, apart)
            content = self._contents.get(digest)
            if content is None:
                content = self._contents[digest] = _Content(parent, now, len(tokens))
                self.cached_tokens += len(tokens)
            content.used_seconds = now
            content.holders += 1
            holding = (rank, event.group, name)
            before = self._held.pop(holding, None)
            media = () if before is None or before.digest != digest else before.media
            self._held[holding] = _Held(digest, tuple({*media, event.medium}))
            if before is not None:
                self._release(before.digest)
            self._touch(parent, now)
            parent = digest

    def _parent_of(self, event: Stored, rank: int) -> bytes:
        if event.parent is None:
            return _ROOT
        known = self._held.get((rank, event.group, event.parent))
        if known is not None:
            return known.digest
        # Stored before anybody listened: content of this engine that nothing else can be compared with.
        return extend_chain(repr((rank, event.group, event.parent)).encode()[:64], ())

    def _touch(self, digest: bytes, now: float) -> None:
        content = self._contents.get(digest)
        if content is not None:
            content.used_seconds = max(content.used_seconds, now)

    def _remove(self, event: Removed, rank: int) -> None:
        if event.group in self._partial_groups:
            return
        for name in event.names:
            held = self._held.get((rank, event.group, name))
            if held is None:
                continue
            held.media = tuple(medium for medium in held.media if medium != event.medium)
            if held.media:
                continue
            del self._held[(rank, event.group, name)]
            gone = self._release(held.digest)
            if gone is not None:
                self._evicted_until = max(self._evicted_until, gone.used_seconds)

    def _release(self, digest: bytes) -> _Content | None:
        """One holder less. Returns the content if nobody holds it any more."""
        content = self._contents[digest]
        content.holders -= 1
        if content.holders:
            return None
        del self._contents[digest]
        self.cached_tokens -= content.tokens
        # Its beginning was used as late as what was stored behind it, which engines let go of first.
        self._touch(content.parent, content.used_seconds)
        return content

    def _clear(self, rank: int, now: float) -> None:
        for holding in [one for one in self._held if one[0] == rank]:
            self._release(self._held.pop(holding).digest)
        self._evicted_until = max(self._evicted_until, now)
