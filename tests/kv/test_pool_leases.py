"""Leases of a node's pool between real processes: limits, isolation, death and what comes after it."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.kv_tenant import LAYOUT, Tenant, content, fill
from workers.kv.layout import KvLayout
from workers.kv.lease import LeaseLostError, PoolMember, Terms, Use, join
from workers.kv.ledger import PoolJoinError
from workers.kv.pool import NodePools, PoolStatus
from workers.kv.table import DAMAGED, FREE, Extent, Table

SIZE = LAYOUT.extent_blocks
StartTenant = Callable[..., Tenant]


@pytest.fixture
def start(folder: Path) -> Iterator[StartTenant]:
    started: list[Tenant] = []

    def start(replica_id: str, *, brought: int = 8 * SIZE, minimum: int | None = None) -> Tenant:
        started.append(Tenant(folder, replica_id, brought=brought, minimum=minimum))
        return started[-1]

    yield start
    for tenant in started:
        tenant.close()


def member_of(folder: Path, replica_id: str, **terms: int) -> PoolMember:
    return join(folder, LAYOUT, replica_id, 1, Terms(**{"brought_blocks": 8 * SIZE, **terms}))


def status_of(folder: Path) -> PoolStatus:
    (status,) = NodePools(folder).status()
    return status


def open_table(folder: Path) -> Table:
    return Table(folder / LAYOUT.pool_id)


def test_extents_are_whole_pages_whatever_a_block_takes() -> None:
    odd = KvLayout(layers=3, kv_heads=1, head_size=24, dtype="bfloat16")
    assert odd.block_bytes == 2 * 3 * 16 * 24 * 2
    assert odd.extent_bytes % 4096 == 0
    assert odd.extent_blocks >= 16


def test_what_one_replica_does_not_use_another_one_borrows(folder: Path, start: StartTenant) -> None:
    start("idle")
    busy = member_of(folder, "busy")
    taken = busy.take(20, Use(needed=20 * SIZE))
    assert len(taken) == 16
    assert busy.refusal.startswith("16 extents are free")
    assert busy.take(1, Use(live=16 * SIZE, needed=17 * SIZE)) == []
    assert busy.refusal == "the node's pool is lent out"
    rows = {row.replica_id: row for row in status_of(folder).members}
    assert (rows["busy"].borrowed_blocks, rows["idle"].lent_blocks) == (8 * SIZE, 8 * SIZE)
    busy.close()


def test_lender_gets_its_guarantee_back(folder: Path, start: StartTenant) -> None:
    owner = start("owner")
    busy = member_of(folder, "busy")
    taken = busy.take(16, Use(needed=16 * SIZE))
    busy.tell(Use(live=16 * SIZE, needed=16 * SIZE))
    assert owner.ask("take", count=3, needed=3 * SIZE) == []
    assert (busy.recall().give_back, busy.recall().preempt) == (3, 3)
    busy.give(taken[:3], Use(live=13 * SIZE, needed=16 * SIZE))
    assert busy.recall().give_back == 0
    assert busy.take(3, Use(live=13 * SIZE, needed=16 * SIZE)) == [], "what was asked back was taken again"
    assert len(owner.ask("take", count=3, needed=3 * SIZE)) == 3
    busy.close()


def test_leaker_hits_its_ceiling_and_its_neighbour_keeps_its_guarantee(
    folder: Path, start: StartTenant
) -> None:
    neighbour = start("neighbour")
    leaker = member_of(folder, "leaker", ceiling_blocks=10 * SIZE)
    while got := leaker.take(1, Use(live=len(leaker.extents) * SIZE, needed=999 * SIZE)):
        assert len(got) == 1
    assert len(leaker.extents) == 10
    assert leaker.refusal == "at its ceiling of 10 extents"
    leaker.take(1, Use(live=10 * SIZE, needed=999 * SIZE))
    assert len(neighbour.ask("take", count=6, needed=6 * SIZE)) == 6
    assert neighbour.ask("take", count=2, live=6 * SIZE, needed=8 * SIZE) == []
    assert leaker.recall().preempt == 2
    leaker.close()


def test_returned_memory_is_wiped_and_given_back_to_the_machine(folder: Path) -> None:
    first, second = member_of(folder, "first"), member_of(folder, "second")
    (extent,) = first.take(1, Use(needed=SIZE))
    fill(first, extent, 0xAB)
    arena = folder / LAYOUT.pool_id / "arena"
    assert arena.stat().st_blocks * 512 == LAYOUT.extent_bytes
    first.give([extent], Use())
    assert arena.stat().st_blocks == 0
    assert extent in second.take(1, Use(needed=SIZE))
    assert content(second, extent) == {0}
    for member in (first, second):
        member.close()


def test_replica_killed_while_it_writes_leaves_nothing_for_others_to_see(
    folder: Path, start: StartTenant
) -> None:
    victim = start("victim")
    held = victim.ask("take", count=8, needed=8 * SIZE)
    assert victim.ask("write_for_ever", extents=held, value=0x5A)
    heir = member_of(folder, "heir")
    assert not set(heir.take(16, Use(needed=16 * SIZE))) & set(held)
    victim.kill()
    taken = heir.take(8, Use(live=8 * SIZE, needed=16 * SIZE))
    assert set(taken) == set(held), "the asking replica reclaims what the dead one held"
    for extent in taken:
        assert content(heir, extent) == {0}
    assert status_of(folder).reclaimed_extents == 8
    heir.close()


def test_living_replica_is_never_reclaimed_even_if_it_is_stopped(folder: Path, start: StartTenant) -> None:
    frozen = start("frozen")
    held = frozen.ask("take", count=8, needed=8 * SIZE)
    frozen.process.send_signal(signal.SIGSTOP)
    other = member_of(folder, "other")
    assert not set(other.take(16, Use(needed=16 * SIZE))) & set(held)
    assert NodePools(folder).sweep({"other"}) == 0
    frozen.process.send_signal(signal.SIGCONT)
    frozen.ask("fill", extents=held, value=7)
    assert frozen.ask("content", extents=held) == [7]
    other.close()


def test_write_outside_its_lease_kills_the_writer_alone(start: StartTenant) -> None:
    victim, wild = start("victim"), start("wild")
    held = victim.ask("take", count=2, needed=2 * SIZE)
    victim.ask("fill", extents=held, value=0x11)
    assert wild.ask("fill", extents=held, value=0x99) is None
    assert wild.process.wait(10) == -signal.SIGSEGV
    assert victim.ask("content", extents=held) == [0x11]


def test_other_replicas_kv_cannot_be_read(start: StartTenant) -> None:
    victim, reader = start("victim"), start("reader")
    held = victim.ask("take", count=1, needed=SIZE)
    victim.ask("fill", extents=held, value=0x11)
    assert reader.ask("content", extents=held) is None
    assert reader.process.wait(10) == -signal.SIGSEGV


def test_own_extent_cannot_be_touched_after_it_was_given_back(start: StartTenant) -> None:
    tenant = start("late")
    held = tenant.ask("take", count=1, needed=SIZE)
    tenant.ask("give", extents=held)
    assert tenant.ask("fill", extents=held, value=1) is None
    assert tenant.process.wait(10) == -signal.SIGSEGV


def test_fenced_replica_notices_before_it_uses_a_block(folder: Path) -> None:
    member = member_of(folder, "fenced")
    held = member.take(4, Use(needed=4 * SIZE))
    member.check()
    table = open_table(folder)
    with table.transaction():
        before = table.read_extent(held[2])
        table.write_extent(held[2], Extent(before.owner, before.generation + 1, before.epoch))
    with pytest.raises(LeaseLostError, match="given to somebody else"):
        member.check()
    table.close()
    member.close()


def test_agents_restart_leaves_every_lease_as_it_was(folder: Path, start: StartTenant) -> None:
    tenant = start("stays")
    held = tenant.ask("take", count=3, needed=3 * SIZE)
    tenant.ask("fill", extents=held, value=0x22)
    for _ in range(2):  # an agent keeps nothing of its own: each is a new one
        assert NodePools(folder).sweep({"stays"}, check_records=True) == 0
    assert tenant.ask("content", extents=held) == [0x22]
    (row,) = status_of(folder).members
    assert (row.replica_id, row.alive, row.leased_blocks) == ("stays", True, 3 * SIZE)


def test_pool_goes_with_its_last_replica_and_stays_while_one_is_wanted(
    folder: Path, start: StartTenant
) -> None:
    tenant = start("gone")
    pools = NodePools(folder)
    pools.sweep(set())
    assert status_of(folder).members[0].alive, "a replica that still runs keeps its pool"
    tenant.kill()
    pools.sweep({"gone"})
    assert not status_of(folder).members[0].alive
    pools.sweep(set())
    assert pools.status() == ()
    assert not (folder / LAYOUT.pool_id).exists()


def test_next_attempt_takes_over_the_place_of_the_dead_one(folder: Path, start: StartTenant) -> None:
    first = start("again")
    first.ask("take", count=5, needed=5 * SIZE)
    first.kill()
    second = start("again")
    (row,) = status_of(folder).members
    assert (row.leased_blocks, row.brought_blocks) == (0, 8 * SIZE)
    assert len(second.ask("take", count=8, needed=8 * SIZE)) == 8


def test_limits_change_while_the_replica_runs(folder: Path) -> None:
    pools = NodePools(folder)
    member, other = member_of(folder, "m", longest_blocks=2 * SIZE), member_of(folder, "o")
    pools.set_limits("m", 3 * SIZE, 4 * SIZE)
    assert len(member.take(9, Use(needed=9 * SIZE))) == 4
    with pytest.raises(PoolJoinError, match="longest request takes 32 blocks, 16 would be guaranteed"):
        pools.set_limits("m", 1, 4 * SIZE)
    with pytest.raises(PoolJoinError, match="below the minimum"):
        pools.set_limits("m", 5 * SIZE, 4 * SIZE)
    with pytest.raises(PoolJoinError, match="272 blocks would be guaranteed in all, and the pool has 256"):
        pools.set_limits("m", 9 * SIZE, 12 * SIZE)
    with pytest.raises(LookupError):
        pools.set_limits("nobody", 1, 1)
    for each in (member, other):
        each.close()


def test_fixed_pool_refuses_a_guarantee_that_it_cannot_keep(folder: Path) -> None:
    size = 4 * LAYOUT.extent_bytes
    first = join(folder, LAYOUT, "a", 1, Terms(3 * SIZE), fixed_bytes=size)
    with pytest.raises(PoolJoinError, match="80 blocks would be guaranteed in all, and the pool has 64"):
        join(folder, LAYOUT, "b", 1, Terms(2 * SIZE), fixed_bytes=size)
    second = join(folder, LAYOUT, "b", 1, Terms(2 * SIZE, minimum_blocks=SIZE), fixed_bytes=size)
    assert len(second.take(9, Use(needed=9 * SIZE))) == 4
    for member in (first, second):
        member.close()


def test_damaged_record_is_lent_to_nobody_until_the_pool_is_empty(folder: Path) -> None:
    member = member_of(folder, "m")
    table = open_table(folder)
    path = folder / LAYOUT.pool_id / "table"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - table.header.extents * 16 + 16 * 3 + 6)
        file.write(b"\xff")
    pools = NodePools(folder)
    pools.sweep({"m"}, check_records=True)
    assert table.read_extent(3).owner == DAMAGED
    assert status_of(folder).damaged_extents == 1
    assert 3 not in member.take(8, Use(needed=8 * SIZE))
    member.close()
    pools.sweep({"m"}, check_records=True)
    assert table.read_extent(3).owner == FREE
    table.close()


def test_killed_at_any_moment_of_taking_and_giving_no_extent_is_lost_or_owned_twice(
    folder: Path, start: StartTenant
) -> None:
    numbers = random.Random(5)  # noqa: S311 - test data
    survivor = member_of(folder, "survivor")
    for round_number in range(6):
        churning = start(f"c{round_number}", brought=SIZE)
        assert churning.ask("churn")
        for _ in range(numbers.randrange(1, 60)):
            survivor.give(survivor.take(1, Use(needed=SIZE)), Use())
        churning.kill()
        NodePools(folder).sweep({"survivor"})
        table = open_table(folder)
        owners = {table.read_extent(number).owner for number in range(table.header.extents)}
        table.close()
        assert owners == {FREE}
    assert len(survivor.take(8, Use(needed=8 * SIZE))) == 8
    survivor.close()
