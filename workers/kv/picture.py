"""The picture of a pool: which extents are whose, how full they are and since when they lie there. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workers.kv.marks import Mark
from workers.kv.table import DAMAGED, FREE
from workers.protocol.kv_pools import AGE_STEPS, DAMAGED_CELL, FREE_CELL, MAP_CELLS, MapCell, age_step


@dataclass(frozen=True, slots=True)
class Picture:
    """Cells in the order of memory."""

    cell_extents: int
    cells: tuple[MapCell, ...]
    cached_by_age: Mapping[int, tuple[int, ...]]
    """Cached blocks by step of age, by owner as in the table."""


def draw(
    owners: bytes, marks: Sequence[Mark], places: Mapping[int, int], *, extent_blocks: int, now: float
) -> Picture:
    """Draw the extents whose owner bytes are given.

    `places` tells the place of an owner's row among those shown, counted from 1. A mark that names
    another owner is of an earlier one, and counts for nothing.
    """
    known = [mark if mark.owner == owner else None for owner, mark in zip(owners, marks, strict=True)]
    step = max(1, -(-len(owners) // MAP_CELLS))
    cells = tuple(
        _cell(owners[at : at + step], known[at : at + step], places, extent_blocks, now)
        for at in range(0, len(owners), step)
    )
    return Picture(step, cells, _cached_by_age(known, now))


def _cell(
    owners: bytes, marks: Sequence[Mark | None], places: Mapping[int, int], extent_blocks: int, now: float
) -> MapCell:
    """A cell is what most of its extents are; among equals, what is lent is shown before what is free."""
    owner = max(set(owners), key=lambda mark: (owners.count(mark), mark != FREE, -mark))
    if owner == DAMAGED:
        return MapCell(DAMAGED_CELL)
    if owner == FREE or owner not in places:
        return MapCell(FREE_CELL)
    own = [mark for mark in marks if mark is not None and mark.owner == owner]
    blocks = owners.count(owner) * extent_blocks
    newest = max(
        (mark.used_at_seconds for mark in own if mark.live_blocks or mark.cached_blocks), default=None
    )
    return MapCell(
        places[owner],
        sum(mark.live_blocks for mark in own) / blocks,
        sum(mark.cached_blocks for mark in own) / blocks,
        0 if newest is None else age_step(now - newest),
    )


def _cached_by_age(marks: Sequence[Mark | None], now: float) -> dict[int, tuple[int, ...]]:
    sums: dict[int, list[int]] = {}
    for mark in marks:
        if mark is not None and mark.cached_blocks:
            row = sums.setdefault(mark.owner, [0] * AGE_STEPS)
            row[age_step(now - mark.used_at_seconds) - 1] += mark.cached_blocks
    return {owner: tuple(row) for owner, row in sums.items()}
