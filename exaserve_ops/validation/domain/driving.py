"""What a validation does next: one look at everything, and the actions that follow. Pure.

The same look gives the same actions. A trial is a deployment of one replica that no client can reach; it
is there for one engine at a time, and goes however the validation ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from exaserve_ops.validation.domain import lifecycle as states
from exaserve_ops.validation.domain.asking import Finding
from exaserve_ops.validation.domain.catalogue import AGREEMENT, BY_NAME, HASHING, LAUNCH, Check

NO_TRIAL, STARTING, READY, BROKEN, ENDING = "none", "starting", "ready", "broken", "ending"


@dataclass(frozen=True, slots=True)
class CheckState:
    """One check as recorded."""

    position: int
    name: str
    engine: str
    status: str
    began_at: datetime | None = None

    @property
    def kind(self) -> Check:
        """What it asks."""
        return BY_NAME[self.name]

    @property
    def is_over(self) -> bool:
        """Whether it has an outcome."""
        return self.status in states.CHECK.final


@dataclass(frozen=True, slots=True)
class Trial:
    """The deployment that an engine is tried in."""

    state: str = NO_TRIAL
    engine: str = ""
    why: str = ""
    """What it waits for, or what broke it."""
    since: datetime | None = None
    """When it was asked for."""
    start_seconds: float | None = None
    """What its replica took to become ready."""
    launch_seconds: float = 0.0
    """What a launch of it may take."""


@dataclass(frozen=True, slots=True)
class ValidationView:
    """A validation and all that its next step depends on."""

    status: str
    checks: tuple[CheckState, ...]
    trial: Trial = Trial()
    is_first: bool = True
    """No older validation of the same model runs."""
    runs_here: bool = False
    """The check that has begun runs in this controller."""


@dataclass(frozen=True, slots=True)
class Move:
    """An event of the validation's lifecycle."""

    event: str
    why: str


@dataclass(frozen=True, slots=True)
class MakeTrial:
    """Ask for a deployment that an engine is tried in: with it the check of its launch begins."""

    position: int
    engine: str


@dataclass(frozen=True, slots=True)
class EndTrial:
    """Delete that deployment."""


@dataclass(frozen=True, slots=True)
class Judge:
    """Run a check that asks no engine."""

    position: int


@dataclass(frozen=True, slots=True)
class Run:
    """Begin a check that asks the engine."""

    position: int


@dataclass(frozen=True, slots=True)
class Record:
    """Write down what a check found."""

    position: int
    finding: Finding


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do now."""

    why: str


Action = Move | MakeTrial | EndTrial | Judge | Run | Record | Wait


def decide(view: ValidationView, now: datetime) -> Action | None:
    """Return what to do now; `None` where there is nothing left to do."""
    if view.status in states.VALIDATION.final:
        return _clear_away(view)
    if view.status == states.QUEUED:
        started = Move("start", f"{len(view.checks)} checks")
        return started if view.is_first else Wait("another validation of this model runs")
    check = next((one for one in view.checks if not one.is_over), None)
    if check is None:
        return _clear_away(view) or Move(*verdict(view.checks))
    return _next_of(check, view, now)


def _next_of(check: CheckState, view: ValidationView, now: datetime) -> Action:
    missing = _missing(check, view.checks)
    if missing:
        return Record(check.position, Finding(states.SKIPPED, why=missing))
    if check.kind.of_model or check.name == HASHING:
        return _clear_away(view) or Judge(check.position)
    return _launch(check, view, now) if check.name == LAUNCH else _ask(check, view, now)


def verdict(checks: Sequence[CheckState]) -> tuple[str, str]:
    """The event that ends a validation, and why: one failed check is a no."""
    failed = [one for one in checks if one.status == states.FAILED and not one.kind.informs]
    if failed:
        return "fail", f"failed: {', '.join(map(_title, failed))}"
    if not any(one.name == LAUNCH and one.status == states.PASSED for one in checks):
        return "fail", "no engine was tried"
    skipped = [one for one in checks if one.status == states.SKIPPED]
    told = f"; not told: {', '.join(map(_title, skipped))}" if skipped else ""
    return "pass", f"{len(checks) - len(skipped)} of {len(checks)} checks passed{told}"


def _missing(check: CheckState, checks: Sequence[CheckState]) -> str:
    """Why a check cannot run; empty where it can."""
    for name in check.kind.after:
        needed = [one for one in checks if one.name == name and check.engine in ("", one.engine)]
        passed = [one for one in needed if one.status == states.PASSED]
        least = 2 if check.name == AGREEMENT else 1
        if len(passed) < least:
            title = BY_NAME[name].title.lower()
            return f"not run: {title} has not passed{' on two engines' if least > 1 else ''}"
    return ""


def _launch(check: CheckState, view: ValidationView, now: datetime) -> Action:
    trial = view.trial
    if trial.state == ENDING or (trial.state != NO_TRIAL and trial.engine != check.engine):
        return _clear_away(view) or Wait("")
    if trial.state == NO_TRIAL:
        return MakeTrial(check.position, check.engine)
    if trial.state == READY:
        took = f"{trial.start_seconds:.1f} s" if trial.start_seconds is not None else ""
        return Record(check.position, Finding(states.PASSED, took, why="its replica is ready"))
    if trial.state == BROKEN:
        return Record(check.position, Finding(states.FAILED, why=trial.why))
    most_seconds = _most_seconds(check, trial)
    if trial.since is not None and now - trial.since > timedelta(seconds=most_seconds):
        late = f"not ready after {most_seconds:.0f} s: {trial.why}"
        return Record(check.position, Finding(states.FAILED, why=late))
    return Wait(trial.why or "its replica starts")


def _ask(check: CheckState, view: ValidationView, now: datetime) -> Action:
    begun = check.status == states.CHECKING
    most_seconds = _most_seconds(check, view.trial)
    if begun and check.began_at is not None and now - check.began_at > timedelta(seconds=most_seconds):
        late = f"it took longer than {most_seconds:.0f} s"
        return Record(check.position, Finding(states.FAILED, why=late))
    if begun and view.runs_here:
        return Wait(f"{check.kind.title} runs on {check.engine}")
    if view.trial.state in (NO_TRIAL, BROKEN, ENDING) or view.trial.engine != check.engine:
        why = f"its replica is gone: {view.trial.why or 'somebody ended it'}"
        return Record(check.position, Finding(states.FAILED, why=why))
    if view.trial.state == STARTING:
        return Wait(view.trial.why or "its replica starts again")
    return Run(check.position)


def _most_seconds(check: CheckState, trial: Trial) -> float:
    """How long a check may take: more, where its launches may take longer than is usual."""
    longer = max(0.0, trial.launch_seconds - BY_NAME[LAUNCH].seconds)
    return check.kind.seconds + check.kind.launches * longer


def _clear_away(view: ValidationView) -> Action | None:
    """End the trial, and wait until nothing of it is left."""
    if view.trial.state == NO_TRIAL:
        return None
    if view.trial.state == ENDING:
        return Wait(f"what {view.trial.engine} was tried in ends")
    return EndTrial()


def _title(check: CheckState) -> str:
    return f"{check.kind.title.lower()} on {check.engine}" if check.engine else check.kind.title.lower()
