"""How each check of an engine goes: what is asked, and what is made of the answers. Without I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from exaserve_ops.validation.domain import catalogue
from exaserve_ops.validation.domain.asking import (
    Answer,
    Ask,
    AskAll,
    Finding,
    LaunchAgain,
    Launched,
    Load,
    LookAtLoad,
    Procedure,
    Rest,
    Subject,
)
from exaserve_ops.validation.domain.judging import (
    Level,
    find_divergences,
    find_knee,
    first_difference,
    middle_of,
    quantile,
    why_unanswered,
)
from exaserve_ops.validation.domain.launching import check_sleep, check_tuning
from exaserve_ops.validation.domain.lifecycle import FAILED, PASSED, SKIPPED
from exaserve_ops.validation.domain.measuring import measure
from exaserve_ops.validation.domain.prompts import GOLDEN_TOKENS, draw_tokens, golden_prompts

MEMORY_TOLERANCE_RATIO = 0.05
ALTERNATIVES = 5
_TELLS_LOGPROBS = frozenset({"vllm", "sglang"})
_PREFIX_TOKENS = 1024
_STEPS = (0.25, 0.5, 0.75, 1.0)
_LOOKS_UNTIL_FREE = 15
_IDLE_RATIO, _IDLE_SECONDS = 3.0, 0.5
_REPLACEMENT = "\ufffd"
"""Stands in text for bytes that are no character: nothing can stop at it."""


def check_memory(subject: Subject) -> Procedure:
    """Compare what the engine reports of its KV memory with what was planned."""
    load: Load = yield LookAtLoad()
    if load.kv_total_blocks is None or load.kv_block_tokens is None:
        return Finding(SKIPPED, why="the engine does not report how many KV blocks it has")
    tokens = load.kv_total_blocks * load.kv_block_tokens
    figure = f"{tokens:,} tokens"
    if not subject.forecast_tokens:
        return Finding(
            SKIPPED, figure, why="nothing was forecast: the model's KV layout or size is not known"
        )
    low, high = subject.forecast_tokens
    nearest = min(max(tokens, low), high)
    off = tokens / nearest - 1 if nearest else 1.0
    forecast = f"{low:,} tokens" if low == high else f"{low:,} to {high:,} tokens"
    limit = f"{forecast}, {MEMORY_TOLERANCE_RATIO:.0%} more or less"
    details = {"reported_tokens": tokens, "forecast_tokens": [low, high], "off_ratio": off}
    if off > 0 and subject.may_borrow:
        why = "what was planned for it, and what others leave of its node's pool"
        return Finding(PASSED, figure, f"at least {low:,} tokens", why, details)
    if abs(off) > MEMORY_TOLERANCE_RATIO:
        why = f"it has {off:+.1%} of what was forecast: the plan of this model's memory is wrong"
        return Finding(FAILED, figure, limit, why, details)
    return Finding(PASSED, figure, limit, f"{off:+.1%} of the forecast", details)


def check_golden(subject: Subject) -> Procedure:
    """Ask each golden prompt twice alone, and once beside the others."""
    asks = golden_asks(subject)
    first: Sequence[Answer] = yield AskAll(asks)
    if why := why_unanswered(first):
        return Finding(FAILED, why=why)
    second: Sequence[Answer] = yield AskAll(asks)
    crowd: Sequence[Answer] = yield AskAll(asks, at_once=len(asks))
    if why := why_unanswered([*second, *crowd]):
        return Finding(FAILED, why=why)
    details = {
        "tokens": [list(_output(answer)) for answer in first],
        "texts": [answer.text for answer in first],
        "alternatives": [[_plain(place) for place in answer.alternatives] for answer in first],
    }
    differing = _differing(first, second)
    figure = f"{len(asks) - len(differing)} of {len(asks)} the same"
    if differing:
        why = f"prompt {differing[0] + 1} was answered in two ways by the same engine, asked alone both times"
        return Finding(FAILED, figure, "all", why, details)
    beside = _differing(first, crowd)
    lengths = [len(ask.tokens) for ask in asks]
    asked = f"prompts of {min(lengths)} to {max(lengths)} tokens, asked alone twice"
    note = (
        f"; {len(beside)} differ when asked together, where rounding depends on the batch" if beside else ""
    )
    return Finding(PASSED, figure, "all", f"{asked}{note}", details | {"differ_together": len(beside)})


def golden_asks(subject: Subject) -> tuple[Ask, ...]:
    """The golden prompts as they are asked of this engine."""
    alternatives = ALTERNATIVES if subject.engine in _TELLS_LOGPROBS else 0
    # Engines are compared by what they answer to the same prompts, so the smallest context decides.
    context = min(subject.context_tokens, subject.shared_context_tokens or subject.context_tokens)
    prompts = golden_prompts(vocabulary=subject.vocabulary, context_tokens=context, seed=subject.seed)
    return tuple(
        Ask(p, max_tokens=GOLDEN_TOKENS, ignores_end=True, alternatives=alternatives) for p in prompts
    )


def check_prefix(subject: Subject) -> Procedure:
    """Ask a long prompt twice, and see how much of it was found in cache the second time."""
    length = min(_PREFIX_TOKENS, subject.context_tokens // 2)
    prompt = draw_tokens("prefix", length, vocabulary=subject.vocabulary, seed=subject.seed)
    answers: Sequence[Answer] = yield AskAll((Ask(prompt, max_tokens=1), Ask(prompt, max_tokens=1)))
    if why := why_unanswered(answers):
        return Finding(FAILED, why=why)
    load: Load = yield LookAtLoad()
    cached = answers[1].cached_tokens
    if cached is None:
        return Finding(SKIPPED, why="the engine does not tell how many tokens it found in cache")
    block = load.kv_block_tokens or max(1, length // 2)
    # The last token is always computed, and with it the block that it is in.
    wanted = (length - 1) // block * block
    figure, limit = f"{cached} of {length} tokens", f"{wanted} in whole blocks of {block}"
    details = {"first_ttft_seconds": answers[0].ttft_seconds, "second_ttft_seconds": answers[1].ttft_seconds}
    if cached < wanted:
        return Finding(
            FAILED, figure, limit, "the second ask computed again what it should have found", details
        )
    return Finding(PASSED, figure, limit, "found in cache", details)


def check_chat(subject: Subject) -> Procedure:
    """Two turns: the second one's prompt has to begin with the first one's, else no turn is ever in cache."""
    turn: tuple[tuple[str, str], ...] = (("user", "Name a river and say where it flows."),)
    room = max(1, min(24, subject.context_tokens // 8))
    [first] = yield AskAll((Ask(messages=turn, max_tokens=room),))
    if why := why_unanswered([first]):
        return Finding(FAILED, why=why)
    longer = (*turn, ("assistant", first.text), ("user", "And another one?"))
    [second] = yield AskAll((Ask(messages=longer, max_tokens=room),))
    if why := why_unanswered([second]):
        return Finding(FAILED, why=why)
    if not first.prompt_token_ids or not second.prompt_token_ids:
        return Finding(SKIPPED, why="the engine does not tell the tokens of a chat's prompt")
    begin, whole = first.prompt_token_ids, second.prompt_token_ids
    shared = first_difference(begin, whole)
    shared = len(begin) if shared is None else shared
    figure = f"{min(shared, len(begin))} of {len(begin)} tokens"
    details = {"first_prompt_tokens": len(begin), "second_prompt_tokens": len(whole), "shared_tokens": shared}
    if shared < len(begin):
        why = f"with a second turn behind it, the first is written in another way from token {shared + 1} on"
        return Finding(FAILED, figure, "all", why, details)
    return Finding(PASSED, figure, "all", "the second turn begins with the first, token for token", details)


def check_stop(subject: Subject) -> Procedure:
    """Ask a golden prompt again with a part of its answer as stop string."""
    texts: Sequence[str] = subject.earlier.get(catalogue.GOLDEN, {}).get("texts", ())
    chosen = next(((i, s) for i, text in enumerate(texts) if (s := _stop_in(text))), None)
    if chosen is None:
        return Finding(SKIPPED, why="no golden answer has text that one could stop at")
    number, stop = chosen
    expected = texts[number][: texts[number].index(stop)]
    ask = golden_asks(subject)[number]
    [answer] = yield AskAll((Ask(ask.tokens, max_tokens=ask.max_tokens, ignores_end=True, stop=(stop,)),))
    if why := why_unanswered([answer]):
        return Finding(FAILED, why=why)
    details = {"stop": stop, "expected": expected, "answered": answer.text, "finish": answer.finish_reason}
    if answer.text != expected or answer.finish_reason != "stop":
        why = f"the answer should end before {stop!r}; it ended with {answer.text[-20:]!r}"
        return Finding(FAILED, repr(answer.finish_reason), "'stop'", why, details)
    return Finding(PASSED, f"{len(expected)} characters", "up to the stop string", "ended before it", details)


def check_context(subject: Subject) -> Procedure:
    """Longer and longer prompts up to the limit, and one beyond it."""
    curve: list[dict[str, float | None]] = []
    limit = f"{subject.context_tokens:,} tokens"
    for part in _STEPS:
        length = max(1, int(subject.context_tokens * part) - 1)
        prompt = draw_tokens(f"context {part}", length, vocabulary=subject.vocabulary, seed=subject.seed)
        [answer] = yield AskAll((Ask(prompt, max_tokens=1),))
        if why := why_unanswered([answer]):
            longest = int(curve[-1]["tokens"] or 0) if curve else 0
            told = f"a prompt of {length:,} tokens is not answered: {why}"
            return Finding(FAILED, f"{longest:,} tokens", limit, told, {"curve": curve})
        curve.append({"tokens": length + 1, "ttft_seconds": answer.ttft_seconds})
    beyond = draw_tokens(
        "beyond", subject.context_tokens + 1, vocabulary=subject.vocabulary, seed=subject.seed
    )
    [refused] = yield AskAll((Ask(beyond, max_tokens=1),))
    details = {"curve": curve, "beyond_status": refused.status}
    if not 400 <= refused.status < 500:  # noqa: PLR2004 - HTTP's own numbers
        why = f"a prompt beyond the limit is answered with status {refused.status}, and should be refused"
        return Finding(FAILED, limit, limit, why, details)
    return Finding(PASSED, limit, limit, "answered up to the limit, refused beyond", details)


def check_concurrency(subject: Subject) -> Procedure:
    """Twice as many requests at once, again and again; the knee is the number to serve with."""
    levels: list[Level] = []
    at_once = 1
    while at_once <= subject.most_at_once:
        seen = yield from measure(subject, f"ramp {at_once}", at_once)
        if seen.why:
            told = f"with {at_once} at once: {seen.why}"
            return Finding(FAILED, f"{at_once} at once", "all answered", told, {"levels": _rows(levels)})
        levels.append(middle_of(seen.levels))
        at_once *= 2
    knee = find_knee(levels)
    if knee is None:
        return Finding(SKIPPED, why="no request was to be sent at once")
    figure = f"{knee.tokens_per_second:.0f} tokens/s ± {knee.spread_ratio:.0%} with {knee.at_once} at once"
    if knee.at_once == levels[-1].at_once > 1:
        why = "the most that was tried: more at once may bring more"
    else:
        why = f"more than {knee.at_once} at once bring hardly more and wait longer: a good max_num_seqs"
    return Finding(PASSED, figure, "all answered", why, {"levels": _rows(levels), "knee": knee.at_once})


def check_idle(subject: Subject) -> Procedure:
    """Ask, rest, ask again: what sleeps must wake."""
    asks = tuple(
        Ask(draw_tokens(f"idle {n}", 16, vocabulary=subject.vocabulary, seed=subject.seed), max_tokens=1)
        for n in range(4)
    )
    before: Sequence[Answer] = yield AskAll(asks[:3])
    yield Rest(subject.idle_seconds)
    [after] = yield AskAll(asks[3:])
    if why := why_unanswered([*before, after]):
        return Finding(FAILED, why=why)
    usual = quantile([a.ttft_seconds for a in before if a.ttft_seconds is not None], 0.5)
    if usual is None or after.ttft_seconds is None:
        return Finding(SKIPPED, why="no time to first token could be taken")
    most = max(_IDLE_RATIO * usual, usual + _IDLE_SECONDS)
    figure, limit = f"{after.ttft_seconds:.3f} s", f"{most:.3f} s"
    details = {"usual_ttft_seconds": usual, "idle_seconds": subject.idle_seconds}
    if after.ttft_seconds > most:
        why = f"the first answer after {subject.idle_seconds:.0f} s of rest is slow; usual are {usual:.3f} s"
        return Finding(FAILED, figure, limit, why, details)
    return Finding(PASSED, figure, limit, f"after {subject.idle_seconds:.0f} s of rest", details)


def check_blocks(subject: Subject) -> Procedure:  # noqa: ARG001 - every check is called alike
    """Once nothing runs, no block may be held: what is, leaks."""
    load = Load()
    for _ in range(_LOOKS_UNTIL_FREE):
        load = yield LookAtLoad()
        if load.kv_used_ratio is None:
            return Finding(SKIPPED, why="the engine does not report how much of its KV memory is in use")
        if load.kv_used_ratio == 0 and not load.requests_running and not load.requests_waiting:
            return Finding(PASSED, "0%", "0%", "no block is held once nothing runs")
        yield Rest(1.0)
    running = (load.requests_running or 0) + (load.requests_waiting or 0)
    held = f"{load.kv_used_ratio:.1%}"
    why = (
        f"{running} requests run or wait though all were answered" if running else "blocks are held by nobody"
    )
    return Finding(FAILED, held, "0%", f"{why}, {_LOOKS_UNTIL_FREE} s after the last answer")


def check_again(subject: Subject) -> Procedure:
    """Another launch of the same release gives the same tokens."""
    known: Sequence[Sequence[int]] = subject.earlier.get(catalogue.GOLDEN, {}).get("tokens", ())
    launched: Launched = yield LaunchAgain()
    if not launched.done:
        return Finding(FAILED, why=f"another launch did not become ready: {launched.why}")
    answers: Sequence[Answer] = yield AskAll(golden_asks(subject))
    if why := why_unanswered(answers):
        return Finding(FAILED, why=why)
    found = find_divergences(known, [_output(answer) for answer in answers])
    figure = f"{len(answers) - len(found)} of {len(answers)} the same"
    if found:
        first = found[0]
        why = f"prompt {first.prompt + 1} differs from token {first.place + 1} on after another launch"
        return Finding(FAILED, figure, "all", why)
    return Finding(PASSED, figure, "all", "the same tokens after another launch")


PROCEDURES: Mapping[str, Callable[[Subject], Procedure]] = {
    catalogue.MEMORY: check_memory,
    catalogue.GOLDEN: check_golden,
    catalogue.PREFIX: check_prefix,
    catalogue.CHAT: check_chat,
    catalogue.STOP: check_stop,
    catalogue.CONTEXT: check_context,
    catalogue.CONCURRENCY: check_concurrency,
    catalogue.IDLE: check_idle,
    catalogue.SLEEP: check_sleep,
    catalogue.BLOCKS: check_blocks,
    catalogue.AGAIN: check_again,
    catalogue.TUNING: check_tuning,
}


def _output(answer: Answer) -> tuple[int, ...]:
    """What was answered, to be compared: its tokens, or its characters where no tokens are told."""
    return answer.token_ids or tuple(map(ord, answer.text))


def _differing(one: Sequence[Answer], other: Sequence[Answer]) -> list[int]:
    return [
        i
        for i, (a, b) in enumerate(zip(one, other, strict=True))
        if a.token_ids != b.token_ids or a.text != b.text
    ]


def _stop_in(text: str) -> str:
    """Three characters from the middle of a text, whole ones; empty where there are none."""
    for place in range(len(text) // 3, len(text) - 3):
        stop = text[place : place + 3]
        if _REPLACEMENT not in text[: place + 3] and stop.strip():
            return stop
    return ""


def _rows(levels: Sequence[Level]) -> list[dict[str, Any]]:
    return [
        {
            "at_once": level.at_once,
            "tokens_per_second": level.tokens_per_second,
            "ttft_p50_seconds": level.ttft_p50_seconds,
            "ttft_p95_seconds": level.ttft_p95_seconds,
            "itl_seconds": level.itl_seconds,
            "spread_ratio": level.spread_ratio,
        }
        for level in levels
    ]


def _plain(place: Mapping[int, float]) -> dict[str, float]:
    return {str(token): value for token, value in place.items()}
