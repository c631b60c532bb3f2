"""The tiers below one replica's blocks: what lies there, and how it gets there and back.

Content is named by the digest of its whole prefix and copied, not moved: what was fetched stays where
it was until its place is needed, so that it can leave again for nothing. Host memory takes what the
computing memory gives up, the disk what host memory gives up.

For the thread that computes. It copies to and from host memory itself and never waits for the disk:
reads and writes are jobs of another thread, with a bounded number of blocks on their way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from workers.kv.tiers.block_io import BlockIo, Done, ReadJob, WriteJob
from workers.kv.tiers.fetch import Fetch
from workers.kv.tiers.heat import Heat
from workers.kv.tiers.policy import (
    LOWER_TIERS,
    Candidate,
    Costs,
    Level,
    LowerTier,
    Rate,
    choose_demotions,
    choose_fetch,
    current_cost,
    is_swap_cheaper,
    update_rate,
)
from workers.kv.tiers.ports import BlockMover, CachedBlocks, StoreRules, Swapped, TierFacts, TierUse
from workers.kv.tiers.slots import SlotIndex
from workers.kv.tiers.thrash import ThrashState
from workers.kv.tiers.watch import SwapWatch

_LOOKED_AT = 128
"""The coldest blocks that are looked at for copying down in one step."""
_SPILLED_RATIO = 0.25
"""Part of host memory that is to be free, or to have a copy on disk."""
_FETCHING_SECONDS, _IDLE_SECONDS = 0.002, 0.2
_BAD_READS = 16
"""So many damaged blocks in a row mean that the disk keeps nothing."""


@dataclass(slots=True)
class _Lower:
    """A lower tier as it is now."""

    index: SlotIndex
    off_reason: str = ""


class TieredStore:
    """Host memory and disk below one replica's blocks."""

    def __init__(
        self,
        cached: CachedBlocks,
        mover: BlockMover,
        heat: Heat,
        *,
        host_blocks: int | None = None,
        disk_blocks: int | None = None,
        io: BlockIo | None = None,
        rules: StoreRules = StoreRules(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with empty tiers; `None`: none was asked for. `io` carries out what the disk is to do."""
        self._cached = cached
        self._mover = mover
        self._heat = heat
        self._io = io
        self._rules = rules
        self._clock = clock
        self._lower: dict[LowerTier, _Lower] = {}
        if host_blocks is not None:
            self._lower["host"] = _Lower(SlotIndex(host_blocks, heat))
        if disk_blocks is not None:
            self._lower["disk"] = _Lower(SlotIndex(disk_blocks, heat))
        self._writing: dict[bytes, bytes] = {}
        """Content that is on its way to the disk."""
        self._fetches: list[Fetch] = []
        self._reads: dict[int, tuple[Fetch, int]] = {}
        """By ticket: which block of which fetch."""
        self._tickets = 0
        self._bad_reads = 0
        self._rates: dict[str, Rate] = {}
        self._watch = SwapWatch(heat, rules.thrash)
        self.swapped = Swapped()

    # -- for the scheduler -----------------------------------------------------------------------
    @property
    def tend_seconds(self) -> float:
        """How often to call `tend` while nothing is computed."""
        return _FETCHING_SECONDS if self._fetches else _IDLE_SECONDS

    @property
    def thrash(self) -> ThrashState:
        """Whether swapping has stopped, and why."""
        return self._watch.state

    @property
    def queues_instead(self) -> bool:
        """Whether requests are to wait rather than to push hot content out."""
        return self.thrash.active

    def tend(self) -> None:
        """Take in what the disk has done, go on with fetches, copy cold content down. Before each step."""
        now = self._clock()
        self._cached.now_seconds = now
        for done in self._io.collect() if self._io is not None else ():
            self._take_in(done, now)
        self._watch.judge(now=now)
        self._advance(now)
        if not self.thrash.active:
            self._copy_down(now)

    def choose_fetch(self, chain: Sequence[bytes]) -> tuple[bytes, ...]:
        """Return the next digests of a chain that are worth fetching rather than computing."""
        if self.thrash.active:
            return ()
        run: list[LowerTier] = []
        for digest in chain:
            tier = self._tier_of(digest)
            if tier is None:
                break
            run.append(tier)
        chosen = tuple(chain[: choose_fetch(run, self.costs())])
        for digest in reversed(chosen):  # they are not to go while room is made for them
            for lower in self._lower.values():
                lower.index.touch(digest)
        return chosen

    def is_coming(self, digest: bytes) -> bool:
        """Whether some fetch brings this content already."""
        return any(digest in fetch.digests for fetch in self._fetches if not fetch.ended)

    def fetch(self, digests: Sequence[bytes], blocks: Sequence[int], *, awaited: bool = True) -> Fetch:
        """Begin to bring content into blocks; `tend` goes on with it. `awaited`: a request waits for it."""
        now = self._clock()
        fetch = Fetch(digests, blocks, began_at=now)
        self._fetches.append(fetch)
        self.swapped.fetch_waits += awaited
        self._advance(now)
        return fetch

    def cancel(self, fetch: Fetch) -> None:
        """End a fetch: nothing is written to its blocks any more."""
        fetch.end()
        self._finish()

    def follow(self, moves: Mapping[int, int]) -> None:
        """Go on with blocks that lie elsewhere now."""
        for fetch in self._fetches:
            fetch.follow(moves)

    def keep(self, digests: Sequence[bytes], blocks: Sequence[int]) -> bool:
        """Copy the blocks of a request that is set back down, if that is cheaper than computing them again.

        Returns whether all of them are below now.
        """
        tier = next((tier for tier in LOWER_TIERS if self._is_on(tier)), None)
        if tier is None or not digests or self.thrash.active:
            return False
        if not is_swap_cheaper(len(digests), tier, self.costs()):
            return False
        # The end first: if there is not enough room, the beginning is what stays.
        pairs = list(zip(digests, blocks, strict=True))
        kept = [self._demote(block, digest) for digest, block in reversed(pairs)]
        return all(kept) and all(self._tier_of(digest) is not None for digest in digests)

    def lose(self, block: int, digest: bytes) -> None:
        """Note that a block's content is given up for other content now; save it if it is nowhere below."""
        self._watch.note_loss(digest, now=self._clock())
        if not self.thrash.active:
            self._demote(block, digest)

    def read(self, digest: bytes) -> bytes | None:
        """Content that lies in host memory or is on its way to the disk; `None` for what does not."""
        host = self._find("host")
        place = None if host is None else host.find(digest)
        if place is not None:
            return self._mover.read_host(place.slot)
        return self._writing.get(digest)

    def note_computed(self, tokens_blocks: float, seconds: float) -> None:
        """Note how long it took to compute so many blocks' worth of tokens."""
        self._measure("compute", seconds / tokens_blocks)

    # -- for people ------------------------------------------------------------------------------
    def facts(self) -> TierFacts:
        """What is where, what moved, and what stands still; a copy."""
        swapped = self.swapped
        return TierFacts(
            {
                tier: TierUse(len(lower.index), lower.index.capacity, lower.off_reason)
                for tier, lower in self._lower.items()
            },
            replace(swapped, blocks_in=dict(swapped.blocks_in), blocks_out=dict(swapped.blocks_out)),
            self._mover.block_bytes,
            self.thrash.reason,
            self.thrash.starts,
        )

    def costs(self) -> Costs:
        """What a block costs now, as far as that was measured of late."""
        now = self._clock()
        compute, host, disk = (
            current_cost(self._rates.get(name), now=now) for name in ("compute", "host", "disk")
        )
        return Costs(compute, host, disk)

    # -- switching off -----------------------------------------------------------------------------
    def switch_off(self, tier: LowerTier, reason: str) -> None:
        """Use a tier no more; what lay there is computed again when it is needed."""
        lower = self._lower.get(tier)
        if lower is None or lower.off_reason:
            return
        lower.off_reason = reason
        lower.index.close()
        if tier == "disk":
            self._writing.clear()
            for fetch, index in self._reads.values():
                fetch.cut(index)
            self._reads.clear()
            if self._io is not None:
                self._io.close()
                self._io = None
        self._finish()

    def clear(self) -> None:
        """Forget all content of all tiers."""
        for lower in self._lower.values():
            lower.index.clear()

    def close(self) -> None:
        """Let the tiers go."""
        for tier in list(self._lower):
            self.switch_off(tier, "the engine has ended")

    # -- downwards -------------------------------------------------------------------------------
    def _copy_down(self, now: float) -> None:
        level = Level(self._cached.free, self._cached.total_blocks)
        coldest = {
            digest: (block, since)
            for block, digest, since in self._cached.coldest(_LOOKED_AT)
            if self._tier_of(digest) is None
        }
        candidates = [Candidate(digest, since) for digest, (_, since) in coldest.items()]
        for digest in choose_demotions(level, candidates, self._rules.demotion, now=now):
            if not self._demote(coldest[digest][0], digest):
                break
        self._spill_ahead()

    def _demote(self, block: int, digest: bytes) -> bool:
        """Copy a block down unless it is there; returns whether it is now."""
        host, disk = self._find("host"), self._find("disk")
        for index in (host, disk):
            if index is not None:
                index.touch(digest)
        if host is not None and digest not in host:
            self._copy_to_host(host, block, digest)
        elif host is None and disk is not None and digest not in disk and self._write_room():
            self._write(disk, digest, self._mover.export(block))
        kept = self._tier_of(digest) is not None
        self.swapped.dropped_blocks += not kept
        return kept

    def _copy_to_host(self, host: SlotIndex, block: int, digest: bytes) -> None:
        victim = host.next_victim()
        if victim is not None and not self._spill(host, victim) and not self._has("disk", victim):
            self.swapped.dropped_blocks += 1
        place = host.put(digest)
        if place is not None:
            began = time.perf_counter()
            self._mover.to_host(block, place.slot)
            self._measure("host", time.perf_counter() - began)
            self.swapped.blocks_out["host"] += 1

    def _spill_ahead(self) -> None:
        """Have the coldest of host memory on disk before their places are needed."""
        host = self._find("host")
        if host is None or self._find("disk") is None:
            return
        wanted = int(host.capacity * _SPILLED_RATIO) - host.free
        for digest in host.coldest(max(0, min(wanted, _LOOKED_AT))):
            if not self._write_room():
                return
            self._spill(host, digest)

    def _spill(self, host: SlotIndex, digest: bytes) -> bool:
        disk, place = self._find("disk"), host.find(digest)
        if disk is None or place is None or digest in disk or not self._write_room():
            return False
        self._write(disk, digest, self._mover.read_host(place.slot))
        return True

    def _write_room(self) -> bool:
        return self._io is not None and self._io.write_room > 0

    def _write(self, disk: SlotIndex, digest: bytes, content: bytes) -> None:
        victim = disk.next_victim()
        if victim is not None and not self._has("host", victim):
            self.swapped.dropped_blocks += 1
        place = disk.put(digest)
        if place is None or self._io is None:
            return
        self._writing[digest] = content
        self._io.submit(WriteJob(digest, place, content))
        self.swapped.blocks_out["disk"] += 1

    # -- upwards ---------------------------------------------------------------------------------
    def _advance(self, now: float) -> None:
        """Ask for more of each fetch, the oldest first, within what one step may copy."""
        copies = self._rules.step_blocks
        for fetch in self._fetches:
            while fetch.wanted and copies > 0 and len(self._reads) < self._rules.reads_in_flight:
                copies -= self._ask(fetch, fetch.asked, now)
                fetch.asked += 1
            if now - fetch.began_at > self._rules.fetch_seconds:
                fetch.end()
        self._finish()

    def _ask(self, fetch: Fetch, index: int, now: float) -> int:
        """Bring one block, at once if it is in memory; returns how many were copied."""
        digest, block = fetch.digests[index], fetch.blocks[index]
        tier = self._tier_of(digest)
        lower = None if tier is None else self._find(tier)
        place = None if lower is None else lower.find(digest)
        if tier is None or lower is None or place is None:
            fetch.cut(index)
            return 0
        lower.touch(digest)
        if tier == "host":
            began = time.perf_counter()
            self._mover.from_host(place.slot, block)
            self._measure("host", time.perf_counter() - began)
        elif digest in self._writing:
            self._mover.load(block, self._writing[digest])
        else:
            self._tickets += 1
            self._reads[self._tickets] = (fetch, index)
            self._submit(ReadJob(digest, place, self._tickets))
            return 0
        self._note_in(fetch, index, tier, now)
        return 1

    def _submit(self, job: ReadJob) -> None:
        if self._io is not None:
            self._io.submit(job)

    def _note_in(self, fetch: Fetch, index: int, tier: LowerTier, now: float) -> None:
        digest = fetch.digests[index]
        fetch.note_arrival(index, tier)
        self.swapped.blocks_in[tier] += 1
        self._watch.note_in(digest, now=now)

    def _take_in(self, done: Done, now: float) -> None:
        if isinstance(done.job, WriteJob):
            if self._writing.get(done.job.digest) is done.job.content:
                del self._writing[done.job.digest]
        else:
            self._take_in_read(done, done.job, now)
        if done.error:
            self.switch_off("disk", done.error)

    def _take_in_read(self, done: Done, job: ReadJob, now: float) -> None:
        fetch, index = self._reads.pop(job.ticket, (None, 0))
        if done.content is None:
            if done.damage:
                self._note_damage(job, done.damage)
            if fetch is not None:
                fetch.cut(index)
            return
        self._bad_reads = 0
        self._measure("disk", done.seconds)
        if fetch is not None and fetch.expects(index):
            self._mover.load(fetch.blocks[index], done.content)
            self._note_in(fetch, index, "disk", now)

    def _note_damage(self, job: ReadJob, damage: str) -> None:
        self.swapped.checksum_failures += 1
        disk = self._find("disk")
        if disk is not None and disk.find(job.digest) == job.place:
            disk.drop(job.digest)
        self._bad_reads += 1
        if self._bad_reads >= _BAD_READS:
            self.switch_off("disk", f"{self._bad_reads} blocks in a row were damaged, the last one: {damage}")

    def _finish(self) -> None:
        """Let go of fetches that nothing more will come of."""
        now = self._clock()
        for fetch in self._fetches:
            if fetch.complete:
                self.swapped.fetch_seconds += now - fetch.began_at
        self._fetches = [fetch for fetch in self._fetches if not fetch.complete]

    def _measure(self, name: str, seconds_per_block: float) -> None:
        self._rates[name] = update_rate(self._rates.get(name), seconds_per_block, now=self._clock())

    # -- lookup ----------------------------------------------------------------------------------
    def _tier_of(self, digest: bytes) -> LowerTier | None:
        if self._has("host", digest):
            return "host"
        return "disk" if self._has("disk", digest) else None

    def _has(self, tier: LowerTier, digest: bytes) -> bool:
        lower = self._lower.get(tier)
        return lower is not None and digest in lower.index

    def _find(self, tier: LowerTier) -> SlotIndex | None:
        return self._lower[tier].index if self._is_on(tier) else None

    def _is_on(self, tier: LowerTier) -> bool:
        lower = self._lower.get(tier)
        return lower is not None and not lower.off_reason
