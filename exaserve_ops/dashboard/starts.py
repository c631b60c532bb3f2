"""A staged start as its panel draws it: a bar for each wave, filled as its replicas become ready. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from exaserve_ops.serving.selectors.start_outlook import StartWave

MOST_BARS = 40
BAR_WIDTH, BAR_STEP, BARS_HEIGHT = 8, 10, 56
_LEAST_HEIGHT = 2


@dataclass(frozen=True, slots=True)
class Bar:
    """A wave, or several that followed one another where there are too many to draw; measures in pixels."""

    x: int
    height: int
    ready_height: int
    first_at: datetime
    waves: int
    let_go: int
    ready: int

    @property
    def top(self) -> int:
        """Where the bar begins."""
        return BARS_HEIGHT - self.height

    @property
    def ready_top(self) -> int:
        """Where its filled part begins."""
        return BARS_HEIGHT - self.ready_height

    @property
    def words(self) -> str:
        """The same in words."""
        what = f"{self.waves} waves from" if self.waves > 1 else "wave of"
        return f"{what} {self.first_at:%H:%M:%S} UTC: {self.let_go:,} let go, {self.ready:,} ready"


def bars_of(waves: Sequence[StartWave]) -> tuple[Bar, ...]:
    """At most `MOST_BARS` bars, each of as many waves that followed one another."""
    each = -(-len(waves) // MOST_BARS) or 1
    groups = [waves[start : start + each] for start in range(0, len(waves), each)]
    most = max((sum(wave.let_go for wave in group) for group in groups), default=1)
    return tuple(_bar(number, group, most) for number, group in enumerate(groups))


def width_of(bars: Sequence[Bar]) -> int:
    """Of the whole drawing."""
    return max(1, len(bars)) * BAR_STEP


def _bar(number: int, group: Sequence[StartWave], most: int) -> Bar:
    let_go = sum(wave.let_go for wave in group)
    ready = sum(wave.ready for wave in group)
    height = max(_LEAST_HEIGHT, BARS_HEIGHT * let_go // most)
    return Bar(
        x=number * BAR_STEP,
        height=height,
        ready_height=height * ready // let_go if let_go else 0,
        first_at=group[0].at,
        waves=len(group),
        let_go=let_go,
        ready=ready,
    )
