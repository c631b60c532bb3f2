"""Rollouts over many nodes of 12 replicas with random faults, in virtual time: what must hold, holds.

The rules are in `tests/fakes/rollout_rules.py`, each by its name; that each of them can be broken is shown
in `test_rollout_violations.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.fakes.rollout_rules import RULES
from tests.fakes.rollout_scenario import Run, Scenario, run

SEEDS = 16
MANY_SEEDS = int(os.environ.get("EXAOPS_ROLLOUT_SEEDS", "1000"))


@pytest.fixture(scope="module")
def small_runs() -> list[Run]:
    """Rollouts over 16 nodes in 8 racks."""
    return [run(Scenario.drawn(seed, domains=8, nodes_each=2)) for seed in range(SEEDS)]


@pytest.mark.parametrize("rule", RULES)
def test_rule_holds_in_every_small_rollout(small_runs: list[Run], rule: str) -> None:
    broken = [one.told() for one in small_runs if rule in one.broken]
    assert not broken, "\n".join(broken)


def test_small_rollouts_go_all_ways_and_meet_all_faults(small_runs: list[Run]) -> None:
    """Else the rules would hold of nothing."""
    assert {"done", "rolled_back", "halted"} <= {one.status for one in small_runs}
    faults = {kind for one in small_runs for kind in one.faults}
    assert len(faults) >= 20, sorted(faults)
    outcomes = {name for one in small_runs for name in one.outcomes}
    assert outcomes == {"carried out", "overtaken", "fenced off", "done twice"}


def test_rollout_over_256_nodes_is_safe_and_ends() -> None:
    found = run(Scenario.drawn(10, domains=16, nodes_each=16))
    assert not found.broken, found.told()
    assert found.wanted > 2700


@pytest.mark.rollouts
@pytest.mark.parametrize("seed", range(MANY_SEEDS))
def test_safe_all_the_way_in_256_nodes(seed: int, record_property: Callable[[str, object], None]) -> None:
    found = run(Scenario.drawn(seed, domains=16, nodes_each=16))
    record_property("rollout", found.figures())
    assert not found.broken, found.told()
