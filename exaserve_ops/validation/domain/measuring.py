"""One load, measured one way: of the concurrency ramp and of the search for settings. Without I/O."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from exaserve_ops.validation.domain.asking import Answer, Ask, AskAll, Need, Subject
from exaserve_ops.validation.domain.judging import Level, measure_level, why_unanswered
from exaserve_ops.validation.domain.prompts import LOAD_ANSWER_TOKENS, draw_tokens, load_prompt_tokens

ROUNDS = 3
_LEAST_REQUESTS = 4


@dataclass(frozen=True, slots=True)
class UnderLoad:
    """What so many requests at once brought, round by round; or why they were not all answered."""

    levels: tuple[Level, ...] = ()
    why: str = ""


def measure(subject: Subject, label: str, at_once: int) -> Generator[Need, Any, UnderLoad]:
    """Ask so many at once until nothing is new to the engine, which is not counted, and then in rounds.

    No two rounds share a prompt, nor do two labels: none of it is in a cache.
    """
    warm: Sequence[Answer] = yield AskAll(_asks(subject, f"{label}, warm-up", at_once), at_once)
    if why := why_unanswered(warm):
        return UnderLoad(why=why)
    levels = []
    for number in range(ROUNDS):
        asks = _asks(subject, f"{label}, round {number}", max(_LEAST_REQUESTS, 2 * at_once))
        answers: Sequence[Answer] = yield AskAll(asks, at_once)
        if why := why_unanswered(answers):
            return UnderLoad(why=why)
        levels.append(measure_level(at_once, answers, answer_tokens=LOAD_ANSWER_TOKENS))
    return UnderLoad(tuple(levels))


def _asks(subject: Subject, label: str, count: int) -> tuple[Ask, ...]:
    length = load_prompt_tokens(subject.context_tokens)
    return tuple(
        Ask(
            draw_tokens(f"{label} {number}", length, vocabulary=subject.vocabulary, seed=subject.seed),
            max_tokens=LOAD_ANSWER_TOKENS,
            ignores_end=True,
        )
        for number in range(count)
    )
