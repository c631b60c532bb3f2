"""What each step computes: continuous batching over a token budget and a pool of blocks.

Deterministic, without I/O, clock or tensors, so that every schedule can be replayed in a test.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field, replace
from itertools import islice

from workers.engines.kv_blocks import BlockAllocator, PromptUse
from workers.engines.torch_engine.kv_room import Demand, KvRoom, PrivateRoom
from workers.engines.torch_engine.kv_tiers import KvTiers, NoTiers
from workers.kv.tiers.fetch import Fetch
from workers.kv.tiers.policy import LowerTier
from workers.protocol.digests import KV_BLOCK_TOKENS, block_hash_chain

_TOLD_STEPS = 32
"""For so long room that content from elsewhere lacked is asked of the node's pool."""
_COUNTED_WAITING = 256
"""Waiting sequences that count when the node's pool is told what is needed."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one step."""

    max_sequences: int
    max_batched_tokens: int
    """Tokens computed in one step, at least `max_sequences`."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request as the scheduler sees it. Only the scheduler changes it, but for `tokens`."""

    request_id: str
    tokens: list[int]
    """Prompt and what was generated; the engine appends each sampled token."""
    computed: int = 0
    """Tokens whose keys and values are in blocks."""
    blocks: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    """Hashes of the leading full blocks, as far as they were worked out."""
    named_blocks: int = 0
    """Leading blocks whose content the allocator knows."""
    admitted_before: bool = False
    fetch: Fetch | None = None
    """Set while blocks come from a lower tier; nothing is computed before they are there."""
    fetched: Counter[LowerTier] = field(default_factory=Counter)
    """Blocks that came from each lower tier since it was last admitted."""
    swaps: int = 0
    """How often blocks came from a lower tier."""
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a sequence to compute in this step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def end(self) -> int:
        """Tokens of the sequence that are computed once this chunk is."""
        return self.start + self.count

    @property
    def samples(self) -> bool:
        """Whether the sequence's next token comes out of this step."""
        return self.end == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that was taken up for the first time, and what its prompt found in cache."""

    sequence: Sequence
    prompt: PromptUse

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were in cache."""
        return self.prompt.cached_tokens


@dataclass(frozen=True, slots=True)
class Arriving:
    """What content from elsewhere would need, with what is hot here already, and for how long that counts."""

    blocks: int = 0
    steps: int = 0

    def after_step(self) -> Arriving:
        """The same a step later; nobody may be asking any more."""
        return Arriving(self.blocks, self.steps - 1) if self.steps > 1 else Arriving()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: what to compute, who is new, who was set back."""

    chunks: tuple[Chunk, ...] = ()
    admissions: tuple[Admission, ...] = ()
    preempted: tuple[Sequence, ...] = ()
    kept_below: int = 0
    """How many of the preempted have all their whole blocks in a lower tier; the rest computes again."""


class Scheduler:
    """Queues sequences, gives them blocks, and takes blocks back when they run out.

    Oldest first: a sequence is only ever set back for an older one, or for another replica that is
    below what it is guaranteed; so the oldest always ends, and with it, one by one, all others. One
    sequence must fit in the pool alone, and in a node's pool in what this replica is guaranteed.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        limits: SchedulerLimits,
        *,
        salt: bytes = b"",
        room: KvRoom | None = None,
        tiers: KvTiers | None = None,
    ) -> None:
        """Schedule onto `allocator`; `salt` keeps the prefixes of different models apart.

        `room` is where further blocks come from, `tiers` where evicted content is; `None`: nowhere.
        """
        if limits.max_batched_tokens < limits.max_sequences:
            raise ValueError("the token budget must cover one token for each sequence")
        self._allocator = allocator
        self._room: KvRoom = room or PrivateRoom()
        self._tiers: KvTiers = tiers or NoTiers()
        self._limits = limits
        self._salt = salt
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        """In order of admission."""
        self._announced: list[Sequence] = []
        """Nobody's yet: their blocks are fetched for a turn that was announced."""
        self._kept_below = 0
        self._arriving = Arriving()

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that queue."""
        return len(self._waiting)

    @property
    def fetching(self) -> int:
        """Of those that hold blocks, how many wait for content from a lower tier."""
        return sum(1 for sequence in self._running if sequence.fetch is not None)

    @property
    def tend_seconds(self) -> float | None:
        """How often to plan a step even if there is nothing to compute, for what goes on meanwhile.

        `None`: never.
        """
        wishes = (self._room.tend_seconds, self._tiers.tend_seconds)
        return min((seconds for seconds in wishes if seconds is not None), default=None)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        sequence.chain = block_hash_chain(sequence.tokens, salt=self._salt)
        self._waiting.append(sequence)

    def chain_of(self, tokens: Sequences[int]) -> list[bytes]:
        """Digests of the whole blocks of a prefix."""
        return block_hash_chain(tokens, salt=self._salt)

    def prefetch(self, chain: Sequences[bytes]) -> int:
        """Begin to bring what lies below of a chain into blocks that no request holds; returns how many.

        It takes at most half of them, the coldest, and is given up as soon as a request needs them.
        """
        cached = self._allocator.match(chain)
        more = self._tiers.choose_fetch(chain[len(cached) :])
        if not more or self._waiting or self._tiers.is_coming(more[0]):
            return 0
        sequence = Sequence("prefetch", [], chain=list(chain))
        self._take(sequence, cached)
        more = more[: max(0, self._allocator.available - len(self._running)) // 2]
        self._start_fetch(sequence, more, awaited=False)
        self._announced.append(sequence)
        return len(more)

    def take_cold_blocks(self, count: int) -> list[int]:
        """Take up to `count` blocks that no request and no hot content needs, for content from elsewhere."""
        waiting = islice(self._waiting, _COUNTED_WAITING)
        kept = len(self._running) + sum(_blocks_for(len(s.tokens) + 1) for s in waiting)
        self._room.secure(count + kept)
        hot = self._allocator.hot_cached
        cold = self._allocator.available - hot - kept
        # Told to the node's pool: within what is guaranteed here, others make room for the next asking.
        self._arriving = Arriving(hot + count, _TOLD_STEPS) if cold < count else Arriving()
        return self._allocator.allocate(max(0, min(count, cold))) or []

    def remove(self, sequence: Sequence) -> None:
        """Let a sequence go, running or waiting; its full blocks stay as cache."""
        if sequence in self._running:
            self._running.remove(sequence)
            self._give_back(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def plan_step(self) -> StepPlan:
        """Choose the next step's chunks and give them their blocks.

        A plan without chunks while sequences wait means that the node's pool has yet to make room.
        """
        chunks: list[Chunk] = []
        preempted: list[Sequence] = []
        self._tiers.tend()
        admissions = self._land_fetches()
        owing = self._settle(preempted)
        self._arriving = self._arriving.after_step()
        ready = [sequence for sequence in self._running if sequence.fetch is None]
        decoding = sum(1 for sequence in ready if _pending(sequence) == 1)
        # Each decoding sequence has its token's place kept, so prefill never stalls the others.
        prefill_budget = self._limits.max_batched_tokens - decoding
        for sequence in ready:
            if sequence in preempted:
                continue
            count = min(_pending(sequence), 1 if _pending(sequence) == 1 else prefill_budget)
            if count < 1 or not self._make_room(sequence, count, preempted):
                continue
            if _pending(sequence) > 1:
                prefill_budget -= count
            chunks.append(Chunk(sequence, sequence.computed, count))
        self._waiting.extendleft(preempted)
        if not preempted and not owing:
            self._admit(prefill_budget, chunks, admissions)
        kept, self._kept_below = self._kept_below, 0
        return StepPlan(tuple(chunks), tuple(admissions), tuple(preempted), kept)

    def complete(self, plan: StepPlan) -> None:
        """Note that a plan's chunks are computed; full prompt blocks become shareable."""
        for chunk in plan.chunks:
            chunk.sequence.computed = chunk.end
            self._name_blocks(chunk.sequence)

    def _settle(self, preempted: list[Sequence]) -> bool:
        """Settle with the node's pool, setting the newest back where it must be; true if still owing."""
        settlement = self._room.settle(self._demand())
        self._follow(settlement.moves)
        if settlement.owed_extents:
            self._drop_announced()
        while settlement.preempt_extents and self._running:
            self._set_back_newest(preempted)
            settlement = self._room.settle(self._demand(preempted), preempted=1)
            self._follow(settlement.moves)
        return settlement.owed_extents > 0

    def _follow(self, moves: Mapping[int, int]) -> None:
        if moves:
            self._tiers.follow(moves)
            for sequence in (*self._running, *self._announced):
                sequence.blocks = [moves.get(block, block) for block in sequence.blocks]

    def _demand(self, preempted: Iterable[Sequence] = ()) -> Demand:
        """Blocks that running sequences still lack, and all of those that wait."""
        more = sum(_blocks_for(len(s.tokens) + 1) - len(s.blocks) + 1 for s in self._running)
        waiting = [*preempted, *islice(self._waiting, _COUNTED_WAITING)]
        more += sum(_blocks_for(len(s.tokens)) for s in waiting)
        return Demand(max(0, more) + self._arriving.blocks, len(self._waiting))

    def _make_room(self, sequence: Sequence, count: int, preempted: list[Sequence]) -> bool:
        """Give a running sequence blocks for `count` tokens; false if it had to step back itself."""
        needed = _blocks_for(sequence.computed + count) - len(sequence.blocks)
        while needed > 0:
            self._room.secure(needed)
            blocks = self._allocator.allocate(needed)
            if blocks is not None:
                sequence.blocks += blocks
                return True
            if self._drop_announced():
                continue
            if self._room.is_owed:
                return False  # a step's pause costs less than computing somebody's tokens again
            if self._set_back_newest(preempted) is sequence:
                return False
        return True

    def _set_back_newest(self, preempted: list[Sequence]) -> Sequence:
        """Set the newest sequence back; its blocks are kept below if that is worth it."""
        victim = self._running.pop()
        self._name_all(victim)
        whole = victim.computed // KV_BLOCK_TOKENS
        self._kept_below += self._tiers.keep(victim.chain[:whole], victim.blocks[:whole])
        self._give_back(victim)
        victim.preemptions += 1
        preempted.append(victim)
        return victim

    def _admit(self, budget: int, chunks: list[Chunk], admissions: list[Admission]) -> None:
        while self._waiting and budget > 0 and len(self._running) < self._limits.max_sequences:
            sequence = self._waiting[0]
            cached = self._allocator.match(self._matchable(sequence))
            more = self._tiers.choose_fetch(self._matchable(sequence)[len(cached) :])
            if more and self._tiers.is_coming(more[0]):
                return  # somebody else's fetch, or an announced one: next time it is a prefix hit
            if not self._fits(sequence, cached):
                self._drop_announced()
                return
            self._waiting.popleft()
            self._take(sequence, cached)
            self._running.append(sequence)
            if more:
                fetch = self._start_fetch(sequence, more)
                if not fetch.complete:
                    continue
                self._land(sequence, fetch)
            count = min(_pending(sequence), budget)
            needed = _blocks_for(sequence.computed + count) - len(sequence.blocks)
            sequence.blocks += self._allocator.allocate(needed) or ()
            budget -= count
            chunks.append(Chunk(sequence, sequence.computed, count))
            self._note_admission(sequence, admissions)

    def _matchable(self, sequence: Sequence) -> list[bytes]:
        """Digests that a hit may cover: at least one token is computed, since its logits are wanted."""
        return sequence.chain[: (len(sequence.tokens) - 1) // KV_BLOCK_TOKENS]

    def _take(self, sequence: Sequence, cached: list[int]) -> None:
        """Let a sequence begin with blocks that are in cache."""
        self._allocator.acquire(cached)
        sequence.blocks = cached
        sequence.computed = len(cached) * KV_BLOCK_TOKENS
        sequence.named_blocks = len(cached)
        sequence.fetched.clear()

    def _start_fetch(self, sequence: Sequence, digests: Sequences[bytes], *, awaited: bool = True) -> Fetch:
        blocks = self._allocator.allocate(len(digests)) or []
        sequence.blocks += blocks
        sequence.fetch = self._tiers.fetch(digests[: len(blocks)], blocks, awaited=awaited)
        return sequence.fetch

    def _land_fetches(self) -> list[Admission]:
        """Let sequences go on whose content has come; what did not come is computed."""
        admissions: list[Admission] = []
        for sequence in self._running:
            if sequence.fetch is not None and sequence.fetch.complete:
                self._land(sequence, sequence.fetch)
                self._note_admission(sequence, admissions)
        for sequence in [s for s in self._announced if s.fetch is None or s.fetch.complete]:
            self._announced.remove(sequence)
            self._give_back(sequence)
        return admissions

    def _land(self, sequence: Sequence, fetch: Fetch) -> None:
        """Make what came the sequence's own, and free the blocks of what did not."""
        sequence.fetch = None
        sequence.fetched = fetch.sources
        sequence.swaps += fetch.in_place > 0
        whole = sequence.computed // KV_BLOCK_TOKENS + fetch.in_place
        surplus = sequence.blocks[whole:]
        sequence.blocks = sequence.blocks[:whole]
        sequence.computed = whole * KV_BLOCK_TOKENS
        self._name_blocks(sequence)
        self._allocator.release(surplus)

    def _drop_announced(self) -> bool:
        """Give up what is fetched for turns that have not come; true if there was any."""
        dropped, self._announced = self._announced, []
        for sequence in dropped:
            self._give_back(sequence)
        return bool(dropped)

    def _note_admission(self, sequence: Sequence, admissions: list[Admission]) -> None:
        if sequence.admitted_before:
            return
        sequence.admitted_before = True
        use = self._allocator.prompt_use(
            sequence.chain,
            prompt_tokens=len(sequence.tokens),
            cached_blocks=sequence.named_blocks,
        )
        use = replace(
            use,
            host_tokens=sequence.fetched["host"] * KV_BLOCK_TOKENS,
            disk_tokens=sequence.fetched["disk"] * KV_BLOCK_TOKENS,
        )
        admissions.append(Admission(sequence, use))

    def _fits(self, sequence: Sequence, cached: list[int]) -> bool:
        """Whether all of it fits now, with a little left for those that run to grow into."""
        needed = _blocks_for(len(sequence.tokens)) - len(cached)
        reserve = len(self._running)
        idle = self._allocator.count_idle(cached)
        if self._tiers.queues_instead and self._running:
            # What is hot stays: pushed out, it would have to come back at once.
            idle += self._allocator.hot_cached - self._allocator.count_idle(cached, hot_only=True)
        short = needed + reserve + idle - self._allocator.available
        # Blocks that can be had are taken before cached ones are evicted.
        self._room.secure(max(needed, self._allocator.free + short))
        return self._allocator.available - idle >= needed + reserve

    def _name_blocks(self, sequence: Sequence) -> None:
        full = min(sequence.computed // KV_BLOCK_TOKENS, len(sequence.chain))
        for index in range(sequence.named_blocks, full):
            self._allocator.register(sequence.blocks[index], sequence.chain[index])
        sequence.named_blocks = max(sequence.named_blocks, full)

    def _give_back(self, sequence: Sequence) -> None:
        """Release the blocks, naming those of generated text too: the next turn repeats it."""
        self._name_all(sequence)
        self._allocator.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0
        sequence.named_blocks = 0

    def _name_all(self, sequence: Sequence) -> None:
        """Name all whole blocks that are computed, after ending a fetch where it is."""
        if sequence.fetch is not None:
            self._tiers.cancel(sequence.fetch)
            self._land(sequence, sequence.fetch)
        if sequence.computed // KV_BLOCK_TOKENS > len(sequence.chain):
            sequence.chain = block_hash_chain(sequence.tokens, salt=self._salt)
        self._name_blocks(sequence)


def _pending(sequence: Sequence) -> int:
    return len(sequence.tokens) - sequence.computed


def _blocks_for(tokens: int) -> int:
    return -(-tokens // KV_BLOCK_TOKENS)
