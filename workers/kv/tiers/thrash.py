"""Thrash damping: when what was swapped in is pushed out again, nothing is swapped for a while. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ThrashRules:
    """When swapping stops, and when it goes on."""

    window_seconds: float = 10.0
    """A block that leaves so soon after it came in came in vain."""
    start_ratio: float = 0.5
    """Beyond this part of what came in within the window, swapping stops."""
    stop_ratio: float = 0.2
    """Below it swapping may go on: lower than where it stops, so that it does not flutter."""
    fewest_blocks: int = 64
    """Fewer that came in say nothing."""
    rest_seconds: float = 10.0
    """Swapping stops for at least so long; twice as long each time that it stops again at once."""
    longest_rest_seconds: float = 160.0


@dataclass(frozen=True, slots=True)
class SwapWindow:
    """What happened within the window."""

    came_in: int
    left_again: int
    """Of those that left within the window, how many had come in less than a window before."""

    @property
    def vain_ratio(self) -> float:
        """Part of what came in that came in vain, 0-1."""
        return min(1.0, self.left_again / self.came_in) if self.came_in else 0.0


@dataclass(frozen=True, slots=True)
class ThrashState:
    """Whether swapping has stopped, since when and why."""

    reason: str = ""
    """Empty while swapping goes on."""
    since_seconds: float = 0.0
    rest_seconds: float = 0.0
    """How long the last stop was to last at least."""
    ended_at_seconds: float = float("-inf")
    starts: int = 0

    @property
    def active(self) -> bool:
        """Whether nothing is swapped now."""
        return bool(self.reason)


def judge_thrash(state: ThrashState, window: SwapWindow, rules: ThrashRules, *, now: float) -> ThrashState:
    """Return the state that follows."""
    if state.active:
        rested = now - state.since_seconds >= state.rest_seconds
        if rested and window.vain_ratio <= rules.stop_ratio:
            return replace(state, reason="", ended_at_seconds=now)
        return state
    if window.came_in < rules.fewest_blocks or window.vain_ratio <= rules.start_ratio:
        return state
    again = now - state.ended_at_seconds <= max(state.rest_seconds, rules.window_seconds)
    rest = min(2 * state.rest_seconds, rules.longest_rest_seconds) if again else rules.rest_seconds
    reason = (
        f"{window.vain_ratio:.0%} of {window.came_in} blocks that were swapped in within "
        f"{rules.window_seconds:g} s had to leave again: requests queue instead for at least {rest:g} s"
    )
    return replace(state, reason=reason, since_seconds=now, rest_seconds=rest, starts=state.starts + 1)
