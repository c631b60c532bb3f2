"""Checks that have the replica launched anew, or put to sleep and woken. Without I/O."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from exaserve_ops.validation.domain.asking import (
    Answer,
    Ask,
    AskAll,
    Finding,
    Launched,
    LaunchWith,
    Need,
    Procedure,
    Rest,
    SetAsleep,
    Slept,
    Subject,
)
from exaserve_ops.validation.domain.judging import measure_level, why_unanswered
from exaserve_ops.validation.domain.lifecycle import FAILED, PASSED, SKIPPED
from exaserve_ops.validation.domain.prompts import draw_tokens
from exaserve_ops.validation.domain.tuning import (
    OPTION_NAMES,
    Forecast,
    Limits,
    Measured,
    Setting,
    best_of,
    ladders_of,
    next_setting,
)

_PROMPT_TOKENS = 512
_ANSWER_TOKENS = 16
_LEAST_REQUESTS = 8


def check_sleep(subject: Subject) -> Procedure:
    """Have it put to sleep, let it rest, wake it, and ask what was asked before.

    It is woken first and last: whoever began this check before may have left it asleep, and the checks
    that follow ask it.
    """
    if subject.why_no_sleep:
        return Finding(SKIPPED, why=subject.why_no_sleep)
    woken: Slept = yield SetAsleep(asleep=False)
    if not woken.done:
        return Finding(FAILED, why=f"it did not wake: {woken.why}")
    ask = Ask(
        draw_tokens("sleep", 16, vocabulary=subject.vocabulary, seed=subject.seed),
        max_tokens=8,
        ignores_end=True,
    )
    [before] = yield AskAll((ask,))
    refused = why_unanswered([before])
    woke = Slept(done=False) if refused else (yield from _sleep_and_wake(subject))
    if refused or not woke.done:
        return Finding(FAILED, why=refused or woke.why)
    [after] = yield AskAll((ask,))
    figure = f"woke in {woke.seconds:.1f} s" if woke.seconds is not None else "woke"
    details = {"woke_in_seconds": woke.seconds, "slept_seconds": subject.idle_seconds}
    why = why_unanswered([after])
    if not why and (before.token_ids, before.text) != (after.token_ids, after.text):
        why = "after its sleep it answers the same prompt in another way"
    told = f"after {subject.idle_seconds:.0f} s of sleep"
    return Finding(FAILED if why else PASSED, figure, "the same answer", why or told, details)


def _sleep_and_wake(subject: Subject) -> Generator[Need, Any, Slept]:
    fell: Slept = yield SetAsleep(asleep=True)
    if fell.done:
        yield Rest(subject.idle_seconds)
    woke: Slept = yield SetAsleep(asleep=False)
    if not fell.done:
        also = "" if woke.done else f", and it did not wake: {woke.why}"
        return replace(fell, why=f"it was not put to sleep: {fell.why}{also}")
    return woke if woke.done else replace(woke, why=f"it did not wake: {woke.why}")


def check_tuning(subject: Subject) -> Procedure:
    """Launch it with other settings, ask as many at once as the run may, and go on from the best."""
    ladders = ladders_of(
        subject.engine, most_at_once=subject.most_at_once, context_tokens=subject.context_tokens
    )
    if not subject.most_launches or ladders is None:
        why = "no launches were asked for" if ladders is not None else "its options are not known"
        return Finding(SKIPPED, why=why)
    limits = Limits(subject.ttft_limit_seconds, subject.itl_limit_seconds)
    forbidden = {s: f.why for s, f in subject.forecasts.items() if f.forbids}
    measured: list[Measured] = []
    while len(measured) < subject.most_launches:
        setting = next_setting(ladders, measured, limits, forbidden)
        if setting is None:
            break
        launched: Launched = yield LaunchWith(options_of(subject.engine, setting))
        if not launched.done:
            measured.append(Measured(setting, why=launched.why or "it was not ready in time"))
            continue
        answers: Sequence[Answer] = yield AskAll(_load(subject), at_once=subject.most_at_once)
        measured.append(_measure(setting, answers, subject.most_at_once))
    return _judge(subject, measured, limits, of=len(ladders.settings))


def options_of(engine: str, setting: Setting) -> dict[str, int]:
    """A setting in an engine's own words."""
    sequences, tokens = OPTION_NAMES[engine]
    return {sequences: setting.sequences, **({tokens: setting.tokens} if tokens and setting.tokens else {})}


def _load(subject: Subject) -> tuple[Ask, ...]:
    """The same requests for every setting: who is launched anew has none of them in cache."""
    length = max(1, min(_PROMPT_TOKENS, subject.context_tokens // 4))
    count = max(_LEAST_REQUESTS, 2 * subject.most_at_once)
    return tuple(
        Ask(
            draw_tokens(f"tuning {number}", length, vocabulary=subject.vocabulary, seed=subject.seed),
            max_tokens=_ANSWER_TOKENS,
            ignores_end=True,
        )
        for number in range(count)
    )


def _measure(setting: Setting, answers: Sequence[Answer], at_once: int) -> Measured:
    if why := why_unanswered(answers):
        return Measured(setting, why=why)
    level = measure_level(at_once, answers, answer_tokens=_ANSWER_TOKENS)
    return Measured(setting, level.tokens_per_second, level.ttft_p95_seconds, level.itl_seconds)


def _judge(subject: Subject, measured: Sequence[Measured], limits: Limits, *, of: int) -> Finding:
    """It is information: whatever is found, the model serves."""
    within = f"TTFT p95 up to {limits.ttft_seconds:g} s, {limits.itl_seconds * 1000:g} ms between tokens"
    best = best_of(measured, limits)
    answered = best is not None and not best.why
    keeps = best is not None and best.excess(limits) <= 1
    details = {
        "options": [name for name in OPTION_NAMES[subject.engine] if name],
        "settings": [_row(one, subject.forecasts, is_best=keeps and one is best) for one in measured],
        "skipped": [
            {"sequences": s.sequences, "tokens": s.tokens, "why": f.why}
            for s, f in subject.forecasts.items()
            if f.forbids
        ],
        "at_once": subject.most_at_once,
        "ttft_limit_seconds": limits.ttft_seconds,
        "itl_limit_seconds": limits.itl_seconds,
        "best": None if best is None or not keeps else options_of(subject.engine, best.setting),
    }
    if best is None or not answered:
        why = best.why if best is not None else "the memory plan leaves no setting to launch"
        return Finding(SKIPPED, limit=within, why=f"no setting could be measured: {why}", details=details)
    named = ", ".join(f"{name} {value}" for name, value in options_of(subject.engine, best.setting).items())
    figure = f"{best.tokens_per_second:.0f} tokens/s with {named}"
    tried = f"{len(measured)} of {of} settings were launched, each asked {subject.most_at_once} at once"
    if not keeps:
        why = f"none keeps within the limits, this one is nearest; {tried}"
        return Finding(PASSED, figure, within, why, details)
    return Finding(PASSED, figure, within, f"the most within the limits; {tried}", details)


def _row(one: Measured, forecasts: Mapping[Setting, Forecast], *, is_best: bool) -> dict[str, Any]:
    forecast = forecasts.get(one.setting, Forecast())
    return {
        "sequences": one.setting.sequences,
        "tokens": one.setting.tokens,
        "tokens_per_second": one.tokens_per_second,
        "ttft_p95_seconds": one.ttft_p95_seconds,
        "itl_seconds": one.itl_seconds,
        "memory": forecast.verdict,
        "needed_bytes": forecast.needed_bytes,
        "why": one.why,
        "is_best": is_best,
    }
