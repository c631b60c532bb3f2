"""Rollouts over many nodes of 12 replicas with random faults, in virtual time: what must hold, holds."""

from __future__ import annotations

import os
import random

import pytest

from exaserve_ops.rollouts.domain.lifecycle import DONE, HALTED, ROLLED_BACK
from exaserve_ops.rollouts.domain.policy import read_policy
from tests.fakes.rollout_world import NEW, OLD, Machine, RolloutWorld, machines

REPLICAS_EACH = 12
LONGEST_SECONDS = 4 * 24 * 3600
STEP_SECONDS = 20
SEEDS = 20
MANY_SEEDS = int(os.environ.get("EXAOPS_ROLLOUT_SEEDS", "1000"))


def run(seed: int, *, domains: int = 16, nodes_each: int = 16) -> RolloutWorld:
    chance = random.Random(seed)  # noqa: S311 - drawn anew the same in every run
    spare = chance.choice([0, 0, 1])
    policy = read_policy(
        {
            "max_surge": chance.choice(["0", "2%", "5%"]) if spare else "0",
            "max_unavailable": chance.choice(["1%", "2%", "5%"]),
            "canary": chance.choice(["1", "4"]),
            "growth": chance.choice([["5%", "100%"], ["1%", "10%", "100%"]]),
            "canary_soak_seconds": chance.choice([0, 60]),
            "soak_seconds": chance.choice([0, 60]),
            "sessions_wait_seconds": chance.choice([0, 30]),
            "min_requests": chance.choice([0, 20]),
        }
    )
    world = RolloutWorld(
        chance,
        machines(domains, nodes_each, REPLICAS_EACH + spare),
        # One node in sixteen is left free, so that what a dead one had can go somewhere.
        wanted=domains * nodes_each * REPLICAS_EACH * 15 // 16,
        policy=policy,
        bad=chance.choice(["", "", "crash", "error", "slow"]),
        bad_from=chance.choice([0, 0, 2, 4]),
    )
    down: list[Machine] = []
    while world.status not in {DONE, ROLLED_BACK, HALTED}:
        assert world.now_seconds < LONGEST_SECONDS, world.picture()
        break_something(world, down, chance)
        # A controller may die after any action; the next one looks anew.
        dies_after = chance.choice([None, None, None, 0, 1, 2])
        world.drive(dies_after=dies_after)
        world.tick(STEP_SECONDS)
        check(world)
    return world


def break_something(world: RolloutWorld, down: list[Machine], chance: random.Random) -> None:
    """Nodes die and come back, reports get lost; three quarters of the domains stay whole."""
    draw = chance.random()
    if draw < 0.02 and len(down) < max(1, len(world.machines) // 40):
        machine = chance.choice(world.machines)
        if machine.alive:
            machine.alive = False
            down.append(machine)
    elif draw < 0.05 and down:
        machine = down.pop(0)
        machine.alive = True
    elif draw < 0.06:
        world.lost_reports_until = world.now_seconds + chance.choice([20, 60, 300])
    elif draw < 0.07:
        chance.choice(world.machines).slow = True


def check(world: RolloutWorld) -> None:
    most = max(1, world.unavailable)
    assert world.most_missing <= most, f"{world.most_missing} missing, {most} may be: {world.picture()}"
    crowded = {number: domains for number, domains in world.touched.items() if len(domains) > 1}
    assert not crowded, f"waves touched several domains: {crowded}"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_safe_all_the_way_and_it_ends(seed: int) -> None:
    judge_end(run(seed, domains=8, nodes_each=4))


@pytest.mark.rollouts
@pytest.mark.parametrize("seed", range(MANY_SEEDS))
def test_safe_all_the_way_in_256_nodes(seed: int) -> None:
    judge_end(run(seed))


def judge_end(world: RolloutWorld) -> None:
    releases = world.releases()
    if world.bad:
        assert world.status == ROLLED_BACK, world.picture()
        assert set(releases) == {OLD}, world.picture()
    else:
        assert world.status == DONE, world.picture()
        assert set(releases) == {NEW}, world.picture()
    assert sum(releases.values()) >= world.wanted
