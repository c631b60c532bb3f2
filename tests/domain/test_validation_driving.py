"""A validation goes through all of its checks, clears away what it made, and ends with the right verdict."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from exaserve_ops.validation.domain import driving as do
from exaserve_ops.validation.domain import lifecycle as states
from exaserve_ops.validation.domain.asking import Finding
from exaserve_ops.validation.domain.catalogue import (
    AGREEMENT,
    BY_NAME,
    CATALOGUE,
    GOLDEN,
    LAUNCH,
    TUNING,
    PlannedCheck,
    plan_checks,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_two_engines_are_compared_and_one_is_not() -> None:
    one, two = plan_checks(["torch"]), plan_checks(["torch", "vllm", "torch"])
    assert PlannedCheck(AGREEMENT) not in one
    assert two[-1] == PlannedCheck(AGREEMENT)
    assert len(two) == len(set(two))
    own = [check.name for check in two if check.engine == "vllm"]
    assert own == [check.name for check in CATALOGUE if not check.of_model]


def test_what_a_check_builds_on_comes_before_it() -> None:
    order = [check.name for check in plan_checks(["torch", "vllm"])]
    for check in CATALOGUE:
        assert all(order.index(name) < order.index(check.name) for name in check.after)


class Stage:
    """A validation whose trials and checks go as they are told; nothing of it is real."""

    def __init__(self, engines: list[str], outcomes: dict[tuple[str, str], str]) -> None:
        self.now = NOW
        self.outcomes = outcomes
        self.status = states.QUEUED
        self.why = ""
        self.trial = do.Trial()
        self.runs: int | None = None
        self.tried: list[str] = []
        self.order: list[tuple[str, str]] = []
        planned = enumerate(plan_checks(engines), 1)
        self.checks = {n: do.CheckState(n, check.name, check.engine, states.WAITING) for n, check in planned}

    def view(self) -> do.ValidationView:
        return do.ValidationView(
            self.status, tuple(self.checks.values()), self.trial, runs_here=self.runs is not None
        )

    def step(self, *, dies: bool = False) -> bool:
        """One look; with `dies`, the controller forgets what ran in it. Returns whether anything was due."""
        self.now += timedelta(seconds=1)
        if dies:
            self.runs = None
        elif self.runs is not None:
            self.record(self.runs)
            return True
        action = do.decide(self.view(), self.now)
        if isinstance(action, do.MakeTrial | do.EndTrial | do.Wait):
            self.move_trial(action)
        elif action is not None:
            self.carry_out(action)
        return action is not None

    def move_trial(self, action: do.MakeTrial | do.EndTrial | do.Wait) -> None:
        if isinstance(action, do.MakeTrial):
            assert self.trial.state == do.NO_TRIAL, "one trial at a time"
            self.tried.append(action.engine)
            broken = self.outcomes.get((LAUNCH, action.engine)) == states.FAILED
            self.trial = do.Trial(do.BROKEN if broken else do.READY, action.engine, "gave up", self.now, 1.5)
        elif isinstance(action, do.EndTrial):
            self.trial = replace(self.trial, state=do.ENDING)
        elif self.trial.state == do.ENDING:
            self.trial = do.Trial()

    def carry_out(self, action: do.Move | do.Judge | do.Run | do.Record) -> None:
        match action:
            case do.Move(event, why):
                self.status, self.why = states.VALIDATION.next(self.status, event), why
            case do.Judge(position):
                self.record(position)
            case do.Record(position, finding):
                self.end(position, finding)
            case do.Run(position):
                check = self.checks[position]
                assert (self.trial.state, self.trial.engine) == (do.READY, check.engine)
                self.checks[position] = replace(check, status=states.CHECKING, began_at=self.now)
                self.runs = position

    def record(self, position: int) -> None:
        check = self.checks[position]
        outcome = self.outcomes.get((check.name, check.engine), states.PASSED)
        self.runs = None
        self.end(position, Finding(outcome, why="as told"))

    def end(self, position: int, finding: Finding) -> None:
        check = self.checks[position]
        assert not check.is_over, "an outcome stays"
        self.order.append((check.name, check.engine))
        self.checks[position] = replace(check, status=finding.outcome)

    def play(self, deaths: set[int] = frozenset()) -> Stage:  # type: ignore[assignment]  # read only
        for number in range(400):
            if not self.step(dies=number in deaths):
                return self
        raise AssertionError(f"it does not end: {self.view()}")


def test_all_checks_pass_and_nothing_is_left() -> None:
    stage = Stage(["torch", "vllm"], {}).play()
    assert stage.status == states.GO
    assert stage.why == "31 of 31 checks passed"
    assert stage.tried == ["torch", "vllm"]
    assert stage.trial.state == do.NO_TRIAL
    assert [check.position for check in stage.checks.values()] == list(range(1, 32))


def test_failed_check_stops_no_other_and_is_named() -> None:
    stage = Stage(["torch", "vllm"], {("prefix", "torch"): states.FAILED}).play()
    assert stage.status == states.NO_GO
    assert stage.why == "failed: prefix cache on torch"
    assert sum(check.status == states.PASSED for check in stage.checks.values()) == 30


def test_what_only_informs_is_no_reason_for_a_no() -> None:
    stage = Stage(["torch"], {(TUNING, "torch"): states.FAILED}).play()
    assert stage.status == states.GO
    assert stage.order[-1] == (TUNING, "torch"), "what it launches has other options than all before it"


def test_engine_that_does_not_launch_leaves_the_other_tried() -> None:
    stage = Stage(["torch", "vllm"], {(LAUNCH, "torch"): states.FAILED}).play()
    assert stage.status == states.NO_GO
    by_name = {(check.name, check.engine): check.status for check in stage.checks.values()}
    assert by_name[GOLDEN, "torch"] == states.SKIPPED
    assert by_name[GOLDEN, "vllm"] == states.PASSED
    assert by_name[AGREEMENT, ""] == states.SKIPPED
    assert stage.trial.state == do.NO_TRIAL


def test_trial_that_breaks_midway_fails_the_check_that_needed_it() -> None:
    stage = Stage(["torch"], {})
    while stage.runs is None:
        stage.step()
    stage.trial = replace(stage.trial, state=do.BROKEN, why="killed by signal 9")
    stage.runs = None
    stage.step()
    [failed] = [check for check in stage.checks.values() if check.status == states.FAILED]
    assert failed.name == "memory"


def test_launch_that_never_ends_is_given_up() -> None:
    starting = do.Trial(do.STARTING, "torch", "replica is loading", NOW)
    checks = tuple(
        do.CheckState(n, c.name, c.engine, states.PASSED if n < 4 else states.WAITING)
        for n, c in enumerate(plan_checks(["torch"]), 1)
    )
    assert checks[3].name == LAUNCH
    view = do.ValidationView(states.RUNNING, checks, starting)
    assert do.decide(view, NOW + timedelta(seconds=10)) == do.Wait("replica is loading")
    late = do.decide(view, NOW + timedelta(seconds=BY_NAME[LAUNCH].seconds + 1))
    assert isinstance(late, do.Record)
    assert late.finding.outcome == states.FAILED
    assert "replica is loading" in late.finding.why


def test_check_that_takes_too_long_is_given_up() -> None:
    stage = Stage(["torch"], {})
    while stage.runs is None:
        stage.step()
    late = do.decide(stage.view(), stage.now + timedelta(hours=1))
    assert isinstance(late, do.Record)
    assert "longer than" in late.finding.why


def test_cancelled_one_clears_away_what_it_made() -> None:
    stage = Stage(["torch"], {})
    while stage.trial.state == do.NO_TRIAL:
        stage.step()
    stage.status = states.CANCELLED
    stage.play()
    assert stage.trial.state == do.NO_TRIAL


def test_second_one_of_a_model_waits_for_the_first() -> None:
    stage = Stage(["torch"], {})
    assert isinstance(do.decide(replace(stage.view(), is_first=False), NOW), do.Wait)


outcomes = st.dictionaries(
    st.tuples(st.sampled_from([check.name for check in CATALOGUE]), st.sampled_from(["", "torch", "vllm"])),
    st.sampled_from([states.PASSED, states.FAILED, states.SKIPPED]),
)


@given(outcomes, st.sets(st.integers(0, 120)))
def test_it_ends_whatever_is_found_and_whoever_dies(
    told: dict[tuple[str, str], str], deaths: set[int]
) -> None:
    stage = Stage(["torch", "vllm"], told).play(deaths)
    assert stage.status in {states.GO, states.NO_GO}
    assert stage.trial.state == do.NO_TRIAL
    assert all(check.is_over for check in stage.checks.values())
    assert stage.order == [(check.name, check.engine) for check in stage.checks.values()]
    counted = [check for check in stage.checks.values() if not check.kind.informs]
    failed = [check for check in counted if check.status == states.FAILED]
    launched = [c for c in stage.checks.values() if c.name == LAUNCH and c.status == states.PASSED]
    assert (stage.status == states.GO) == (not failed and bool(launched))
