"""What each step computes: continuous batching over a token budget and a pool of blocks.

Deterministic, without I/O, clock or tensors, so that every schedule can be replayed in a test.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from workers.engines.kv_blocks import BlockAllocator, PromptUse
from workers.engines.torch_engine.kv_room import Demand, KvRoom, PrivateRoom
from workers.protocol.digests import KV_BLOCK_TOKENS, block_hash_chain

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
class StepPlan:
    """One step: what to compute, who is new, who was set back."""

    chunks: tuple[Chunk, ...] = ()
    admissions: tuple[Admission, ...] = ()
    preempted: tuple[Sequence, ...] = ()


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
    ) -> None:
        """Schedule onto `allocator`; `salt` keeps the prefixes of different models apart.

        `room` is where further blocks come from; `None`: from nowhere.
        """
        if limits.max_batched_tokens < limits.max_sequences:
            raise ValueError("the token budget must cover one token for each sequence")
        self._allocator = allocator
        self._room: KvRoom = room or PrivateRoom()
        self._limits = limits
        self._salt = salt
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        """In order of admission."""

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that queue."""
        return len(self._waiting)

    @property
    def tend_seconds(self) -> float | None:
        """How often to plan a step even if there is nothing to compute, for others to be given room.

        `None`: never.
        """
        return self._room.tend_seconds

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        sequence.chain = block_hash_chain(sequence.tokens, salt=self._salt)
        self._waiting.append(sequence)

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
        owing = self._settle(preempted)
        decoding = sum(1 for sequence in self._running if _pending(sequence) == 1)
        # Each decoding sequence has its token's place kept, so prefill never stalls the others.
        prefill_budget = self._limits.max_batched_tokens - decoding
        for sequence in list(self._running):
            if sequence in preempted:
                continue
            count = min(_pending(sequence), 1 if _pending(sequence) == 1 else prefill_budget)
            if count < 1 or not self._make_room(sequence, count, preempted):
                continue
            if _pending(sequence) > 1:
                prefill_budget -= count
            chunks.append(Chunk(sequence, sequence.computed, count))
        self._waiting.extendleft(preempted)
        admissions: list[Admission] = []
        if not preempted and not owing:
            self._admit(prefill_budget, chunks, admissions)
        return StepPlan(tuple(chunks), tuple(admissions), tuple(preempted))

    def complete(self, plan: StepPlan) -> None:
        """Note that a plan's chunks are computed; full prompt blocks become shareable."""
        for chunk in plan.chunks:
            chunk.sequence.computed = chunk.end
            self._name_blocks(chunk.sequence)

    def _settle(self, preempted: list[Sequence]) -> bool:
        """Settle with the node's pool, setting the newest back where it must be; true if still owing."""
        settlement = self._room.settle(self._demand())
        self._follow(settlement.moves)
        while settlement.preempt_extents and self._running:
            victim = self._running.pop()
            self._give_back(victim)
            preempted.append(victim)
            settlement = self._room.settle(self._demand(preempted), preempted=1)
            self._follow(settlement.moves)
        return settlement.owed_extents > 0

    def _follow(self, moves: Mapping[int, int]) -> None:
        if moves:
            for sequence in self._running:
                sequence.blocks = [moves.get(block, block) for block in sequence.blocks]

    def _demand(self, preempted: Iterable[Sequence] = ()) -> Demand:
        """Blocks that running sequences still lack, and all of those that wait."""
        more = sum(_blocks_for(len(s.tokens) + 1) - len(s.blocks) + 1 for s in self._running)
        waiting = [*preempted, *islice(self._waiting, _COUNTED_WAITING)]
        more += sum(_blocks_for(len(s.tokens)) for s in waiting)
        return Demand(max(0, more), len(self._waiting))

    def _make_room(self, sequence: Sequence, count: int, preempted: list[Sequence]) -> bool:
        """Give a running sequence blocks for `count` tokens; false if it had to step back itself."""
        needed = _blocks_for(sequence.computed + count) - len(sequence.blocks)
        while needed > 0:
            self._room.secure(needed)
            blocks = self._allocator.allocate(needed)
            if blocks is not None:
                sequence.blocks += blocks
                return True
            if self._room.is_owed:
                return False  # a step's pause costs less than computing somebody's tokens again
            victim = self._running.pop()
            self._give_back(victim)
            preempted.append(victim)
            if victim is sequence:
                return False
        return True

    def _admit(self, budget: int, chunks: list[Chunk], admissions: list[Admission]) -> None:
        while self._waiting and budget > 0 and len(self._running) < self._limits.max_sequences:
            sequence = self._waiting[0]
            # At least one token is computed, since its logits are what is wanted.
            cached = self._allocator.match(sequence.chain[: (len(sequence.tokens) - 1) // KV_BLOCK_TOKENS])
            if not self._fits(sequence, cached):
                return
            self._waiting.popleft()
            self._allocator.acquire(cached)
            sequence.blocks = cached
            sequence.computed = len(cached) * KV_BLOCK_TOKENS
            sequence.named_blocks = len(cached)
            count = min(_pending(sequence), budget)
            needed = _blocks_for(sequence.computed + count) - len(cached)
            sequence.blocks += self._allocator.allocate(needed) or ()
            self._running.append(sequence)
            budget -= count
            chunks.append(Chunk(sequence, sequence.computed, count))
            if not sequence.admitted_before:
                sequence.admitted_before = True
                use = self._allocator.prompt_use(
                    sequence.chain,
                    prompt_tokens=len(sequence.tokens),
                    cached_blocks=sequence.named_blocks,
                )
                admissions.append(Admission(sequence, use))

    def _fits(self, sequence: Sequence, cached: list[int]) -> bool:
        """Whether all of it fits now, with a little left for those that run to grow into."""
        needed = _blocks_for(len(sequence.tokens)) - len(cached)
        reserve = len(self._running)
        idle = self._allocator.count_idle(cached)
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
        if sequence.computed // KV_BLOCK_TOKENS > len(sequence.chain):
            sequence.chain = block_hash_chain(sequence.tokens, salt=self._salt)
        self._name_blocks(sequence)
        self._allocator.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0
        sequence.named_blocks = 0


def _pending(sequence: Sequence) -> int:
    return len(sequence.tokens) - sequence.computed


def _blocks_for(tokens: int) -> int:
    return -(-tokens // KV_BLOCK_TOKENS)
