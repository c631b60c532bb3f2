"""Rows of minutes become lines over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol

from exaserve_ops.telemetry.domain.node_minutes import CARD_MEASURES, PLAIN_MEASURES, Gathered, Measure


class MinuteRow(Protocol):
    """One stored minute: beside these, an attribute for each measure."""

    @property
    def minute(self) -> datetime:
        """When it began."""
        ...

    @property
    def card_ordinals(self) -> Sequence[int]:
        """Which cards its lists are of."""
        ...


@dataclass(frozen=True, slots=True)
class Line:
    """One measure over time; `None` is a gap, never a zero."""

    measure: Measure
    accelerator: int | None
    """Ordinal of the card; `None`: of the machine, or of its replicas."""
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class NodeHistory:
    """Lines over the same moments."""

    at: tuple[datetime, ...]
    """Where each step begins."""
    step: timedelta
    lines: tuple[Line, ...]
    """Without what nobody told in this time."""


def draw_history(
    rows: Iterable[MinuteRow], *, since: datetime, until: datetime, step: timedelta
) -> NodeHistory:
    """Lines from `since` to `until`, one point a step; a step without a row is a gap."""
    first = since.replace(second=0, microsecond=0)
    count = max(0, -int((first - until) // step))
    gathered: dict[tuple[str, int | None], dict[int, Gathered]] = {}
    for row in rows:
        place = (row.minute - first) // step
        if 0 <= place < count:
            _gather(row, place, gathered)
    lines = [
        Line(measure, accelerator, _settle(gathered[measure.name, accelerator], measure, count))
        for measure in (*PLAIN_MEASURES, *CARD_MEASURES)
        for name, accelerator in sorted(gathered, key=lambda key: (key[0], key[1] or 0))
        if name == measure.name
    ]
    return NodeHistory(tuple(first + step * place for place in range(count)), step, tuple(lines))


def _gather(row: MinuteRow, place: int, into: dict[tuple[str, int | None], dict[int, Gathered]]) -> None:
    def add(name: str, accelerator: int | None, value: float | None) -> None:
        if value is not None:
            into.setdefault((name, accelerator), {}).setdefault(place, Gathered()).add(value)

    for measure in PLAIN_MEASURES:
        add(measure.name, None, getattr(row, measure.name))
    for measure in CARD_MEASURES:
        for ordinal, value in zip(row.card_ordinals, getattr(row, measure.name) or (), strict=False):
            add(measure.name, ordinal, value)


def _settle(steps: Mapping[int, Gathered], measure: Measure, count: int) -> tuple[float | None, ...]:
    return tuple(steps[place].settle(measure.kind) if place in steps else None for place in range(count))
