"""Replicas that share a pool compute what they would alone, whatever is borrowed, moved or recalled."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.fakes.kv_replica import WritingReplica
from tests.fakes.kv_tenant import LAYOUT
from workers.engines.torch_engine.scheduler import SchedulerLimits
from workers.kv.lease import Terms
from workers.kv.pool import NodePools

QUICK = set(Phase) - {Phase.explain}  # explaining traces every line, which takes ten times as long
SIZE = LAYOUT.extent_blocks
TOKENS = SIZE * LAYOUT.block_tokens
"""Tokens of an extent."""
PATIENCE = 20
"""Rounds in which a replica that has requests must compute something: its guarantee covers the longest."""


class Clock:
    """Time that passes with each step."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def replicas(folder: Path, count: int, terms: Terms) -> Iterator[tuple[list[WritingReplica], Clock]]:
    clock = Clock()
    with ExitStack() as stack:
        made = []
        for number in range(count):
            made.append(WritingReplica(folder, f"r{number}", terms, clock=clock))
            stack.callback(made[-1].close)
        yield made, clock


def run_dry(made: list[WritingReplica], clock: Clock) -> None:
    """Step all replicas in turn until every request is done; none may stand still for long."""
    still = [0] * len(made)
    while any(replica.goals for replica in made):
        for index, replica in enumerate(made):
            still[index] = 0 if replica.step() or not replica.goals else still[index] + 1
            assert still[index] < PATIENCE, f"{replica.member.refusal}: {replica.goals}"
        clock.now += 0.01


def prompt_of(seed: int, length: int) -> list[int]:
    return [seed * 1000 + n for n in range(length)]


def test_busy_replica_runs_more_at_once_than_it_brought(folder: Path) -> None:
    with replicas(folder, 4, Terms(2 * SIZE)) as (made, clock):
        busy = made[0]
        for number in range(6):
            busy.add(f"q{number}", prompt_of(number, TOKENS - 20), TOKENS)
        for _ in range(14):
            busy.step()
            clock.now += 0.01
        assert busy.scheduler.running == 6
        assert len(busy.member.extents) >= 6
        assert busy.preempted == 0
        run_dry(made, clock)


def test_owner_of_a_guarantee_is_served_while_a_borrower_has_all(folder: Path) -> None:
    with replicas(folder, 2, Terms(4 * SIZE)) as (made, clock):
        owner, borrower = made
        for number in range(8):
            borrower.add(f"b{number}", prompt_of(number, TOKENS - 40), TOKENS - 8)
        for _ in range(16):
            borrower.step()
            clock.now += 0.01
        assert len(borrower.member.extents) == 8
        owner.add("o", prompt_of(77, 2 * TOKENS), 2 * TOKENS + 10)
        for _ in range(6):
            owner.step()
            borrower.step()
            clock.now += 0.01
        assert owner.scheduler.running == 1
        assert borrower.preempted > 0
        run_dry(made, clock)


def test_idle_extents_return_after_a_while_but_not_at_once(folder: Path) -> None:
    with replicas(folder, 3, Terms(2 * SIZE, minimum_blocks=SIZE)) as (made, clock):
        replica = made[0]
        for number in range(4):
            replica.add(f"q{number}", [number] * 10, TOKENS - 10)
        run_dry(made, clock)
        replica.allocator.vacate(0, replica.copy)
        held = len(replica.member.extents)
        replica.step()
        assert len(replica.member.extents) == held
        clock.now += 60
        for _ in range(40):
            replica.step()
            clock.now += 0.2
        in_use = replica.allocator.extents_in_use
        assert len(replica.member.extents) == max(1, in_use + 1) or len(replica.member.extents) == in_use


def test_caches_are_given_up_for_another_replicas_requests(folder: Path) -> None:
    with replicas(folder, 2, Terms(2 * SIZE)) as (made, clock):
        first, second = made
        for number in range(4):
            first.add(f"q{number}", prompt_of(number, TOKENS - 30), TOKENS - 20)
        run_dry([first], clock)
        assert first.allocator.use().cached > 3 * SIZE
        second.add("s", prompt_of(9, 2 * TOKENS - 40), 2 * TOKENS - 20)
        run_dry(made, clock)
        assert first.preempted == second.preempted == 0


def test_returning_session_finds_its_prefix_in_borrowed_blocks(folder: Path) -> None:
    with replicas(folder, 2, Terms(2 * SIZE)) as (made, clock):
        first = made[0]
        for number in range(3):
            first.add(f"q{number}", prompt_of(number, TOKENS - 30), TOKENS - 20)
        run_dry(made, clock)
        first.add("again", prompt_of(0, TOKENS - 30), TOKENS - 20)
        run_dry(made, clock)
        assert first.cached_tokens >= TOKENS - 48


@settings(max_examples=25, deadline=None, phases=QUICK)
@given(seed=st.integers(0, 1 << 40))
def test_no_schedule_makes_a_replica_see_anothers_tokens_or_lose_a_block(seed: int) -> None:
    numbers = random.Random(seed)  # noqa: S311 - test data
    brought = numbers.randint(1, 2)
    minimum = numbers.randint(1, brought) * SIZE
    longest = minimum * LAYOUT.block_tokens
    with TemporaryDirectory(dir="/dev/shm") as name, ExitStack() as stack:
        folder, clock = Path(name) / "pools", Clock()
        made = []
        for number in range(numbers.randint(2, 4)):
            limits = SchedulerLimits(numbers.randint(1, 8), numbers.choice([16, 64, 300]))
            terms = Terms(brought * SIZE, minimum, longest_blocks=minimum)
            replica = WritingReplica(folder, f"r{number}", terms, clock=clock, limits=limits)
            made.append(replica)
            stack.callback(replica.close)
        for number in range(numbers.randint(5, 20)):
            for _ in range(numbers.randint(0, 8)):
                numbers.choice(made).step()
                clock.now += numbers.choice([0.001, 0.05, 3.0])
            replica = made[0] if numbers.random() < 0.6 else numbers.choice(made)
            length = numbers.randint(1, longest - 1)
            prompt = prompt_of(numbers.randint(0, 3), numbers.randint(1, length))
            replica.add(f"q{number}", prompt, min(longest, length + numbers.randint(1, 60)))
            if numbers.random() < 0.1 and replica.sequences:
                dropped = numbers.choice(list(replica.sequences))
                replica.scheduler.remove(replica.sequences.pop(dropped))
                del replica.goals[dropped]
        run_dry(made, clock)
        for replica in made:
            use = replica.allocator.use()
            assert use.used == 0
            assert replica.allocator.total_blocks == len(replica.member.extents) * SIZE
        (status,) = NodePools(folder).status()
        assert sum(row.leased_blocks for row in status.members) <= status.capacity_blocks
