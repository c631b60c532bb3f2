"""Room for a conversation that comes from elsewhere: beside what runs and waits, never of it."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workers.engines.kv_blocks import BlockAllocator
from workers.engines.torch_engine.kv_room import PooledRoom
from workers.engines.torch_engine.scheduler import Scheduler, SchedulerLimits, Sequence
from workers.kv.layout import KvLayout
from workers.kv.lease import Terms, join
from workers.kv.pool import NodePools, pools_folder

LAYOUT = KvLayout(layers=1, kv_heads=1, head_size=16, dtype="float16")
LIMITS = SchedulerLimits(8, 512)


def started(scheduler: Scheduler, name: str, tokens: int) -> Sequence:
    """A request that runs."""
    sequence = Sequence(name, list(range(tokens)))
    scheduler.add(sequence)
    scheduler.complete(scheduler.plan_step())
    return sequence


@contextmanager
def pooled(blocks: int) -> Iterator[tuple[Scheduler, BlockAllocator]]:
    """A replica that brings so many blocks to its node's pool and has leased none yet."""
    with tempfile.TemporaryDirectory() as fallback:
        folder = pools_folder(f"test-{uuid.uuid4().hex}", Path(fallback))
        member = join(folder, LAYOUT, "r", 1, Terms(blocks, longest_blocks=4))
        try:
            allocator = BlockAllocator(extent_blocks=member.extent_blocks)
            room = PooledRoom(member, allocator, lambda _source, _target: None)
            yield Scheduler(allocator, LIMITS, room=room), allocator
        finally:
            member.close()
            NodePools(folder).remove_all()


def test_replica_that_runs_requests_still_takes_as_many_blocks_as_its_pool_would_lend() -> None:
    with pooled(64) as (scheduler, allocator):
        for number in range(3):
            started(scheduler, str(number), 20 + number)
        for count in range(1, 50):
            places = scheduler.take_cold_blocks(count)
            assert len(places) == count
            allocator.release(places)


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
