"""Tiers whose disk works only when it is told to, and fails when it is told to, for random schedules."""

from __future__ import annotations

import os
import random
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from workers.engines.kv_blocks import BlockAllocator
from workers.engines.torch_engine.kv_pool import KvPool
from workers.engines.torch_engine.tier_memory import SlabMover
from workers.kv.tiers.block_io import Done, ReadJob, WriteJob, carry_out
from workers.kv.tiers.heat import EVICTIONS, Eviction, Heat
from workers.kv.tiers.policy import LOWER_TIERS, DemotionRules
from workers.kv.tiers.ports import StoreRules
from workers.kv.tiers.sessions import SessionTable
from workers.kv.tiers.slot_file import SlotFile
from workers.kv.tiers.store import TieredStore
from workers.kv.tiers.thrash import ThrashRules

_RUBBISH_BYTE = 0x7B
_STEP_SECONDS = 0.1
_ALL_JOBS = 10_000


@dataclass(frozen=True, slots=True)
class TierPlan:
    """What lies below a pool, and what goes wrong there."""

    host_blocks: int
    disk_blocks: int
    eviction: Eviction = "lru"
    write_places: int = 4
    disk_pace: float = 1.0
    """Jobs that the disk does in a step, on average."""
    damage_ratio: float = 0.0
    """Part of the steps in which a byte of the file changes."""
    dies_at: int | None = None
    """Step at which the disk takes no more writes."""
    host_ends_at: int | None = None
    """Step at which host memory is switched off."""


def draw_plan(numbers: random.Random) -> TierPlan:
    """Draw tiers, mostly small ones, and their faults."""
    return TierPlan(
        host_blocks=numbers.choice([0, 1, 4, 12, 40]),
        disk_blocks=numbers.choice([0, 1, 6, 30, 100]),
        eviction=numbers.choice(EVICTIONS),
        write_places=numbers.choice([1, 4, 32]),
        disk_pace=numbers.choice([0.2, 1.0, 5.0]),
        damage_ratio=numbers.choice([0.0, 0.0, 0.1, 0.5]),
        dies_at=numbers.choice([None, None, None, numbers.randint(0, 150)]),
        host_ends_at=numbers.choice([None, None, None, numbers.randint(0, 150)]),
    )


class SteppedIo:
    """Carries jobs out on a real file, as many as it is told to, reads first."""

    def __init__(self, file: SlotFile, write_places: int) -> None:
        self._file = file
        self._write_places = write_places
        self._reads: deque[ReadJob] = deque()
        self._writes: deque[WriteJob] = deque()
        self._done: list[Done] = []

    @property
    def write_room(self) -> int:
        """Writes that would be taken now."""
        return self._write_places - len(self._writes)

    def submit(self, job: WriteJob | ReadJob) -> None:
        """Queue a job."""
        if isinstance(job, ReadJob):
            self._reads.append(job)
        elif self.write_room < 1:
            raise AssertionError("more writes than there is room for")
        else:
            self._writes.append(job)

    def collect(self) -> list[Done]:
        """What was done since the last call."""
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Drop all jobs."""
        self._reads.clear()
        self._writes.clear()

    def work(self, jobs: int) -> None:
        """Do up to so many jobs."""
        for _ in range(jobs):
            queue: deque[ReadJob] | deque[WriteJob] = self._reads or self._writes
            if queue:
                self._done.append(carry_out(self._file, queue.popleft()))


class TierRig:
    """Tiers below one pool of a schedule, with a clock that steps move."""

    def __init__(
        self, plan: TierPlan, pool: KvPool, allocator: BlockAllocator, heat: Heat, folder: Path
    ) -> None:
        self.plan = plan
        self.now = 0.0
        self._steps = 0
        self._mover = SlabMover(pool, plan.host_blocks)
        self._numbers = random.Random(repr(plan))  # noqa: S311 - test data
        self._file = SlotFile(
            folder, "rig", slots=max(1, plan.disk_blocks), block_bytes=self._mover.block_bytes
        )
        self._io = SteppedIo(self._file, plan.write_places)
        self.store = TieredStore(
            allocator,
            self._mover,
            heat,
            host_blocks=plan.host_blocks or None,
            disk_blocks=plan.disk_blocks or None,
            io=self._io,
            rules=StoreRules(
                demotion=DemotionRules(idle_seconds=0.2, long_idle_seconds=1.0, batch_blocks=3),
                thrash=ThrashRules(window_seconds=2.0, fewest_blocks=8, rest_seconds=1.0),
                step_blocks=3,
                reads_in_flight=3,
                fetch_seconds=3.0,
            ),
            clock=lambda: self.now,
        )
        allocator.on_evict = self.store.lose
        self.sessions = SessionTable(heat, hot_blocks=allocator.total_blocks, live_seconds=3.0, most=3)

    def step(self) -> None:
        """Let time pass: the disk does some work, and what is to fail fails."""
        self.now += _STEP_SECONDS
        self._steps += 1
        self.sessions.forget_old(now=self.now)
        if self._steps == self.plan.dies_at:
            self._fail_writes()
        if self._steps == self.plan.host_ends_at:
            self.store.switch_off("host", "told to")
        if self._numbers.random() < self.plan.damage_ratio:
            self._damage()
        self._io.work(int(self._numbers.expovariate(1 / self.plan.disk_pace)))
        self._spoil_free_slots()

    def check_books(self) -> None:
        """Every slot of every tier has one owner, or is free. Raises `AssertionError`."""
        for tier in LOWER_TIERS:
            index = self._index(tier)
            if index is None:
                continue
            slots = [place.slot for place in index._places.values()]  # noqa: SLF001 - the books that are checked
            slots += index._free  # noqa: SLF001 - the books that are checked
            if sorted(slots) != list(range(index.capacity)):
                raise AssertionError(f"the slots of {tier} are {sorted(slots)} of {index.capacity}")

    def check_empty(self) -> None:
        """Once the disk has done all it was asked for, nothing is under way. Raises `AssertionError`."""
        self._io.work(_ALL_JOBS)
        self.store.tend()
        self.check_books()
        if self.store._fetches or self.store._reads:  # noqa: SLF001 - the books that are checked
            raise AssertionError("something is fetched for nobody")

    def close(self) -> None:
        """Empty all tiers and check that they are. Raises `AssertionError`."""
        self.check_empty()
        self.store.clear()
        self.check_books()
        left = sum(use.used_blocks for use in self.store.facts().uses.values())
        if left:
            raise AssertionError(f"{left} blocks are left in cleared tiers")
        self.store.close()
        self._file.close()

    def _index(self, tier: str):  # type: ignore[no-untyped-def]  # noqa: ANN202 - its own books
        return self.store._find("host" if tier == "host" else "disk")  # noqa: SLF001 - the books that are checked

    def _fail_writes(self) -> None:
        """Make the file's descriptor one that cannot be written to."""
        descriptor = os.open(self._file.path, os.O_RDONLY)
        os.dup2(descriptor, self._file.descriptor)
        os.close(descriptor)

    def _damage(self) -> None:
        """Change a byte somewhere in the file, where there is content if there is any."""
        index = self._index("disk")
        if index is None or not len(index):
            return
        place = self._numbers.choice(list(index._places.values()))  # noqa: SLF001 - to hit something
        at = place.slot * self._file.slot_bytes + self._numbers.randrange(self._mover.block_bytes)
        with self._file.path.open("r+b", buffering=0) as file:
            file.seek(at)
            before = file.read(1) or b"\0"
            file.seek(at)
            file.write(bytes([before[0] ^ self._numbers.randrange(1, 256)]))

    def _spoil_free_slots(self) -> None:
        index = self._index("host")
        if index is not None and index.free:
            self._mover.fill_host(index._free, _RUBBISH_BYTE)  # noqa: SLF001 - nobody's
