"""The picture of a pool: what is drawn is what the table and its replicas say, and nothing older."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.fakes.kv_replica import WritingReplica
from tests.fakes.kv_tenant import LAYOUT
from workers.agent.kv_pools import KvPoolKeeper
from workers.kv.lease import Terms, Use, join
from workers.kv.marks import Mark, Marks
from workers.kv.picture import draw
from workers.kv.pool import NodePools
from workers.kv.table import DAMAGED, FREE
from workers.protocol import v1
from workers.protocol.kv_pools import (
    DAMAGED_CELL,
    FREE_CELL,
    MAP_CELLS,
    MapCell,
    age_step,
    pack_map,
    unpack_map,
)


def test_map_comes_back_as_it_was_packed() -> None:
    cells = [MapCell(1, 1.0), MapCell(2, 0.0, 1.0, 5), MapCell(FREE_CELL), MapCell(DAMAGED_CELL)]
    assert unpack_map(pack_map(cells)) == cells
    assert unpack_map(b"") == []


def test_little_is_never_shown_as_nothing_nor_almost_all_as_all() -> None:
    [cell] = unpack_map(pack_map([MapCell(1, 0.001, 0.999, 1)]))
    assert 0 < cell.live_ratio < 0.1
    assert 0.9 < cell.cached_ratio < 1


@pytest.mark.parametrize(
    "data", [b"nonsense", pack_map([MapCell(1)])[:-3] + b"xx", b"x\x9c"], ids=["text", "wrong sum", "cut off"]
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no map of a pool"):
        unpack_map(data)


def test_map_that_would_unpack_to_much_is_refused() -> None:
    with pytest.raises(ValueError, match="no map of a pool"):
        unpack_map(pack_map([MapCell(FREE_CELL)] * 1_000_000))


def test_full_map_of_a_busy_pool_stays_small_on_the_wire() -> None:
    cells = [MapCell(1 + at % 12, (at % 16) / 15, (15 - at % 16) / 15, 1 + at % 5) for at in range(MAP_CELLS)]
    assert len(pack_map(cells)) < 1_200
    assert len(pack_map([MapCell(1 + at // 32, 1.0) for at in range(MAP_CELLS)])) < 200


@pytest.mark.parametrize(("seconds", "step"), [(0.0, 1), (9.9, 1), (10.0, 2), (599.0, 3), (1e9, 5)])
def test_ages_fall_into_steps(seconds: float, step: int) -> None:
    assert age_step(seconds) == step


def test_mark_of_an_earlier_owner_counts_for_nothing() -> None:
    marks = [Mark(1, 16, 0, 5.0), Mark(2, 8, 8, 5.0), Mark(0, 0, 0, 0.0)]
    picture = draw(bytes([2, 2, FREE]), marks, {1: 1, 2: 2}, extent_blocks=16, now=20.0)
    assert picture.cells == (MapCell(2), MapCell(2, 0.5, 0.5, 2), MapCell(FREE_CELL))
    assert picture.cached_by_age == {2: (0, 8, 0, 0, 0)}


def test_cell_of_several_extents_is_what_most_of_them_are() -> None:
    owners = bytes([1, 1, 2] * MAP_CELLS)
    marks = [Mark(owner, 16, 0, 0.0) for owner in owners]
    picture = draw(owners, marks, {1: 1, 2: 2}, extent_blocks=16, now=1.0)
    assert picture.cell_extents == 3
    assert set(picture.cells) == {MapCell(1, 1.0, 0.0, 1)}
    assert draw(bytes([FREE, DAMAGED]), marks[:2], {}, extent_blocks=16, now=1.0).cells == (
        MapCell(FREE_CELL),
        MapCell(DAMAGED_CELL),
    )


def test_neighbours_are_written_together_and_read_back(tmp_path: Path) -> None:
    marks = Marks(tmp_path)
    written = {3: Mark(1, 16, 0, 1.5), 4: Mark(1, 0, 9, 2.0), 7: Mark(64, 1, 1, 3.1)}
    marks.write(written)
    seen = marks.read(9)
    assert {at: mark for at, mark in enumerate(seen) if mark.owner} == written
    marks.close()


def test_status_tells_what_lies_where_and_since_when(folder: Path) -> None:
    at = time.monotonic()
    replica = WritingReplica(folder, "r0", Terms(64), clock=lambda: at)
    replica.add("one", list(range(200)), 240)
    while replica.step():
        pass
    replica.add("two", list(range(500, 540)), 60)
    replica.step()
    at += 1.0
    replica.step()
    [status] = NodePools(folder).status()
    [row] = status.members
    assert row.live_blocks > 0
    assert row.cached_blocks > 0
    assert sum(row.cached_by_age_blocks) == row.cached_blocks == row.cached_by_age_blocks[0]
    assert len(status.cells) == status.capacity_blocks // status.extent_blocks == 4
    own = [cell for cell in status.cells if cell.owner == 1]
    assert round(sum(cell.live_ratio for cell in own) * status.extent_blocks) == row.live_blocks
    assert round(sum(cell.cached_ratio for cell in own) * status.extent_blocks) == row.cached_blocks
    assert len(own) * status.extent_blocks == row.leased_blocks
    replica.close()


def test_what_a_replica_lacks_is_told(folder: Path) -> None:
    member = join(folder, LAYOUT, "r0", 1, Terms(32))
    member.take(2, Use(live=32, needed=80, waiting=3))
    [pool] = KvPoolKeeper(folder).facts()
    [row] = pool.members
    assert (row.leased_blocks, row.short_blocks, row.waiting_requests) == (32, 48, 3)
    assert (row.borrowed_blocks, row.lent_blocks) == (0, 0)
    member.close()


def test_pool_without_marks_is_shown_all_the_same(folder: Path) -> None:
    """A pool that was made before there were any."""
    member = join(folder, LAYOUT, "r0", 1, Terms(32))
    member.take(1, Use(live=3, needed=3))
    [home] = [table.parent for table in folder.glob("*/table")]
    (home / "marks").unlink()
    [status] = NodePools(folder).status()
    assert status.cells == (MapCell(1), MapCell(FREE_CELL))
    member.close()


def test_replica_goes_on_where_its_marks_cannot_be_written(folder: Path) -> None:
    member = join(folder, LAYOUT, "r0", 1, Terms(32))
    [extent] = member.take(1, Use(live=3, needed=3))
    [home] = [table.parent for table in folder.glob("*/table")]
    read_only = os.open(home / "marks", os.O_RDONLY)
    os.dup2(read_only, member._marks._file)
    os.close(read_only)
    member.mark({extent: (3, 0, 1.0)})
    assert "map of the pool" in member.refusal
    member.check()
    member.close()


def limits(replica_id: str, minimum: int, ceiling: int) -> v1.SetKvLimits:
    return v1.SetKvLimits(
        command_id="c-1",
        lease_epoch=1,
        deadline_seconds=60,
        replica_id=replica_id,
        minimum_blocks=minimum,
        ceiling_blocks=ceiling,
    )


def test_commanded_limits_hold_at_once_and_refusals_say_why(folder: Path) -> None:
    keeper = KvPoolKeeper(folder)
    assert "in no pool" in keeper.take_limits(limits("r0", 16, 32))
    member = join(folder, LAYOUT, "r0", 1, Terms(64, longest_blocks=32))
    assert keeper.take_limits(limits("r0", 32, 48)) == ""
    assert len(member.take(4, Use(needed=64))) == 3
    assert "longest request takes 32 blocks" in keeper.take_limits(limits("r0", 16, 48))
    assert "80 blocks would be guaranteed in all" in keeper.take_limits(limits("r0", 80, 80))
    assert "cannot both hold" in keeper.take_limits(limits("r0", 48, 32))
    assert "cannot both hold" in keeper.take_limits(limits("r0", 0, 32))
    [row] = KvPoolKeeper(folder).facts()[0].members
    assert (row.guaranteed_blocks, row.ceiling_blocks) == (32, 48)
    member.close()


def test_who_keeps_what_others_are_guaranteed_is_told_by_giving_nothing_back(folder: Path) -> None:
    keeper, wanted = KvPoolKeeper(folder), {"hoarder", "owner"}
    hoarder = join(folder, LAYOUT, "hoarder", 1, Terms(32, ceiling_blocks=64))
    owner = join(folder, LAYOUT, "owner", 1, Terms(32))
    held = hoarder.take(4, Use(live=64, needed=64))
    keeper.tend(wanted, now=0.0)
    assert keeper.hoarding_seconds(("hoarder", 1)) == 0, "nobody waits for it"
    owner.take(2, Use(needed=32, waiting=1))
    for now in (2.0, 4.0, 600.0, 602.0):
        keeper.tend(wanted, now=now)
    assert keeper.hoarding_seconds(("hoarder", 1)) == 6, "as far as was looked"
    assert keeper.hoarding_seconds(("owner", 1)) == 0
    hoarder.give(held[:1], Use(live=48, needed=64))
    keeper.tend(wanted, now=604.0)
    assert keeper.hoarding_seconds(("hoarder", 1)) == 0, "slow is not unwilling"
    hoarder.give(held[1:2], Use(live=32, needed=64))
    owner.take(2, Use(needed=32, waiting=1))
    keeper.tend(wanted, now=606.0)
    assert keeper.hoarding_seconds(("hoarder", 1)) == 0
    hoarder.close()
    owner.close()


def test_pool_is_looked_at_the_less_often_the_longer_it_takes(folder: Path) -> None:
    member = join(folder, LAYOUT, "r0", 1, Terms(32))
    ticks = iter([0.0, 0.5, 0.5, 5.0, 11.0, 11.0, 11.0])
    keeper = KvPoolKeeper(folder)
    first = keeper.facts(clock=lambda: next(ticks))
    member.take(1, Use(live=16, needed=16))
    assert keeper.facts(clock=lambda: next(ticks)) is first
    [pool] = keeper.facts(clock=lambda: next(ticks))
    assert pool.members[0].leased_blocks == 16
    member.close()
