"""Conversations move on a whole fleet while its processes are killed: none is lost, no answer is another."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.relocation.product import VICTIMS, Plan, measure

pytestmark = [pytest.mark.system, pytest.mark.outage, pytest.mark.timeout(900)]

MOVES = 18


def test_every_process_that_a_move_needs_may_die_at_any_moment_of_it(tmp_path: Path) -> None:
    told = asyncio.run(measure(tmp_path, Plan(MOVES, sessions=4, kill_ratio=1.0)))
    assert (told["wrong_turns"], told["lost_sessions"], told["orphans_after_stop"]) == (0, 0, 0), told["told"]
    assert set(VICTIMS) <= set(told["deaths"]), "each of them died, the rarest so far first"
    assert sum(told["outcomes"].values()) >= MOVES
    assert told["outcomes"].get("did not end", 0) == 0, told["told"]
