"""What is kept of a conversation's course: its latest turns, and its stays at replicas. Pure, bounded."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

LATEST_TURNS = 40
LATEST_STAYS = 20
TELLING_TOKENS = 128
"""A turn that computes fewer says more of all else than of computing."""
TELLING_TURNS = 5


class TurnMark(NamedTuple):
    """One turn, as it is kept. Times in Unix seconds; `None` is what the engine did not say."""

    at_seconds: float
    duration_seconds: float
    ttft_seconds: float | None
    replica_id: str
    why: str
    outcome: str
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    attempts: int = 1
    continued_from: tuple[str, ...] = ()
    """Replicas that broke off in the middle of the answer, in order; the turn's own one gave the rest."""


class Stay(NamedTuple):
    """Turns in a row at one replica."""

    replica_id: str
    node_name: str
    first_seconds: float
    last_seconds: float
    turns: int
    why: str
    """Why its first turn went there."""


def add_turn(turns: Sequence[Sequence[Any]], turn: TurnMark) -> list[list[Any]]:
    """Append a turn; the oldest ones beyond the bound are dropped."""
    return [*(list(known) for known in turns[-(LATEST_TURNS - 1) :]), list(turn)]


def add_to_stays(stays: Sequence[Sequence[Any]], turn: TurnMark, node_name: str) -> list[list[Any]]:
    """Count a turn into the last stay, or begin a new one where it went elsewhere."""
    kept = [list(stay) for stay in stays]
    end = turn.at_seconds + turn.duration_seconds
    if kept:
        last = Stay(*kept[-1])
        if last.replica_id == turn.replica_id:
            longer = last._replace(last_seconds=max(last.last_seconds, end), turns=last.turns + 1)
            return [*kept[:-1], list(longer)]
    began = Stay(turn.replica_id, node_name, turn.at_seconds, end, 1, turn.why)
    return [*kept[-(LATEST_STAYS - 1) :], list(began)]


def read_turns(kept: Sequence[Sequence[Any]]) -> list[TurnMark]:
    """Read what `add_turn` made, oldest first."""
    marks = (TurnMark(*turn) for turn in kept)
    return [mark._replace(continued_from=tuple(mark.continued_from)) for mark in marks]


def read_stays(kept: Sequence[Sequence[Any]]) -> list[Stay]:
    """Read what `add_to_stays` made, oldest first."""
    return [Stay(*stay) for stay in kept]


def prefill_rate(turns: Sequence[TurnMark]) -> float | None:
    """Prompt tokens a second that were computed and not cached, the median of turns that say something.

    As clients saw it: what a turn waited for counts. `None` where too few turns computed much.
    """
    rates = [
        uncached / turn.ttft_seconds
        for turn in turns
        if turn.ttft_seconds and turn.prompt_tokens is not None and turn.cached_tokens is not None
        if not turn.continued_from  # whose first token is one replica's and whose cached tokens another's
        if (uncached := turn.prompt_tokens - turn.cached_tokens) >= TELLING_TOKENS
    ]
    return statistics.median(rates) if len(rates) >= TELLING_TURNS else None
