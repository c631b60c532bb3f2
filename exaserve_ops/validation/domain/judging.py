"""What answers mean: same or not, from where on, and by how little. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from exaserve_ops.validation.domain.asking import Answer

NEAR_TIE_NATS = 0.125
"""Two tokens no further apart than this in log-probability are a tie that rounding decides.

A bfloat16 has 8 significant bits: logits between 16 and 32 are that far from their neighbours, those
between 8 and 16 half as far.
"""
KNEE_RATIO = 0.95
"""So much of the best throughput is as good as the best: beyond it only waiting grows."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two answers to one prompt part."""

    prompt: int
    place: int
    """Of the first token that differs."""
    tokens: tuple[int | None, int | None]
    """`None`: one answer had ended."""
    gap_nats: float | None
    """Between both in log-probability; `None`: no engine told."""

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding alone explains it."""
        return self.gap_nats is not None and self.gap_nats <= NEAR_TIE_NATS


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Place of the first token that differs, or that only one of them has; `None` where they are the same."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def find_divergences(
    one: Sequence[Sequence[int]],
    other: Sequence[Sequence[int]],
    alternatives: Sequence[Sequence[Mapping[int, float]]] = (),
) -> tuple[Divergence, ...]:
    """Compare answers prompt by prompt; `alternatives` are of one engine, by prompt and place."""
    found = []
    for prompt, (a, b) in enumerate(zip(one, other, strict=True)):
        place = first_difference(a, b)
        if place is None:
            continue
        tokens = (a[place] if place < len(a) else None, b[place] if place < len(b) else None)
        told = alternatives[prompt] if prompt < len(alternatives) else ()
        found.append(
            Divergence(prompt, place, tokens, _gap(tokens, told[place] if place < len(told) else {}))
        )
    return tuple(found)


def _gap(tokens: tuple[int | None, int | None], told: Mapping[int, float]) -> float | None:
    values = [told.get(token) for token in tokens if token is not None]
    if len(values) != len(tokens) or any(value is None for value in values):
        return None
    first, second = (value for value in values if value is not None)
    return abs(first - second)


def quantile(values: Sequence[float], rank: float) -> float | None:
    """Nearest-rank quantile; `None` of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(rank * len(ordered)) - 1)] if ordered else None


@dataclass(frozen=True, slots=True)
class Level:
    """What so many requests at once brought."""

    at_once: int
    tokens_per_second: float
    ttft_p50_seconds: float | None
    ttft_p95_seconds: float | None
    itl_seconds: float | None
    spread_ratio: float = 0.0
    """By how much rounds lie off this, as a share of it."""


def why_unanswered(answers: Sequence[Answer]) -> str:
    """Why one of them is no answer; empty where all are."""
    for number, answer in enumerate(answers, 1):
        if not answer.is_good:
            status = f"status {answer.status}" if answer.status else "no answer"
            return (
                f"request {number} of {len(answers)}: {status}{f', {answer.error}' if answer.error else ''}"
            )
    return ""


def measure_level(at_once: int, answers: Sequence[Answer], *, answer_tokens: int) -> Level:
    """What so many requests at once brought. `answer_tokens`: of an answer whose tokens are not told."""
    ttft = [a.ttft_seconds for a in answers if a.ttft_seconds is not None]
    itl = [a.itl_seconds for a in answers if a.itl_seconds is not None]
    tokens = sum(len(a.token_ids) or answer_tokens for a in answers)
    # Little's law: so many at once, each for so long.
    busy = sum(a.seconds for a in answers) / at_once
    rate = tokens / busy if busy > 0 else 0.0
    return Level(at_once, rate, quantile(ttft, 0.5), quantile(ttft, 0.95), quantile(itl, 0.5))


def middle_of(levels: Sequence[Level]) -> Level:
    """The middle of some rounds with as many requests at once, figure by figure; of at least one."""
    rates = [level.tokens_per_second for level in levels]
    middle = median(rates)
    return Level(
        levels[0].at_once,
        middle,
        _median([level.ttft_p50_seconds for level in levels]),
        _median([level.ttft_p95_seconds for level in levels]),
        _median([level.itl_seconds for level in levels]),
        (max(rates) - min(rates)) / 2 / middle if middle else 0.0,
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def find_knee(levels: Sequence[Level]) -> Level | None:
    """The fewest requests at once that bring nearly the most tokens a second; `None` of no levels."""
    best = max((level.tokens_per_second for level in levels), default=0.0)
    good = [level for level in levels if level.tokens_per_second >= KNEE_RATIO * best]
    return min(good, key=lambda level: level.at_once, default=None)
