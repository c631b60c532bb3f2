"""Passive mark-down: a replica that could not be reached is left alone for a while.

A refused connection marks at once; answers that merely look ill (a 5xx, a time-out) have to
repeat. After the pause one real request may try (half open): it either clears the mark or doubles
the pause. A 4xx is the caller's fault and never counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 15.0
SOFT_FAILURES_TO_MARK = 3


@dataclass(frozen=True, slots=True)
class Mark:
    """What a gateway remembers of one replica's failures. Times are monotonic seconds."""

    hard_failures: int = 0
    """Consecutive failures that each led to a pause."""
    soft_failures: int = 0
    """Consecutive ill answers that have not led to one yet."""
    until_seconds: float = 0.0
    """Not to be tried before; 0 when nothing is held against the replica."""
    failed_at_seconds: float = 0.0
    probing: bool = False
    """One request is trying whether the replica is back."""


CLEAR = Mark()


def is_open(mark: Mark, now: float) -> bool:
    """Whether the replica may be tried: no mark, or its pause is over and nobody is trying."""
    return mark.until_seconds == 0.0 or (now >= mark.until_seconds and not mark.probing)


def note_attempt(mark: Mark, now: float) -> Mark:
    """A request is about to be sent: after a pause it is the probe, and others stay away."""
    if mark.until_seconds and now >= mark.until_seconds:
        return replace(mark, probing=True)
    return mark


def note_unreachable(mark: Mark, now: float) -> Mark:
    """Connecting failed, or the connection died before a byte of the answer."""
    failures = mark.hard_failures + 1
    pause = min(FIRST_PAUSE_SECONDS * 2 ** min(failures - 1, 10), LONGEST_PAUSE_SECONDS)
    return Mark(hard_failures=failures, until_seconds=now + pause, failed_at_seconds=now)


def note_ill(mark: Mark, now: float) -> Mark:
    """A 5xx or a time-out before the first byte: marks when it repeats, at once for a probe."""
    soft = mark.soft_failures + 1
    if mark.probing or soft >= SOFT_FAILURES_TO_MARK:
        return note_unreachable(mark, now)
    return replace(mark, soft_failures=soft, failed_at_seconds=now)


def note_abandoned(mark: Mark) -> Mark:
    """The probe ended without a verdict (its client left): the next request may try."""
    return replace(mark, probing=False) if mark.probing else mark
