"""What a replica's port has said so far: a pure step from one probe's outcome to the next state."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from workers.agent.facts import Probe
from workers.agent.progress import Progress, look
from workers.engines.base import EngineSample

FAILURES_TO_LEAVE_READY = 3
DENIALS_TO_BE_DEAD = 10
"""A closed port is dead at once; an engine that says that it is not ready may recover."""
_KEPT_IDLE_TIMES = 4


class Answer(enum.Enum):
    """How one request to the health path went."""

    CLOSED = "connection refused"
    FOREIGN = "the port is answered by a process that is not this replica's"
    NOT_READY = "the engine says that it is not ready"
    READY = "ready"
    ASLEEP = "asleep, and its metrics are answered"
    """Health is not asked for: some engines compute a token for it."""
    TIMEOUT = "no answer in time"
    BROKEN = "connection broken"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One probe: the answer, and the metrics read after a good or a late one."""

    answer: Answer
    detail: str = ""
    sample: EngineSample | None = None
    note: str = ""
    asked_at_seconds: float | None = None
    """When a good health was asked for."""


@dataclass(frozen=True, slots=True)
class ProbeState:
    """All that is kept of an attempt's probes. Times are monotonic seconds."""

    probe: Probe = Probe.CLOSED
    reason: str = ""
    ready_at_seconds: float | None = None
    failures: int = 0
    note: str = ""
    """What was odd about the last probe."""
    samples: tuple[tuple[float, EngineSample], ...] = ()
    """Oldest first; reaches back one window and one sample more."""
    idle_times_seconds: tuple[float, ...] = ()
    """When the last scrapes in a row that saw no open request were made."""
    progress: Progress = field(default_factory=Progress)
    """Whether it moves; looked at once it is ready."""
    healthy_at_seconds: float | None = None
    """When the health that was good last had been asked for."""

    @property
    def active_requests(self) -> int | None:
        """Requests running and waiting as last seen; `None` if the engine did not say."""
        return None if not self.samples else active_requests(self.samples[-1][1])


def active_requests(sample: EngineSample) -> int | None:
    """Requests running and waiting; `None` if the engine did not say how many run."""
    if sample.requests_running is None:
        return None
    return sample.requests_running + (sample.requests_waiting or 0)


def advance(state: ProbeState, outcome: Outcome, *, now: float, window_seconds: float) -> ProbeState:
    """Take in one probe. Before the first success any failure only says that it still starts.

    After it, three failures in a row are needed, and a timeout is none: a busy engine answers late.
    """
    if outcome.answer in (Answer.READY, Answer.ASLEEP):
        state = _after_success(state, outcome, now, window_seconds)
        return replace(state, progress=look(state.progress, now=now, answered=True, sample=outcome.sample))
    text = f"health: {outcome.answer.value}" + (f" ({outcome.detail})" if outcome.detail else "")
    if state.ready_at_seconds is None:
        return replace(state, probe=_starting(outcome.answer), reason=text, note="")
    answered = outcome.answer is not Answer.TIMEOUT or outcome.sample is not None
    state = replace(state, progress=look(state.progress, now=now, answered=answered, sample=outcome.sample))
    if outcome.answer is Answer.TIMEOUT:
        return replace(state, note="busy: health answered late", idle_times_seconds=())
    failures = state.failures + 1
    state = replace(state, failures=failures, note=text, idle_times_seconds=())
    if failures < FAILURES_TO_LEAVE_READY:
        return state
    gone = outcome.answer in (Answer.CLOSED, Answer.FOREIGN) or failures >= DENIALS_TO_BE_DEAD
    probe = Probe.DEAD if gone else Probe.UNREACHABLE
    return replace(state, probe=probe, reason=f"{text}, {failures} times in a row")


def _starting(answer: Answer) -> Probe:
    return Probe.LOADING if answer in (Answer.NOT_READY, Answer.TIMEOUT) else Probe.CLOSED


def _after_success(state: ProbeState, outcome: Outcome, now: float, window_seconds: float) -> ProbeState:
    samples, idle = state.samples, state.idle_times_seconds
    if outcome.sample is not None:
        samples = _within_window((*samples, (now, outcome.sample)), now - window_seconds)
        idle = (*idle, now)[-_KEPT_IDLE_TIMES:] if active_requests(outcome.sample) == 0 else ()
    return replace(
        state,
        probe=Probe.READY,
        reason="",
        ready_at_seconds=now if state.ready_at_seconds is None else state.ready_at_seconds,
        failures=0,
        note=outcome.note,
        samples=samples,
        idle_times_seconds=idle,
        healthy_at_seconds=outcome.asked_at_seconds or state.healthy_at_seconds,
    )


def _within_window(
    samples: tuple[tuple[float, EngineSample], ...], oldest: float
) -> tuple[tuple[float, EngineSample], ...]:
    """Drop what is older than the window, but keep one sample from before it to count from."""
    while len(samples) > 2 and samples[1][0] <= oldest:  # noqa: PLR2004 - two make a difference
        samples = samples[1:]
    return samples
