"""Content that leaves its blocks and comes back, over a disk that works when it is told to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.tier_rig import SteppedIo
from workers.engines.kv_blocks import BlockAllocator
from workers.engines.torch_engine.scheduler import Scheduler, SchedulerLimits, Sequence
from workers.kv.tiers.heat import Heat
from workers.kv.tiers.policy import DemotionRules
from workers.kv.tiers.ports import StoreRules
from workers.kv.tiers.slot_file import SlotFile
from workers.kv.tiers.store import TieredStore
from workers.kv.tiers.thrash import ThrashRules

BLOCK = 64
RULES = StoreRules(
    demotion=DemotionRules(idle_seconds=1.0, long_idle_seconds=5.0),
    thrash=ThrashRules(window_seconds=10.0, fewest_blocks=4, rest_seconds=10.0),
    fetch_seconds=3.0,
)


class BytesMover:
    """Blocks and host memory as bytes, so that a test can see what is where."""

    block_bytes = BLOCK

    def __init__(self, blocks: int) -> None:
        self.blocks = [b"?" * BLOCK] * blocks
        self.slots: dict[int, bytes] = {}

    def to_host(self, block: int, slot: int) -> None:
        self.slots[slot] = self.blocks[block]

    def from_host(self, slot: int, block: int) -> None:
        self.blocks[block] = self.slots[slot]

    def read_host(self, slot: int) -> bytes:
        return self.slots[slot]

    def export(self, block: int) -> bytes:
        return self.blocks[block]

    def load(self, block: int, content: bytes | bytearray) -> None:
        self.blocks[block] = bytes(content)


class Tiered:
    """A small pool with tiers below it, and a clock."""

    def __init__(
        self, folder: Path, *, blocks: int = 4, host: int = 0, disk: int = 0, queue: int = 8
    ) -> None:
        self.now = 100.0
        self.heat = Heat()
        self.pool = BlockAllocator(blocks, heat=self.heat)
        self.pool.now_seconds = self.now
        self.mover = BytesMover(blocks)
        self.file = SlotFile(folder, "r", slots=max(disk, 1), block_bytes=BLOCK)
        self.io = SteppedIo(self.file, queue)
        self.store = TieredStore(
            self.pool,
            self.mover,
            self.heat,
            host_blocks=host or None,
            disk_blocks=disk or None,
            io=self.io,
            rules=RULES,
            clock=lambda: self.now,
        )
        self.pool.on_evict = self.store.lose

    def fill(self, *names: str) -> None:
        """Let sequences of one block each come and go."""
        for name in names:
            block = self.take()
            self.mover.blocks[block] = body(name)
            self.pool.register(block, digest(name))
            self.pool.release([block])

    def take(self) -> int:
        """Take a block for good."""
        blocks = self.pool.allocate(1)
        assert blocks is not None
        return blocks[0]

    def fetch(self, *names: str, work: int = 100) -> list[str]:
        """Bring content back into new blocks; returns what came, in order."""
        chosen = self.store.choose_fetch([digest(name) for name in names])
        blocks = self.pool.allocate(len(chosen)) or []
        fetch = self.store.fetch(chosen, blocks)
        for _ in range(3):
            self.io.work(work)
            self.store.tend()
        assert fetch.complete
        came = blocks[: fetch.in_place]
        for block, name in zip(came, names, strict=False):
            assert self.mover.blocks[block] == body(name)
            self.pool.register(block, digest(name))
        self.pool.release(blocks)
        return list(names[: fetch.in_place])


def digest(name: str) -> bytes:
    return name.encode().ljust(16, b".")


def body(name: str) -> bytes:
    return name.encode() * (BLOCK // len(name))


MakeTiered = Callable[..., Tiered]


@pytest.fixture
def tiered(tmp_path: Path) -> Iterator[MakeTiered]:
    with ExitStack() as stack:

        def make(**sizes: int) -> Tiered:
            made = Tiered(tmp_path, **sizes)
            stack.callback(made.file.close)
            return made

        yield make


def test_evicted_block_comes_back_from_host_memory(tiered: MakeTiered) -> None:
    made = tiered(host=8)
    made.fill("a", "b", "c", "d", "e", "f")
    assert made.fetch("a", "b") == ["a", "b"]
    facts = made.store.facts()
    assert facts.swapped.blocks_in["host"] == 2
    assert facts.uses["host"].used_blocks == 4  # with c and d, which left for them
    assert facts.uses["host"].capacity_blocks == 8


def test_what_host_memory_gives_up_goes_to_the_disk_and_comes_back(tiered: MakeTiered) -> None:
    made = tiered(host=6, disk=10)
    made.fill(*"abcdefghijkl")
    made.io.work(100)
    made.store.tend()
    assert made.fetch("a", "b", "c", "d") == ["a", "b", "c", "d"]
    swapped = made.store.facts().swapped
    assert swapped.blocks_in == {"host": 2, "disk": 2}


def test_a_block_that_is_being_written_is_served_from_memory(tiered: MakeTiered) -> None:
    made = tiered(disk=10)
    made.fill(*"abcdef")
    assert made.fetch("a", "b", work=0) == ["a", "b"]


def test_idle_content_is_copied_down_before_anybody_needs_its_place(tiered: MakeTiered) -> None:
    made = tiered(host=8)
    made.fill("a", "b")
    made.store.tend()
    assert made.store.facts().uses["host"].used_blocks == 0
    made.now += 6
    made.store.tend()
    assert made.store.facts().uses["host"].used_blocks == 2
    out = made.store.facts().swapped.blocks_out["host"]
    made.fill("c", "d", "e", "f")  # a and b leave, and nothing has to be copied for it
    assert made.store.facts().swapped.blocks_out["host"] == out


def test_a_full_queue_drops_content_and_never_waits(tiered: MakeTiered) -> None:
    made = tiered(disk=20, queue=2)
    made.fill(*"abcdefgh")
    facts = made.store.facts()
    assert facts.uses["disk"].used_blocks == 2
    assert facts.swapped.dropped_blocks == 2


def test_a_damaged_block_is_counted_dropped_and_not_served(tiered: MakeTiered) -> None:
    made = tiered(disk=10)
    made.fill(*"abcdef")
    made.io.work(100)
    made.store.tend()
    place = made.store._lower["disk"].index.find(digest("b"))
    assert place is not None
    os.pwrite(made.file.descriptor, b"x", place.slot * made.file.slot_bytes + 60)
    assert made.fetch("a", "b") == ["a"]
    facts = made.store.facts()
    assert facts.swapped.checksum_failures == 1
    assert made.store.choose_fetch([digest("b")]) == ()
    assert facts.uses["disk"].off_reason == ""


def test_a_disk_that_keeps_nothing_is_switched_off(tiered: MakeTiered) -> None:
    made = tiered(blocks=40, disk=80, queue=80)
    names = [f"n{number}" for number in range(40)]
    made.fill(*names, *(f"m{number}" for number in range(40)))
    made.io.work(100)
    made.store.tend()
    os.pwrite(made.file.descriptor, b"\0" * 80 * made.file.slot_bytes, 0)
    for name in names[:16]:
        assert made.fetch(name) == []
    assert "16 blocks in a row were damaged" in made.store.facts().uses["disk"].off_reason


def test_a_disk_that_fails_is_switched_off_and_who_waits_for_it_goes_on(tiered: MakeTiered) -> None:
    made = tiered(disk=10)
    made.fill(*"abcdef")
    made.io.work(1)
    made.store.tend()
    read_only = os.open(made.file.path, os.O_RDONLY)
    os.dup2(read_only, made.file.descriptor)
    os.close(read_only)
    blocks = made.pool.allocate(1) or []  # one more has to leave
    fetch = made.store.fetch([digest("a")], blocks)
    made.io.work(1)  # the read that was asked for goes first
    made.io.work(1)  # and this is a write
    made.store.tend()
    assert fetch.complete
    use = made.store.facts().uses["disk"]
    assert "Bad file descriptor" in use.off_reason
    assert (use.capacity_blocks, use.used_blocks) == (0, 0)
    made.fill("x", "y")
    made.store.tend()
    assert made.store.choose_fetch([digest("b")]) == ()


def test_a_fetch_that_takes_too_long_is_cut(tiered: MakeTiered) -> None:
    made = tiered(disk=10)
    made.fill(*"abcdef")
    made.io.work(100)
    made.store.tend()
    block = made.take()
    fetch = made.store.fetch([digest("a")], [block])
    made.now += 3.1
    made.store.tend()
    assert fetch.complete
    assert fetch.in_place == 0
    before = made.mover.blocks[block]
    made.io.work(100)
    made.store.tend()
    assert made.mover.blocks[block] is before  # it may be somebody else's by now


def test_swapping_stops_when_it_is_in_vain_and_goes_on_later(tiered: MakeTiered) -> None:
    made = tiered(host=20)
    made.fill(*"abcdefgh")
    for name in "abcdefabcdef":
        made.fetch(name)
        made.now += 0.1
    thrash = made.store.facts()
    assert "had to leave again" in thrash.thrash_reason
    assert thrash.thrash_starts == 1
    assert made.store.queues_instead
    assert made.store.choose_fetch([digest("a")]) == ()
    out = thrash.swapped.blocks_out
    made.fill("x", "y", "z", "w")
    assert made.store.facts().swapped.blocks_out == out
    made.now += 11
    made.store.tend()
    assert made.store.facts().thrash_reason == ""
    assert made.fetch("a") == ["a"]


def test_blocks_of_a_request_that_is_set_back_are_kept_and_come_back(tiered: MakeTiered) -> None:
    made = tiered(blocks=7, host=12)
    scheduler = Scheduler(made.pool, SchedulerLimits(4, 200), tiers=made.store)
    old, new = Sequence("old", list(range(40))), Sequence("new", list(range(1000, 1033)))
    for sequence in (old, new):
        scheduler.add(sequence)
    kept = step(scheduler)
    assert scheduler.running == 2
    while new.preemptions == 0:
        old.tokens += [1]
        kept += step(scheduler)
    assert kept == 1
    assert made.store.facts().uses["host"].used_blocks >= 2
    scheduler.remove(old)
    made.fill(*"abcdefgh")  # others take what is left of it where it was computed
    step(scheduler)
    assert new.fetched["host"] == 2
    assert new.swaps == 1
    scheduler.remove(new)
    assert made.pool.use().used == 0


def test_announced_turn_is_fetched_into_blocks_that_nobody_needs(tiered: MakeTiered) -> None:
    made = tiered(blocks=6, host=8)
    scheduler = Scheduler(made.pool, SchedulerLimits(4, 200), tiers=made.store)
    first = Sequence("s", list(range(49)))
    scheduler.add(first)
    step(scheduler)
    scheduler.remove(first)
    made.fill(*"abcdef")
    assert made.pool.match(first.chain) == []
    assert scheduler.prefetch(first.chain) == 3
    step(scheduler)
    assert len(made.pool.match(first.chain)) == 3
    assert made.pool.use().used == 0
    again = Sequence("t", list(range(49)))
    scheduler.add(again)
    step(scheduler)
    assert (again.fetched.total(), again.named_blocks) == (0, 3)
    scheduler.remove(again)


def test_announced_turn_gives_way_to_a_request(tiered: MakeTiered) -> None:
    made = tiered(blocks=6, disk=8)
    scheduler = Scheduler(made.pool, SchedulerLimits(4, 200), tiers=made.store)
    first = Sequence("s", list(range(49)))
    scheduler.add(first)
    step(scheduler)
    scheduler.remove(first)
    made.fill(*"abcdef")
    made.io.work(100)
    made.store.tend()
    assert scheduler.prefetch(first.chain) == 3  # and the disk does not answer
    asking = Sequence("q", list(range(500, 580)))
    scheduler.add(asking)
    for _ in range(3):
        step(scheduler)
    assert scheduler.running == 1
    assert made.pool.use().used == 5
    made.io.work(100)
    step(scheduler)
    scheduler.remove(asking)
    assert made.pool.use().used == 0


def step(scheduler: Scheduler) -> int:
    """Plan and complete a step; returns how many that were set back are kept below."""
    plan = scheduler.plan_step()
    scheduler.complete(plan)
    return plan.kept_below
