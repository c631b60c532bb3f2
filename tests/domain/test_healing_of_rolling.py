"""Replicas that make way for another release, as the deployment's own plan treats them."""

from __future__ import annotations

import pytest

from exaserve_ops.serving.domain.facts import RollTarget
from tests.fakes.healing_world import HealingWorld, fleet


@pytest.mark.parametrize("in_place", [True, False])
def test_one_that_makes_way_in_place_goes_though_its_successor_waits_for_just_that_place(
    in_place: bool,
) -> None:
    """It was away when its successor was made, and answers again: the two must not wait for each other."""
    world = HealingWorld(wanted=2, boxes=fleet(2, slots=1))
    world.settle(60)
    old = next(iter(world.replicas))
    successor = world._make(replaces=old)
    world.change(old, roll=RollTarget("release-2", "release 2", in_place=in_place))
    world.run(60)
    assert world.replicas[old].is_kept is not in_place, (
        "beside its successor it stays until that one is ready"
    )
    assert (world.replicas[successor].status == "ready") is in_place
