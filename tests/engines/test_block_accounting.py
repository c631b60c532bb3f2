from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engines.kv_blocks import BlockAllocator, BlockUse, PromptUse
from workers.engines.torch_engine.scheduler import Scheduler, SchedulerLimits, Sequence


def test_shared_block_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = BlockAllocator(4)
    (block,) = pool.allocate(1) or []
    pool.register(block, b"a")
    pool.acquire(pool.match([b"a"]))
    pool.release([block])
    assert pool.use() == BlockUse(free=3, used=1, cached=0)
    pool.release([block])
    assert pool.use() == BlockUse(free=3, used=0, cached=1)


def test_too_large_an_allocation_takes_nothing() -> None:
    pool = BlockAllocator(3)
    assert pool.allocate(4) is None
    assert pool.use() == BlockUse(free=3, used=0, cached=0)


def test_least_recently_used_content_is_evicted_first_and_ends_before_beginnings() -> None:
    pool = BlockAllocator(4)
    old, new = pool.allocate(2) or [], pool.allocate(2) or []
    for block, digest in zip(old + new, [b"old0", b"old1", b"new0", b"new1"], strict=True):
        pool.register(block, digest)
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == [old[1]]
    assert pool.match([b"old0", b"old1"]) == [old[0]]
    assert pool.allocate(1) == [old[0]]
    assert pool.match([b"new0", b"new1"]) == new


def test_what_was_used_later_than_the_block_evicted_last_is_still_cached() -> None:
    pool = BlockAllocator(3)
    for now, digest in ((10.0, b"a"), (20.0, b"b"), (30.0, b"c")):
        pool.now_seconds = now
        blocks = pool.allocate(1) or []
        pool.register(blocks[0], digest)
        pool.release(blocks)
    assert pool.evicted_idle_since_seconds is None
    pool.now_seconds = 40.0
    pool.allocate(2)
    assert pool.evicted_idle_since_seconds == 20.0
    assert pool.match([b"c"])


def test_double_release_is_an_error() -> None:
    pool = BlockAllocator(1)
    blocks = pool.allocate(1) or []
    pool.release(blocks)
    with pytest.raises(ValueError, match="more often"):
        pool.release(blocks)


def test_each_missed_token_has_its_reason() -> None:
    pool = BlockAllocator(3)
    chain = [b"a", b"b", b"c"]
    held = pool.allocate(3) or []
    for block, digest in zip(held, chain, strict=True):
        pool.register(block, digest)
    pool.release(held)
    assert pool.prompt_use(chain, prompt_tokens=50, cached_blocks=3) == PromptUse(48, partial_tokens=2)
    other = pool.allocate(2) or []  # takes the places of c and b
    assert pool.evicted_blocks == 2
    assert pool.match(chain) == [held[0]]
    longer = [*chain, b"d"]
    assert pool.prompt_use(longer, prompt_tokens=64, cached_blocks=1) == PromptUse(
        16,
        evicted_tokens=32,
        unshared_tokens=0,  # the fourth block ends with the token that is computed in any case
        partial_tokens=16,
    )
    pool.register(other[0], b"b")  # it is back
    assert pool.prompt_use(longer, prompt_tokens=70, cached_blocks=2) == PromptUse(32, 16, 16, 6)


def test_admission_tells_hits_and_misses_that_add_up() -> None:
    scheduler = Scheduler(BlockAllocator(6), SchedulerLimits(2, 200))

    def admit(name: str, tokens: list[int]) -> PromptUse:
        sequence = Sequence(name, tokens)
        scheduler.add(sequence)
        plan = scheduler.plan_step()
        scheduler.complete(plan)
        scheduler.remove(sequence)
        (admission,) = plan.admissions
        return admission.prompt

    assert admit("first", list(range(70))) == PromptUse(0, 0, 64, 6)
    assert admit("again", [*range(40), *range(200, 230)]) == PromptUse(32, 0, 32, 6)
    assert admit("other", list(range(300, 390))) == PromptUse(0, 0, 80, 10)
    assert admit("evicted", list(range(70))) == PromptUse(0, 64, 0, 6)


def test_one_long_prompt_does_not_stall_those_that_decode() -> None:
    scheduler = Scheduler(BlockAllocator(100), SchedulerLimits(8, 16))
    decoding = [Sequence(f"d{n}", [n]) for n in range(4)]
    for sequence in decoding:
        scheduler.add(sequence)
    scheduler.complete(scheduler.plan_step())
    scheduler.add(Sequence("long", list(range(200))))
    for _ in range(10):
        for sequence in decoding:
            sequence.tokens.append(1)
        plan = scheduler.plan_step()
        assert [chunk.sequence for chunk in plan.chunks[:4]] == decoding
        assert sum(chunk.count for chunk in plan.chunks) == 16
        scheduler.complete(plan)


def test_youngest_steps_back_and_returns_first() -> None:
    scheduler = Scheduler(BlockAllocator(4), SchedulerLimits(4, 64))
    old, young = Sequence("old", list(range(30))), Sequence("young", list(range(100, 116)))
    scheduler.add(old)
    scheduler.add(young)
    scheduler.complete(scheduler.plan_step())
    late = Sequence("late", [1])
    scheduler.add(late)
    old.tokens += range(40, 43)
    young.tokens.append(1)
    plan = scheduler.plan_step()
    # 33 tokens are 3 blocks; the pool has 4 and the young one's second token needs a second.
    assert plan.preempted == (young,)
    assert [chunk.sequence for chunk in plan.chunks] == [old]
    scheduler.complete(plan)
    scheduler.remove(old)
    assert scheduler.plan_step().chunks[0].sequence is young


STEPS = st.lists(st.tuples(st.sampled_from(["add", "step", "remove"]), st.integers(0, 1 << 30)))


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, blocks=st.integers(6, 20), sequences=st.integers(1, 5))
def test_no_course_of_events_loses_a_block(steps: list[tuple[str, int]], blocks: int, sequences: int) -> None:
    pool = BlockAllocator(blocks)
    scheduler = Scheduler(pool, SchedulerLimits(sequences, sequences + 20))
    live: list[Sequence] = []
    for action, seed in steps:
        numbers = random.Random(seed)  # noqa: S311 - test data
        if action == "add":
            length = numbers.randrange(1, 80)
            sequence = Sequence(str(len(live)), [i // 20 for i in range(length)])
            live.append(sequence)
            scheduler.add(sequence)
        elif action == "remove" and live:
            scheduler.remove(live.pop(numbers.randrange(len(live))))
        elif action == "step":
            step_all(scheduler)
        held = {block for sequence in live for block in sequence.blocks}
        assert pool.use().used == len(held)
    for sequence in live:
        scheduler.remove(sequence)
    use = pool.use()
    assert (use.used, use.total) == (0, blocks)
    assert (scheduler.running, scheduler.waiting) == (0, 0)


def step_all(scheduler: Scheduler) -> None:
    """Compute one step; every sequence that could sample grows, up to the pool's own size."""
    plan = scheduler.plan_step()
    sampled = [chunk.sequence for chunk in plan.chunks if chunk.samples]
    scheduler.complete(plan)
    for sequence in sampled:
        if len(sequence.tokens) < 90:
            sequence.tokens.append(3)
