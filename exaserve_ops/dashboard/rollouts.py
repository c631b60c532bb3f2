"""A rollout as its page shows it: waves of node cells that fill up, and what may be done now. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from exaserve_ops.dashboard.figures import Figure
from exaserve_ops.rollouts.domain.gates import Answers
from exaserve_ops.rollouts.domain.lifecycle import ROLLOUT
from exaserve_ops.rollouts.domain.spread_of_values import Buckets, quantile_seconds, upper_seconds

OLD, UNDER_WAY, NEW, FAILED, BACK = "old", "under way", "new", "failed", "back"
_CELL_HEIGHT = 20
_P95 = 0.95


@dataclass(frozen=True, slots=True)
class Seat:
    """A member of a wave, and how far it is."""

    node_name: str
    state: str


@dataclass(frozen=True, slots=True)
class Cell:
    """One node of a wave: how many of its replicas there run the new release."""

    node_name: str
    done: int
    total: int
    state: str
    """What colours it: the worst that any of its replicas is."""

    @property
    def height(self) -> int:
        """Of the part that is filled, of 20."""
        return _CELL_HEIGHT * self.done // max(1, self.total)

    @property
    def top(self) -> int:
        """Where the filled part begins."""
        return _CELL_HEIGHT - self.height

    @property
    def words(self) -> str:
        """The same in words."""
        return f"{self.node_name}: {self.done} of {self.total} on the new release ({self.state})"


_WORST_FIRST = (FAILED, UNDER_WAY, BACK, OLD, NEW)


def cells_of(seats: Iterable[Seat]) -> tuple[Cell, ...]:
    """The nodes of a wave, by name."""
    by_node: defaultdict[str, list[str]] = defaultdict(list)
    for seat in seats:
        by_node[seat.node_name].append(seat.state)
    return tuple(
        Cell(
            name or "no node yet",
            sum(state == NEW for state in states),
            len(states),
            next(state for state in _WORST_FIRST if state in states),
        )
        for name, states in sorted(by_node.items())
    )


def state_of_member(*, is_kept: bool, rolls: bool, successor: str, successor_kept: bool) -> str:
    """How far a member is; `successor`: status of the replica that took its place, if there is one."""
    if successor == "failed":
        return FAILED
    if successor and not successor_kept:
        return OLD if is_kept else BACK
    if successor == "ready" and not is_kept:
        return NEW
    return UNDER_WAY if rolls or successor or not is_kept else OLD


@dataclass(frozen=True, slots=True)
class Button:
    """Something that may be done with a rollout now."""

    act: str
    word: str
    subject: str
    plan: str
    permission: str = "rollouts.change_rollout"
    danger: bool = False


_BUTTONS = (
    Button(
        "approve",
        "Approve",
        "this rollout",
        "It begins at once with its first wave. Not for who asked for it.",
        permission="rollouts.approve_rollout",
    ),
    Button("cancel", "Take back", "this rollout", "Nothing has begun; nothing will."),
    Button("resume", "Go on with", "this rollout", "The wave whose turn it is goes on, its deadlines anew."),
    Button("pause", "Pause", "this rollout", "Nothing more begins. Both releases serve on."),
    Button(
        "roll_back",
        "Roll back",
        "this rollout",
        "Replicas of the new release make way for the old one, one failure domain after the other.",
        danger=True,
    ),
)


def buttons_of(status: str, permissions: Collection[str]) -> tuple[Button, ...]:
    """What may be done in this status by somebody with these permissions."""
    return tuple(b for b in _BUTTONS if ROLLOUT.allows(status, b.act) and b.permission in permissions)


@dataclass(frozen=True, slots=True)
class Told:
    """What one release answered, for the page."""

    name: str
    requests: int
    failed: int
    ttft_p95_seconds: float | None
    itl_p95_seconds: float | None


def told_of(name: str, answers: Answers) -> Told:
    """Sum up what a release answered."""
    return Told(
        name,
        answers.requests,
        answers.failed,
        quantile_seconds(answers.all_ttft, _P95),
        quantile_seconds(answers.itl, _P95),
    )


def ttft_figure(by_release: Mapping[str, Buckets]) -> Figure:
    """Distributions of the time to first token, as shares of each release's answers."""
    data = []
    for colour, (name, buckets) in enumerate(by_release.items()):
        total = sum(buckets.values())
        if not total:
            continue
        spans = range(min(buckets), max(buckets) + 1)
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "x": [round(upper_seconds(bucket), 5) for bucket in spans],
                "y": [buckets.get(bucket, 0) / total for bucket in spans],
                "fill": "tozeroy",
                "line": {"width": 1.5, "shape": "hvh"},
                "hovertemplate": "%{y:.1%} up to %{x:.3f} s<extra>%{fullData.name}</extra>",
                "meta": {"colour": colour},
            }
        )
    layout = {
        "showlegend": True,
        "legend": {"orientation": "h", "y": 1.12},
        "xaxis": {"type": "log", "ticksuffix": " s"},
        "yaxis": {"tickformat": ".0%", "rangemode": "tozero", "nticks": 4},
    }
    return {"data": data, "layout": layout}
