"""Whether a replica sleeps, in operators' words. Pure.

What its agent has recorded is so; what its engine tells is only the detail. An engine that has no page for
it, or is not asked while it sleeps, does not make it unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from exaserve_ops.serving.domain.sleep import ASLEEP, AWAKE

_STATES = {"falling_asleep": "falling asleep", ASLEEP: "asleep", "waking": "waking"}
_KEPT = {
    "weights_offloaded": "weights in host memory",
    "discard_all": "weights and KV given up",
}
"""What an engine says that it has let go."""


@dataclass(frozen=True, slots=True)
class SleepSight:
    """What is known of one replica's sleep."""

    state: str
    """As its agent said last; empty: awake, or not launched yet."""
    since: datetime | None = None
    told: str = ""
    """By its engine; empty: it has no word for it."""
    answers: bool = False
    """It is ready, or ends what is open: a replica that does not sleep is awake then."""
    is_to_sleep: bool = False
    """It stands by in a deployment whose standbys sleep."""
    note: str = ""
    """Why it stays awake though it is to sleep."""
    refusal: str = ""
    """Why it can never sleep."""


def sleep_words(sight: SleepSight) -> tuple[str, str]:
    """Return whether it sleeps, and what there is to say beside; no words: that is not known."""
    if sight.state != AWAKE:
        since = f"since {sight.since:%Y-%m-%d %H:%M:%S} UTC" if sight.since else ""
        kept = _KEPT.get(sight.told, "") if sight.state == ASLEEP else ""
        return _STATES.get(sight.state, sight.state), ", ".join(filter(None, (since, kept)))
    if sight.told in _KEPT:
        return "asleep by its engine's word", f"{_KEPT[sight.told]}; its agent did not put it to sleep"
    if not sight.answers:
        return "", ""
    if sight.refusal:
        return "awake, always", sight.refusal
    if not sight.is_to_sleep:
        return "awake", "it is not to sleep"
    return (
        "awake",
        f"it is to sleep: {sight.note}" if sight.note else "it is to sleep once nothing runs on it",
    )
