"""The course of a conversation, ready for its page. Pure: kept turns in, rows and bars out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from exaserve_ops.sessions.domain.timeline import Stay, TurnMark

BAR_WIDTH = 10
STRIP_HEIGHT = 64
_LEAST_BAR = 2.0
_LEAST_TURNS = 20
"""The strip is as wide as for so many, so that the bars of a few are no blocks."""
SERIES = 6
"""Colours there are; more replicas than that begin again, and are told apart by their names."""


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One turn, with its bar in the strip."""

    at: datetime
    turn: TurnMark
    replica_name: str
    """Empty for one that is no longer on record."""
    series: int
    x: int
    y: float
    height: float
    """Of 64; the tallest bar is the longest TTFT that is shown."""
    known: bool
    """Whether there is a TTFT: a bar of the least height else, hatched."""
    broke_off: str
    """Names of replicas that broke off in the middle of it; empty where none did."""


@dataclass(frozen=True, slots=True)
class StayRow:
    """Turns in a row at one replica, with its part of the strip."""

    stay: Stay
    first: datetime
    last: datetime
    replica_name: str
    series: int


@dataclass(frozen=True, slots=True)
class Course:
    """A conversation's kept turns, oldest first, and its stays, newest first."""

    turns: tuple[TurnRow, ...]
    stays: tuple[StayRow, ...]
    width: int
    longest_ttft_seconds: float | None

    @property
    def newest_first(self) -> tuple[TurnRow, ...]:
        """For the table."""
        return self.turns[::-1]


def describe_course(turns: Sequence[TurnMark], stays: Sequence[Stay], names: Mapping[str, str]) -> Course:
    """Lay the turns out as bars of TTFT, coloured by replica in order of appearance."""
    order: dict[str, int] = {}
    for replica_id in (*(s.replica_id for s in stays), *(t.replica_id for t in turns)):
        if replica_id:
            order.setdefault(replica_id, len(order) % SERIES + 1)
    longest = max((t.ttft_seconds for t in turns if t.ttft_seconds is not None), default=None)
    rows = tuple(_turn_row(i, turn, longest, names, order) for i, turn in enumerate(turns))
    stay_rows = tuple(
        StayRow(
            stay,
            datetime.fromtimestamp(stay.first_seconds, tz=UTC),
            datetime.fromtimestamp(stay.last_seconds, tz=UTC),
            names.get(stay.replica_id, ""),
            order.get(stay.replica_id, 0),
        )
        for stay in reversed(stays)
    )
    return Course(rows, stay_rows, max(_LEAST_TURNS, len(turns)) * BAR_WIDTH, longest)


def _turn_row(
    index: int, turn: TurnMark, longest: float | None, names: Mapping[str, str], order: Mapping[str, int]
) -> TurnRow:
    ratio = turn.ttft_seconds / longest if turn.ttft_seconds is not None and longest else 0.0
    height = max(_LEAST_BAR, ratio * STRIP_HEIGHT)
    return TurnRow(
        at=datetime.fromtimestamp(turn.at_seconds, tz=UTC),
        turn=turn,
        replica_name=names.get(turn.replica_id, ""),
        series=order.get(turn.replica_id, 0),
        x=index * BAR_WIDTH,
        y=STRIP_HEIGHT - height,
        height=height,
        known=turn.ttft_seconds is not None,
        broke_off=", ".join(names.get(replica_id, "one that is gone") for replica_id in turn.continued_from),
    )
