"""Room for a conversation that comes from elsewhere: beside what runs and waits, never of it."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from workers.engines.kv_blocks import BlockAllocator
from workers.engines.torch_engine.kv_room import PooledRoom
from workers.engines.torch_engine.scheduler import Scheduler, SchedulerLimits, Sequence
from workers.kv.layout import KvLayout
from workers.kv.lease import Terms, join
from workers.kv.pool import NodePools, pools_folder
from workers.kv.tiers.heat import Heat

LAYOUT = KvLayout(layers=1, kv_heads=1, head_size=16, dtype="float16")
LIMITS = SchedulerLimits(8, 512)


def started(scheduler: Scheduler, name: str, tokens: int) -> Sequence:
    """A request that runs."""
    sequence = Sequence(name, list(range(tokens)))
    scheduler.add(sequence)
    scheduler.complete(scheduler.plan_step())
    return sequence


@contextmanager
def pooled(blocks: int, replicas: int = 1) -> Iterator[list[tuple[Scheduler, BlockAllocator, Heat]]]:
    """Replicas that bring so many blocks each to their node's pool and have leased none yet."""
    with tempfile.TemporaryDirectory() as fallback, ExitStack() as stack:
        folder = pools_folder(f"test-{uuid.uuid4().hex}", Path(fallback))
        stack.callback(NodePools(folder).remove_all)
        made = []
        for number in range(replicas):
            member = join(folder, LAYOUT, f"r{number}", 1, Terms(blocks, longest_blocks=4))
            stack.callback(member.close)
            heat = Heat()
            allocator = BlockAllocator(extent_blocks=member.extent_blocks, heat=heat)
            room = PooledRoom(member, allocator, lambda _source, _target: None)
            made.append((Scheduler(allocator, LIMITS, room=room), allocator, heat))
        yield made


def test_replica_that_runs_requests_still_takes_as_many_blocks_as_its_pool_would_lend() -> None:
    with pooled(64) as [(scheduler, allocator, _)]:
        for number in range(3):
            started(scheduler, str(number), 20 + number)
        for count in range(1, 50):
            places = scheduler.take_cold_blocks(count)
            assert len(places) == count
            allocator.release(places)


def fill(scheduler: Scheduler, allocator: BlockAllocator, blocks: int, seed: int) -> list[bytes]:
    """Have so many blocks in cache; returns their digests."""
    digests = scheduler.chain_of([seed + n for n in range(blocks * 16)])
    places = scheduler.take_cold_blocks(blocks)
    for place, digest in zip(places, digests, strict=True):
        allocator.register(place, digest)
    allocator.release(places)
    return digests


def test_neighbour_gives_back_what_it_borrowed_for_its_cache() -> None:
    size = LAYOUT.extent_blocks
    with pooled(2 * size, replicas=2) as [(mine, allocator, heat), (other, others, _)]:
        heat.warm(fill(mine, allocator, size, seed=0))
        fill(other, others, 3 * size, seed=1 << 20)
        assert mine.take_cold_blocks(size) == [], "what is left here is hot, and the pool is lent out"
        for _ in range(2):
            mine.plan_step()
            other.plan_step()
        assert len(mine.take_cold_blocks(size)) == size
        assert allocator.hot_cached == size, "nothing hot had to go"
        assert others.use().cached == 2 * size, "it keeps all that is guaranteed to it"


def test_room_that_nobody_asks_for_any_more_is_not_asked_of_others() -> None:
    size = LAYOUT.extent_blocks
    with pooled(2 * size, replicas=2) as [(mine, allocator, heat), (other, others, _)]:
        heat.warm(fill(mine, allocator, size, seed=0))
        fill(other, others, 3 * size, seed=1 << 20)
        mine.take_cold_blocks(size)
        for _ in range(40):
            mine.plan_step()
        other.plan_step()
        assert others.use().cached == 3 * size


def test_request_that_waits_keeps_what_it_will_need_and_no_more() -> None:
    scheduler = Scheduler(BlockAllocator(20), LIMITS)
    scheduler.add(Sequence("waits", list(range(5 * 16))))
    places = scheduler.take_cold_blocks(18)
    assert len(places) == 20 - 6
    assert scheduler.plan_step().chunks, "it starts beside them"


def test_running_request_keeps_a_block_to_grow_into() -> None:
    scheduler = Scheduler(BlockAllocator(8), LIMITS)
    sequence = started(scheduler, "runs", 40)
    assert len(scheduler.take_cold_blocks(8)) == 8 - 3 - 1
    sequence.tokens += [1] * 16
    assert scheduler.plan_step().preempted == ()
