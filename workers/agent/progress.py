"""Whether an engine moves: judged by its counters, not by whether it answers. Pure.

A hung engine may answer `/health` for hours, and a saturated one may not answer for minutes while
tokens stream. So time is counted while requests run and no counter advances, or while nothing at
all is answered; and only as far as somebody looked: an agent that stood still itself saw nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from workers.engines.base import EngineSample

LONGEST_GAP_SECONDS = 20.0
"""Looks that are further apart prove nothing about the time between them."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known of one attempt's advance. Times are monotonic seconds."""

    looked_at_seconds: float | None = None
    moved_at_seconds: float | None = None
    """When it last advanced, or had nothing to do."""
    answered_at_seconds: float | None = None
    requests_running: int = 0
    counters: tuple[float | None, ...] = ()
    has_generated: bool = False

    @property
    def still_seconds(self) -> float:
        """For how long nothing has moved, or nothing was answered: whichever is longer."""
        return max(self._unmoved_seconds, self._since(self.answered_at_seconds))

    @property
    def still_text(self) -> str:
        """What stood still, in words."""
        if self._since(self.answered_at_seconds) > self._unmoved_seconds:
            return "neither health nor metrics answered"
        count = self.requests_running
        return f"{count} {'request runs' if count == 1 else 'requests run'} and no token came"

    @property
    def _unmoved_seconds(self) -> float:
        return self._since(self.moved_at_seconds) if self.requests_running else 0.0

    def _since(self, at: float | None) -> float:
        if at is None or self.looked_at_seconds is None:
            return 0.0
        return max(0.0, self.looked_at_seconds - at)


def look(progress: Progress, *, now: float, answered: bool, sample: EngineSample | None) -> Progress:
    """Take in one look. Without a sample, what ran at the last one is taken to run still."""
    last = progress.looked_at_seconds
    if last is None or now - last > LONGEST_GAP_SECONDS:
        progress = replace(progress, moved_at_seconds=now, answered_at_seconds=now)
    if answered:
        progress = replace(progress, answered_at_seconds=now)
    progress = replace(progress, looked_at_seconds=now)
    return progress if sample is None else _take_in(progress, sample, now)


def _take_in(progress: Progress, sample: EngineSample, now: float) -> Progress:
    counters = (sample.generation_tokens, sample.prompt_tokens, sample.requests_finished)
    running = sample.requests_running or 0
    # An engine that counts nothing, or does not say what runs, cannot be told to stand still.
    blind = all(value is None for value in counters) or sample.requests_running is None
    moved = blind or running == 0 or counters != progress.counters
    return replace(
        progress,
        moved_at_seconds=now if moved else progress.moved_at_seconds,
        answered_at_seconds=now,
        requests_running=running,
        counters=counters,
        has_generated=progress.has_generated or bool(sample.generation_tokens or sample.requests_finished),
    )
