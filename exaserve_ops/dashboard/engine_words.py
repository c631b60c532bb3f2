"""What an engine tells beside the figures that every engine has, in words. Pure.

What it does not tell is a row without text, and the page says so: to be silent is not to be zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from exaserve_ops.dashboard.sleep_words import SleepSight, sleep_words
from exaserve_ops.dashboard.wording import MISSING, bounded, byte_size, duration, number, percent

_OUTCOMES = {
    "stop": "finished",
    "length": "reached their limit",
    "abort": "aborted",
    "error": "failed",
    "rejected": "rejected",
    "repetition": "stopped for repetition",
}
_MOST_PARTS = 12
"""Of a list in one row; an engine that tells more is shown the largest."""


@dataclass(frozen=True, slots=True)
class ToldRow:
    """One line: what it is, and what the engine says; no text where it says nothing."""

    name: str
    text: str = ""
    detail: str = ""
    silence: str = "not told by this engine"
    """Shown where there is no text."""


_NOTHING_CAME = "no request in the last seconds, or not told"


def told_of(load: Mapping[str, Any], sleep: SleepSight) -> list[ToldRow]:
    """Rows for a replica's load; none where nothing is known of it at all."""
    if not load:
        return [_sleep(sleep)] if sleep.state else []
    return [
        _quantiles("In the queue, p95", load, "queue"),
        _quantiles("Between tokens, p95", load, "itl"),
        ToldRow("TTFT p99", _or_nothing(bounded(load, "ttft_p99_seconds")), silence=_NOTHING_CAME),
        _waiting(load),
        _capacity(load),
        *_cached(load),
        _sleep(replace(sleep, told=load.get("sleep_state", ""))),
        _preemptions(load),
        _outcomes(load),
        _outer_cache(load),
        *_connector(load),
        *_models(load),
    ]


def _sleep(sight: SleepSight) -> ToldRow:
    return ToldRow("Sleep", *sleep_words(sight), silence="not known while it is not ready")


def _or_nothing(text: str) -> str:
    return "" if text == MISSING else text


def _quantiles(name: str, load: Mapping[str, Any], what: str) -> ToldRow:
    text = _or_nothing(bounded(load, f"{what}_p95_seconds"))
    detail = f"p50 {bounded(load, f'{what}_p50_seconds')}" if text else ""
    return ToldRow(name, text, detail, silence=_NOTHING_CAME)


def _waiting(load: Mapping[str, Any]) -> ToldRow:
    waiting, reasons = load.get("requests_waiting"), load.get("waiting_by_reason") or {}
    if waiting is None:
        return ToldRow("Waiting for")
    return ToldRow("Waiting for", _parts(reasons) or ("nothing" if waiting == 0 else "reasons not told"))


def _capacity(load: Mapping[str, Any]) -> ToldRow:
    tokens = load.get("kv_capacity_tokens")
    blocks, size = load.get("kv_total_blocks"), load.get("kv_block_tokens")
    if tokens is None and blocks is not None and size is not None:
        tokens = blocks * size
    if tokens is None:
        return ToldRow("KV room")
    details = [] if not size else [f"in blocks of {number(size, 0)}"]
    if load.get("kv_capacity_is_estimate"):
        details.append("worked out of labels, may be off where layers differ")
    return ToldRow("KV room", f"{number(tokens, 0)} tokens", ", ".join(details))


def _cached(load: Mapping[str, Any]) -> list[ToldRow]:
    """Only of engines that publish their KV events; without them the hit rate says how well it works."""
    tokens = load.get("kv_cached_tokens")
    if tokens is None:
        return []
    idle = load.get("kv_evicted_idle_seconds")
    detail = (
        "nothing had to go yet" if idle is None else f"what went last had been unused for {duration(idle)}"
    )
    return [ToldRow("Cached prefixes", f"{number(tokens, 0)} tokens", detail)]


def _preemptions(load: Mapping[str, Any]) -> ToldRow:
    total, rate = load.get("preemptions_total"), load.get("preemptions_per_second")
    if total is None:
        return ToldRow("Set back for lack of room")
    detail = f"{number(rate)} a second now" if rate else ""
    return ToldRow("Set back for lack of room", f"{number(total, 0)} since it started", detail)


def _outcomes(load: Mapping[str, Any]) -> ToldRow:
    outcomes, total = load.get("outcomes_total") or {}, load.get("requests_total")
    named = {_OUTCOMES.get(name, name.replace("_", " ")): count for name, count in outcomes.items()}
    if named:
        return ToldRow("Requests ended", _parts(named), "since it started")
    return ToldRow("Requests ended", "" if total is None else f"{number(total, 0)} since it started")


def _outer_cache(load: Mapping[str, Any]) -> ToldRow:
    tokens, ratio = load.get("external_hit_tokens_total"), load.get("external_hit_ratio")
    if tokens is None:
        return ToldRow("Cache beyond its own")
    detail = "" if ratio is None else f"{percent(ratio)} of what was looked for in the last seconds"
    return ToldRow("Cache beyond its own", f"{number(tokens, 0)} tokens found since it started", detail)


def connector_words(totals: Mapping[str, float]) -> str:
    """What went through a KV connector, one after the other; empty where nothing did."""
    return " · ".join(f"{name} {_amount(name, value)}" for name, value in totals.items())


def _connector(load: Mapping[str, Any]) -> list[ToldRow]:
    text = connector_words(load.get("connector_totals") or {})
    return [ToldRow("KV connector", text, "since it started")] if text else []


def _amount(name: str, value: float) -> str:
    if "bytes" in name:
        return byte_size(value)
    return duration(value) if "seconds" in name else number(value, 0)


def _models(load: Mapping[str, Any]) -> list[ToldRow]:
    models = load.get("generation_tokens_by_model") or {}
    return [ToldRow("Tokens by model", _parts(models), "since it started")] if models else []


def _parts(counts: Mapping[str, float]) -> str:
    largest = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:_MOST_PARTS]
    return " · ".join(f"{name.replace('_', ' ')} {number(count, 0)}" for name, count in largest)
