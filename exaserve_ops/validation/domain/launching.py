"""Checks that have the replica launched anew, or put to sleep and woken. Without I/O."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from exaserve_ops.validation.domain.asking import (
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
from exaserve_ops.validation.domain.judging import why_unanswered
from exaserve_ops.validation.domain.lifecycle import FAILED, PASSED, SKIPPED
from exaserve_ops.validation.domain.measuring import measure
from exaserve_ops.validation.domain.prompts import draw_tokens
from exaserve_ops.validation.domain.tuning import (
    OPTION_NAMES,
    Forecast,
    Ladders,
    Limits,
    Measured,
    Round,
    Setting,
    Standing,
    joined,
    ladders_of,
    next_setting,
    standing_of,
)


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
    """Measure it as it runs, launch it with other settings and ask the same, and go on from the best."""
    ladders = ladders_of(
        subject.engine,
        subject.options,
        most_at_once=subject.most_at_once,
        context_tokens=subject.context_tokens,
    )
    if not subject.most_launches or ladders is None:
        why = "no launches were asked for" if ladders is not None else "its options are not known"
        return Finding(SKIPPED, why=why)
    limits = Limits(subject.ttft_limit_seconds, subject.itl_limit_seconds)
    forbidden = {s: f.why for s, f in subject.forecasts.items() if f.forbids}
    launched: list[Measured] = []
    # What runs already has the run's own settings, and is no launch.
    while len(launched) <= subject.most_launches:
        setting = next_setting(ladders, launched, limits, forbidden)
        if setting is None:
            break
        launched.append((yield from _launch_and_measure(subject, setting, len(launched))))
    return _judge(subject, ladders, launched, limits)


def _launch_and_measure(subject: Subject, setting: Setting, number: int) -> Generator[Need, Any, Measured]:
    made: Launched = yield LaunchWith(options_of(subject.engine, setting))
    if not made.done:
        return Measured(setting, why=made.why or "it was not ready in time")
    seen = yield from measure(subject, f"launch {number}", subject.most_at_once)
    rounds = tuple(Round(one.tokens_per_second, one.ttft_p95_seconds, one.itl_seconds) for one in seen.levels)
    return Measured(setting, () if seen.why else rounds, seen.why)


def options_of(engine: str, setting: Setting) -> dict[str, int]:
    """A setting in an engine's own words; what it is not told is left out."""
    values = zip(OPTION_NAMES[engine], (setting.sequences, setting.tokens), strict=True)
    return {name: value for name, value in values if name and value}


def _judge(subject: Subject, ladders: Ladders, launched: Sequence[Measured], limits: Limits) -> Finding:
    """It is information: whatever is found, the model serves."""
    within = f"TTFT p95 up to {limits.ttft_seconds:g} s, {limits.itl_seconds * 1000:g} ms between tokens"
    standing = standing_of(launched, limits)
    if standing is None or standing.best.why:
        why = standing.best.why if standing is not None else "nothing was launched"
        rows = _details(subject, ladders, launched, limits, None)
        return Finding(SKIPPED, limit=within, why=f"no setting could be measured: {why}", details=rows)
    best = standing.best
    own = next(one for one in joined(launched) if one.setting == ladders.own)
    named = _named(subject.engine, best.setting) if best.setting != own.setting else "as it was asked for"
    figure = f"{_rate(best)} with {named}" if best.setting != own.setting else f"{_rate(best)} {named}"
    tried = f"{len(joined(launched))} of {len(ladders.settings)} settings were tried"
    said = (_why(best, own, limits), _doubt(subject, standing, limits), tried)
    told = f"{'; '.join(filter(None, said))}, each asked {subject.most_at_once} at once"
    return Finding(PASSED, figure, within, told, _details(subject, ladders, launched, limits, best))


def _why(best: Measured, own: Measured, limits: Limits) -> str:
    if not best.keeps(limits):
        return "none keeps within the limits, this one is nearest"
    if best.setting == own.setting:
        return "nothing else that was tried is clearly better: no other settings are advised"
    if own.why:
        return f"the run's own settings brought nothing: {own.why}"
    if not own.keeps(limits):
        return "it keeps within the limits, and the run's own settings do not"
    return f"the run's own settings brought {_rate(own)}, both measured twice"


def _doubt(subject: Subject, standing: Standing, limits: Limits) -> str:
    """What looked better and could not be confirmed; empty where there is no such thing."""
    if standing.challenger is None:
        return ""
    named = _named(subject.engine, standing.challenger.setting)
    brought = _rate(standing.challenger) if standing.challenger.keeps(limits) else "nearer to the limits"
    return f"{named} looked better ({brought}), and no launch was left to measure both again"


def _named(engine: str, setting: Setting) -> str:
    options = options_of(engine, setting)
    return ", ".join(f"{name} {value}" for name, value in options.items()) or "as it was asked for"


def _rate(one: Measured) -> str:
    return f"{one.tokens_per_second:.0f} tokens/s ± {one.spread_ratio:.0%}"


def _details(
    subject: Subject,
    ladders: Ladders,
    launched: Sequence[Measured],
    limits: Limits,
    best: Measured | None,
) -> dict[str, Any]:
    """For the report. `best` of it: options to serve with, where they are clearly better than the run's."""
    keeps = best is not None and best.keeps(limits)
    marks = {} if best is None else {best.setting: "is_best" if keeps else "is_nearest"}
    advised = best is not None and keeps and best.setting != ladders.own
    return {
        "options": [name for name in OPTION_NAMES[subject.engine] if name],
        "settings": [
            _row(one, subject.forecasts, own=ladders.own, mark=marks.get(one.setting, ""))
            for one in joined(launched)
        ],
        "skipped": [
            {"sequences": s.sequences, "tokens": s.tokens, "why": f.why}
            for s, f in subject.forecasts.items()
            if f.forbids and s != ladders.own
        ],
        "at_once": subject.most_at_once,
        "ttft_limit_seconds": limits.ttft_seconds,
        "itl_limit_seconds": limits.itl_seconds,
        "best": options_of(subject.engine, best.setting) if best is not None and advised else None,
    }


def _row(one: Measured, forecasts: Mapping[Setting, Forecast], *, own: Setting, mark: str) -> dict[str, Any]:
    forecast = forecasts.get(one.setting, Forecast())
    return {
        "sequences": one.setting.sequences,
        "tokens": one.setting.tokens,
        "tokens_per_second": one.tokens_per_second,
        "spread_ratio": one.spread_ratio,
        "rounds": [each.tokens_per_second for each in one.rounds],
        "launches": one.launches,
        "ttft_p95_seconds": one.ttft_p95_seconds,
        "itl_seconds": one.itl_seconds,
        "memory": forecast.verdict,
        "needed_bytes": forecast.needed_bytes,
        "why": one.why,
        "is_own": one.setting == own,
        "is_best": mark == "is_best",
        "is_nearest": mark == "is_nearest",
    }
