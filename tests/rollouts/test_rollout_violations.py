"""Each rule of simulated rollouts can be broken: a planner with that fault is found out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime

import pytest

from exaserve_ops.rollouts.domain import driving
from exaserve_ops.rollouts.domain import lifecycle as states
from exaserve_ops.rollouts.domain.actions import Action, AddWaves, MoveRollout, MoveWave, Roll, Wait
from exaserve_ops.rollouts.domain.policy import read_policy
from exaserve_ops.rollouts.domain.view import RolloutView
from exaserve_ops.serving.domain import reconcile
from exaserve_ops.serving.domain.facts import DeploymentSnapshot
from exaserve_ops.serving.domain.steps import Step
from tests.fakes import rollout_fleet, rollout_rules
from tests.fakes.rollout_fleet import RolloutFleet
from tests.fakes.rollout_records import Row
from tests.fakes.rollout_scenario import Scenario, run
from tests.fakes.rollout_world import RolloutWorld

Plant = Callable[[pytest.MonkeyPatch], None]

right_decide = driving.decide
right_plan = reconcile.plan_deployment
right_make = RolloutFleet.make
SEEDS = 6
POLICY = read_policy(
    {
        "max_surge": "0",
        "max_unavailable": "5%",
        "canary": "1",
        "growth": ["50%"],
        "canary_soak_seconds": 60,
        "soak_seconds": 30,
        "min_requests": 20,
        "sessions_wait_seconds": 60,
        "data_deadline_seconds": 600,
    }
)


def deciding(wrong: Callable[[RolloutView, datetime], list[Action]]) -> Plant:
    """A planner that decides wrongly."""
    return lambda patch: patch.setattr(driving, "decide", wrong)


def many_at_once(view: RolloutView, now: datetime) -> list[Action]:
    return right_decide(replace(view, unavailable=4 * view.unavailable), now)


def over_all_domains(view: RolloutView, now: datetime) -> list[Action]:
    seats = tuple(replace(seat, domain="everywhere") for seat in view.seats)
    waves = tuple(replace(wave, domains=("everywhere",)) for wave in view.waves)
    return right_decide(replace(view, seats=seats, waves=waves), now)


def without_sessions(view: RolloutView, now: datetime) -> list[Action]:
    """Whoever still has sessions goes all the same."""
    steps = right_decide(view, now)
    waits = {seat.replica_id for seat in view.seats if seat.leaving_since is not None and not seat.rolls_to}
    if view.status == states.RUNNING and waits:
        return [Roll(tuple(sorted(waits)), view.new_release, in_place=True, why="enough"), *steps]
    return steps


def past_its_gates(view: RolloutView, now: datetime) -> list[Action]:
    wave = view.wave
    if view.status == states.RUNNING and wave is not None and wave.status == states.SOAKING:
        return [MoveWave(wave.number, "pass", "it will do")]
    return right_decide(view, now)


def with_no_canary(view: RolloutView, now: datetime) -> list[Action]:
    wave = view.wave
    if view.status == states.RUNNING and wave is not None and wave.status == states.WAITING:
        old = tuple(s.replica_id for s in view.kept(view.old_release) if s.domain == wave.domain)
        return [MoveWave(wave.number, "open", "all of them", old, "in_place")]
    return right_decide(view, now)


def on_while_it_stands(view: RolloutView, now: datetime) -> list[Action]:
    if view.status not in {states.PAUSED, states.HALTED}:
        return right_decide(view, now)
    steps = right_decide(replace(view, status=states.RUNNING), now)
    return [step for step in steps if not isinstance(step, MoveRollout)]


def after_the_end(view: RolloutView, now: datetime) -> list[Action]:
    if view.status in states.ROLLOUT.final:
        return [MoveRollout("roll_back", "after all")]
    return right_decide(view, now)


def to_a_third_release(view: RolloutView, now: datetime) -> list[Action]:
    steps = right_decide(view, now)
    return [replace(step, release="release-9") if isinstance(step, Roll) else step for step in steps]


def stuck(view: RolloutView, now: datetime) -> list[Action]:
    steps = right_decide(view, now)
    return [Wait("wait and see") if isinstance(step, AddWaves | MoveWave) else step for step in steps]


def blaming(view: RolloutView, now: datetime) -> list[Action]:
    """A good release is turned back because a node went away."""
    if view.status == states.RUNNING and any(not seat.node_alive for seat in view.seats):
        return [MoveRollout("roll_back", "something is away")]
    return right_decide(view, now)


def back_everywhere(view: RolloutView, now: datetime) -> list[Action]:
    return over_all_domains(view, now) if view.status == states.ROLLING_BACK else right_decide(view, now)


def replacing_twice(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: RolloutFleet, release: str, **given: str) -> Row:
        made = right_make(self, release, **given)
        return right_make(self, release, **given) if given.get("replaces") else made

    patch.setattr(RolloutFleet, "make", wrong)


def making_too_many(patch: pytest.MonkeyPatch) -> None:
    def wrong(snapshot: DeploymentSnapshot, *, now: datetime) -> tuple[Step, ...]:
        return (*right_plan(replace(snapshot, replicas_wanted=2 * snapshot.replicas_wanted), now=now),)

    patch.setattr(rollout_fleet, "plan_deployment", wrong)


def letting_old_weights_go(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RolloutWorld, "_keep_old_weights", lambda *_: None)


def losing_sessions(patch: pytest.MonkeyPatch) -> None:
    def wrong(_fleet: RolloutFleet, row: Row, count: int) -> None:
        row.sessions -= count

    patch.setattr(RolloutFleet, "_move_sessions", wrong)


def asking_on_and_off(patch: pytest.MonkeyPatch) -> None:
    """Asked a second time to let its sessions go, a replica keeps them."""

    def wrong(
        fleet: RolloutFleet, rows: Iterable[Row], since: datetime | None, targets: tuple[str, ...]
    ) -> None:
        for row in rows:
            row.leaving_since = since if row.leaving_since is None else None
            row.targets = targets
            fleet.touch(row)

    patch.setattr(RolloutFleet, "ask_to_leave", wrong)


PLANTED: tuple[tuple[str, Plant, str], ...] = (
    (rollout_rules.ADDS_ONLY_SO_FAR, deciding(many_at_once), ""),
    (rollout_rules.FLOOR, deciding(many_at_once), ""),
    (rollout_rules.ONE_DOMAIN, deciding(over_all_domains), ""),
    (rollout_rules.ONE_DOMAIN_BACK, deciding(back_everywhere), "error"),
    (rollout_rules.ONE_SUCCESSOR, replacing_twice, ""),
    (rollout_rules.TWO_RELEASES, deciding(to_a_third_release), ""),
    (rollout_rules.SURGE, making_too_many, ""),
    (rollout_rules.WEIGHTS, letting_old_weights_go, ""),
    (rollout_rules.GATES, deciding(past_its_gates), "error"),
    (rollout_rules.CANARY, deciding(with_no_canary), ""),
    (rollout_rules.SESSIONS, deciding(without_sessions), ""),
    (rollout_rules.NO_SESSION_LOST, losing_sessions, ""),
    (rollout_rules.STANDS_STILL, deciding(on_while_it_stands), ""),
    (rollout_rules.ENDED, deciding(after_the_end), "error"),
    (rollout_rules.TWICE, asking_on_and_off, ""),
    (rollout_rules.ENDS, deciding(stuck), ""),
    (rollout_rules.END_STATE, deciding(blaming), ""),
)


def test_every_rule_has_a_fault_that_breaks_it() -> None:
    assert {rule for rule, _, _ in PLANTED} == set(rollout_rules.RULES)


@pytest.mark.parametrize(("rule", "plant", "bad"), PLANTED, ids=[rule for rule, _, _ in PLANTED])
def test_planted_fault_is_found(rule: str, plant: Plant, bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found: set[str] = set()
    for seed in range(SEEDS):
        drawn = Scenario.drawn(seed, domains=4, nodes_each=2)
        given = replace(
            drawn,
            names_racks=True,
            spare=1,
            room=400,
            policy=POLICY,
            bad=bad,
            bad_from=2,
            lacking="",
            longest_seconds=7200,
        )
        found |= set(run(given).broken)
        if rule in found:
            return
    raise AssertionError(f"not found in {SEEDS} rollouts; found were: {sorted(found)}")
