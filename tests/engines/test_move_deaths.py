"""An engine is killed at every step of a move: the next turn says what it would have said, anywhere."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from bench.relocation.engines import Engine, Seat
from bench.relocation.house import House, complete, node_pools, running, send_session
from bench.relocation.wire import OK, UnansweredError

CARRIERS = {"shared_memory": "neighbour", "tcp": "far"}
BLOCK_TOKENS = 16
BLOCKS = 128
MOST_STEPS = 24


def seats(folder: Path, model: Path) -> list[Seat]:
    pool = node_pools("deaths", folder)
    weights = folder / "weights"
    return [
        Seat("here", "a", model, weights, BLOCKS, pool),
        Seat("neighbour", "a", model, weights, BLOCKS, pool),
        Seat("far", "b", model, weights, BLOCKS),
        Seat("twin", "c", model, weights, BLOCKS),
    ]


def engine(house: House, replica_id: str) -> Engine:
    found = house.find(replica_id)
    assert found is not None
    return found


async def one_move(house: House, victim: str, carrier: str, step: int) -> bool:
    """Have the victim die at a step of a move. Returns whether the move was over before that."""
    numbers = random.Random(f"{victim} {carrier} {step}")  # noqa: S311 - test data
    prompt = [numbers.randrange(256) for _ in range(100)]
    source, target = engine(house, "here"), engine(house, CARRIERS[carrier])
    dying, living = (source, target) if victim == "source" else (target, source)
    answer, _, _ = await complete(source, "moves", prompt, 4)
    following = prompt + answer + [numbers.randrange(256) for _ in range(10)]
    assert await asyncio.to_thread(dying.die_at, step)
    try:
        status, told = await send_session(source, target, "moves")
    except UnansweredError:
        status, told = 0, {}
    outlived = await asyncio.to_thread(dying.die_at, 0)
    expected, _, _ = await complete(engine(house, "twin"), "", following, 8)
    said, cached, _ = await complete(living, "moves", following, 8)
    assert said == expected
    if victim == "target" or outlived:
        assert cached >= len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS, "whole, and nothing to be computed again"
    if outlived:
        assert (status, told["carrier"], told["turn_began"]) == (OK, carrier, False)
        return True
    await asyncio.to_thread(dying.process.join, 30)
    await house.until_all_serve()
    return False


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("victim", ["source", "target"])
def test_engine_that_dies_at_any_step_of_a_move_costs_nobody_a_token(
    victim: str, carrier: str, demo_model: Path, tmp_path: Path
) -> None:
    async def every_step() -> int:
        async with running(seats(tmp_path, demo_model)) as house:
            for step in range(1, MOST_STEPS):
                if await one_move(house, victim, carrier, step):
                    return step
        raise AssertionError(f"the move has more than {MOST_STEPS} steps")

    assert asyncio.run(every_step()) > 5, "it was killed at each of several steps"
