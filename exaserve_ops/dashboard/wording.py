"""Words, shapes and units of the pages. Pure: values in, text out.

A state is always a word, a tone (colour) and a shape, so that no reader depends on colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from exaserve_ops.health.domain.incident import INCIDENT
from exaserve_ops.inventory.domain.drain import NODE_DRAIN
from exaserve_ops.inventory.domain.installation import INSTALLATION
from exaserve_ops.inventory.domain.liveness import NODE_LIVENESS
from exaserve_ops.lib.lifecycle import Lifecycle
from exaserve_ops.rollouts.domain.lifecycle import ROLLOUT, WAVE
from exaserve_ops.serving.domain.lifecycle import DEPLOYMENT, REPLICA
from exaserve_ops.serving.domain.model_import import MODEL_IMPORT
from exaserve_ops.validation.domain.lifecycle import CHECK, VALIDATION

THIN_SPACE = "\u202f"
MISSING = "\u2013"
CLOCK_OFF_SECONDS = 120.0
CLOCK_STEP_SECONDS = 1.0
"""Clocks that are no further apart are in step: reports take a part of a second themselves."""
_HUNDRED = 100
_TEN = 10
_TENTH = 0.1
_LEAST_PERCENT = 0.01


@dataclass(frozen=True, slots=True)
class Badge:
    """How a status looks: the word, the tone of its colour, the shape before it, what it means."""

    word: str
    tone: str
    shape: str
    meaning: str = ""


_LOOKS = {
    "node": {
        "joining": ("busy", "half"),
        "alive": ("good", "circle"),
        "suspect": ("warn", "triangle"),
        "dead": ("bad", "cross"),
        "degraded": ("warn", "triangle"),
        "retired": ("idle", "bar"),
    },
    "installation": {
        "new": ("busy", "half"),
        "confirming": ("warn", "triangle"),
        "queued": ("idle", "ring"),
        "working": ("busy", "half"),
        "installed": ("good", "circle"),
        "failed": ("bad", "cross"),
        "removed": ("idle", "bar"),
        "abandoned": ("idle", "bar"),
    },
    "step": {
        "waiting": ("idle", "ring"),
        "running": ("busy", "half"),
        "done": ("good", "circle"),
        "warning": ("warn", "triangle"),
        "failed": ("bad", "cross"),
        "interrupted": ("warn", "bar"),
    },
    "replica": {
        "pending": ("idle", "ring"),
        "placed": ("idle", "ring"),
        "starting": ("busy", "half"),
        "loading": ("busy", "half"),
        "ready": ("good", "circle"),
        "backing_off": ("warn", "triangle"),
        "failed": ("bad", "cross"),
        "unreachable": ("bad", "diamond"),
        "draining": ("busy", "down"),
        "stopping": ("idle", "down"),
        "stopped": ("idle", "bar"),
    },
    "incident": {
        "open": ("warn", "triangle"),
        "resolved": ("good", "circle"),
        "confirmed": ("bad", "cross"),
        "dismissed": ("idle", "bar"),
    },
    "drain": {
        "none": ("idle", "ring"),
        "draining": ("busy", "down"),
        "drained": ("idle", "bar"),
    },
    "rollout": {
        "planned": ("warn", "ring"),
        "running": ("busy", "half"),
        "paused": ("warn", "bar"),
        "halted": ("bad", "triangle"),
        "rolling_back": ("warn", "down"),
        "done": ("good", "circle"),
        "rolled_back": ("idle", "bar"),
        "cancelled": ("idle", "bar"),
    },
    "wave": {
        "waiting": ("idle", "ring"),
        "prewarming": ("busy", "half"),
        "moving": ("busy", "half"),
        "soaking": ("busy", "half"),
        "passed": ("good", "circle"),
        "failed": ("bad", "cross"),
    },
    "validation": {
        "queued": ("idle", "ring"),
        "running": ("busy", "half"),
        "go": ("good", "circle"),
        "no_go": ("bad", "cross"),
        "cancelled": ("idle", "bar"),
    },
    "check": {
        "waiting": ("idle", "ring"),
        "checking": ("busy", "half"),
        "passed": ("good", "circle"),
        "failed": ("bad", "cross"),
        "skipped": ("idle", "bar"),
    },
    "weights": {
        "absent": ("idle", "ring"),
        "waiting": ("idle", "half"),
        "fetching": ("busy", "half"),
        "paused": ("warn", "bar"),
        "ready": ("good", "circle"),
        "failed": ("bad", "cross"),
    },
    "swarm": {
        "none": ("idle", "ring"),
        "live": ("busy", "half"),
        "over": ("good", "circle"),
    },
    "stream": {
        "waiting": ("warn", "ring"),
        "connecting": ("busy", "ring"),
        "starved": ("warn", "half"),
        "flowing": ("busy", "half"),
        "done": ("good", "circle"),
        "failed": ("bad", "cross"),
    },
    "trouble": {
        "failed": ("bad", "cross"),
        "barred": ("bad", "bar"),
        "slow": ("warn", "down"),
        "unreachable": ("warn", "diamond"),
        "waiting": ("warn", "ring"),
    },
    "model_import": {
        "waiting": ("idle", "ring"),
        "fetching": ("busy", "half"),
        "failed": ("bad", "cross"),
        "registered": ("good", "circle"),
        "cancelled": ("idle", "bar"),
    },
    "gate": {
        "open": ("good", "circle"),
        "closed": ("bad", "cross"),
        "no data": ("idle", "ring"),
    },
    "deployment": {
        "active": ("good", "circle"),
        "deleting": ("warn", "down"),
        "deleted": ("idle", "bar"),
    },
}
_LIFECYCLES: dict[str, Lifecycle] = {
    "node": NODE_LIVENESS,
    "installation": INSTALLATION,
    "replica": REPLICA,
    "deployment": DEPLOYMENT,
    "incident": INCIDENT,
    "drain": NODE_DRAIN,
    "rollout": ROLLOUT,
    "wave": WAVE,
    "model_import": MODEL_IMPORT,
    "validation": VALIDATION,
    "check": CHECK,
}


def badge_of(kind: str, status: str) -> Badge:
    """Return the look of a status; one that is not known looks like no news, not like good news."""
    tone, shape = _LOOKS.get(kind, {}).get(status, ("idle", "ring"))
    lifecycle = _LIFECYCLES.get(kind)
    meaning = lifecycle.meanings.get(status, "") if lifecycle else ""
    return Badge(status.replace("_", " "), tone, shape, meaning)


def health_of(*, status: str, ready: int, wanted: int, failed: int) -> Badge:
    """Look of a deployment by what it serves, not by what was asked of it."""
    if status != "active":
        return badge_of("deployment", status)
    if failed:
        return Badge("failing", "bad", "cross", f"{failed} replicas reached the crash-loop limit.")
    if wanted == 0:
        return Badge("scaled to zero", "idle", "bar", "No replica is wanted.")
    if ready >= wanted:
        return Badge("serving", "good", "circle", "As many replicas answer as are wanted.")
    if ready == 0:
        return Badge("not serving", "warn", "triangle", "No replica answers yet.")
    return Badge("converging", "busy", "half", f"{ready} of {wanted} replicas answer.")


def number(value: float | None, digits: int | None = None) -> str:
    """Group digits by thin spaces; about three significant digits where `digits` is not given."""
    if value is None:
        return MISSING
    if math.isnan(value):
        return "NaN"
    places = _places(value) if digits is None else digits
    return f"{value:,.{places}f}".replace(",", THIN_SPACE)


def percent(ratio: float | None) -> str:
    """Write a ratio as a percentage; percent exists on the screen only."""
    if ratio is None:
        return MISSING
    if math.isnan(ratio):
        return "NaN"
    scaled = ratio * 100
    if 0 < abs(scaled) < _LEAST_PERCENT:  # little is not nothing
        return f"<{THIN_SPACE}{_LEAST_PERCENT}{THIN_SPACE}%"
    digits = 0 if scaled == 0 or abs(scaled) >= _TEN else 1 if abs(scaled) >= _TENTH else 2
    return f"{scaled:.{digits}f}{THIN_SPACE}%"


def duration(seconds: float | None) -> str:
    """Write a duration in human words: `840 ms`, `12.3 s`, `4 min 5 s`, `3 h 20 min`, `2 d 4 h`."""
    if seconds is None:
        return MISSING
    if math.isnan(seconds):
        return "NaN"
    if seconds < 0:
        return f"\u2212{duration(-seconds)}"
    if seconds < 1:
        return f"{seconds * 1000:.0f}{THIN_SPACE}ms"
    if seconds < _TEN:
        return f"{seconds:.1f}{THIN_SPACE}s"
    return _coarse(round(seconds))


def bounded(load: Mapping[str, Any], name: str) -> str:
    """Write a quantile of a load: `> 80 s` where it lies beyond the last bucket that its engine counts in."""
    text = duration(load.get(name))
    return f">{THIN_SPACE}{text}" if name in load.get("lower_bounds", ()) else text


def byte_size(count: float | None) -> str:
    """Write a number of bytes in binary units."""
    if count is None:
        return MISSING
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":  # noqa: PLR2004 - the base of the units
            return f"{number(size, 0 if unit == 'B' else None)}{THIN_SPACE}{unit}"
        size /= 1024
    raise AssertionError("the last unit returns")


def count_words(count: float | None) -> str:
    """Write a large count with a letter: `7.62 B` parameters."""
    if count is None:
        return MISSING
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if count >= limit:
            scaled = count / (1e3 if letter == "k" else limit)
            return f"{number(scaled)}{THIN_SPACE}{letter}"
    return number(count, 0)


def load_words(load: Mapping[str, Any]) -> dict[str, str]:
    """Cells of a table of replicas: what is not known is missing, never zero."""
    return {
        "kv": percent(load.get("kv_used_ratio")),
        "ttft": bounded(load, "ttft_p95_seconds"),
        "running": number(load.get("requests_running"), 0),
        "waiting": number(load.get("requests_waiting"), 0),
        "tokens": number(load.get("generation_tokens_per_second")),
    }


def cut_middle(text: str, kept: int) -> str:
    """Keep the ends of a text that is longer than `kept` and a bit: `13000596…dc2613`."""
    if len(text) <= kept + 4:
        return text
    tail = kept * 2 // 5
    return f"{text[: kept - tail]}…{text[-tail:]}"


def ago(age: timedelta) -> str:
    """Write an age: `just now`, `12 s ago`, `3 h 20 min ago`."""
    seconds = age.total_seconds()
    return "just now" if seconds < 1 else f"{_coarse(round(seconds))} ago"


def metric_value(value: float | None, unit: str) -> str:
    """Write a value of a heatmap metric in its unit."""
    if unit == "ratio":
        return percent(value)
    if unit == "seconds":
        return duration(value)
    return number(value)


def clock_words(skew_seconds: float) -> str:
    """Write how far a node's clock is from ours, and whether anything is to be done about it."""
    apart = f"{duration(abs(skew_seconds))} {'behind' if skew_seconds < 0 else 'ahead of'} ours"
    if is_clock_off(skew_seconds):
        return f"{apart}: set it right, or times in its logs mislead; nothing else goes by it"
    if abs(skew_seconds) > CLOCK_STEP_SECONDS:
        return f"{apart}: no harm, but times in its logs differ by that"
    return f"in step with ours ({apart})"


def option_value(value: object) -> str:
    """Write the value of an engine's option: what is switched is on or off."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def is_clock_off(skew_seconds: float | None) -> bool:
    """Whether a node's clock is so far off that people reading its logs should know."""
    return skew_seconds is not None and abs(skew_seconds) > CLOCK_OFF_SECONDS


def _coarse(seconds: int) -> str:
    steps = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"))
    for size, unit, smaller_size, smaller in steps:
        if seconds >= size:
            rest = seconds % size // smaller_size
            head = f"{seconds // size}{THIN_SPACE}{unit}"
            return f"{head} {rest}{THIN_SPACE}{smaller}" if rest else head
    return f"{seconds}{THIN_SPACE}s"


def _places(value: float) -> int:
    size = abs(value)
    if size >= _HUNDRED or float(value).is_integer():
        return 0
    return 1 if size >= _TEN else 2
