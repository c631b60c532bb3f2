"""Whether gateways can connect to a replica that its agent calls ready. Pure.

An agent sits next to its replicas; those that send requests do not. A replica counts as ready for them
only once a living gateway has connected to it. Where no gateway lives nothing can be said, and nothing
is held up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

UNCHECKED = "unchecked"
"""No gateway lives, or none is to send anything there."""
WAITING = "waiting"
REACHED = "reached"
PARTLY = "partly"
"""Some gateways reach it and others do not."""
UNREACHABLE = "unreachable"

REACHES = (UNCHECKED, WAITING, REACHED, PARTLY, UNREACHABLE)
CLOSED = (WAITING, UNREACHABLE)
"""In these, nobody sends it anything."""
_UNTIL_MORE_IS_SAID = {
    UNCHECKED: UNCHECKED,
    WAITING: WAITING,
    REACHED: REACHED,
    PARTLY: REACHED,
    UNREACHABLE: WAITING,
}
"""Every gateway tries what is new to it at once. One that serves already is not closed meanwhile."""
_SHOWN_REASONS = 3


def is_open(reach: str, sleep_state: str) -> bool:
    """Whether a ready replica that serves is sent requests: some gateway reaches it, and it is awake."""
    return reach not in CLOSED and not sleep_state


@dataclass(frozen=True, slots=True)
class ReachFacts:
    """One ready replica, and what the record says of its reach."""

    reach: str
    reason: str
    serves: bool
    """Standbys are in no gateway's table."""
    simulated: bool = False


@dataclass(frozen=True, slots=True)
class ReachVerdict:
    """What the record should say."""

    reach: str
    reason: str = ""
    event: str = ""
    """Of the audit record; empty where nothing happened that people ask about."""


def judge_reach(
    facts: ReachFacts,
    gateways: Collection[str],
    reasons: Mapping[str, str],
    reached_by: Collection[str],
) -> ReachVerdict:
    """Decide from the living gateways, why which of them cannot connect, and which of them did."""
    if not facts.serves:
        return ReachVerdict(UNCHECKED)
    if not gateways:
        # What a gateway has reached stays reached when it ends; what it complained of is forgotten.
        known = facts.reach in {REACHED, PARTLY}
        return ReachVerdict(REACHED if known else UNCHECKED)
    said = _sentence(reasons)
    if reached_by:
        return _with_event(facts, PARTLY if said else REACHED, said, next(iter(sorted(reached_by))))
    if said:
        # Nothing is promised of simulated ones, which may have no port at all: told, not held against them.
        return _with_event(facts, UNCHECKED if facts.simulated else UNREACHABLE, said, "")
    return _with_event(facts, _UNTIL_MORE_IS_SAID[facts.reach], "", "")


def _with_event(facts: ReachFacts, reach: str, said: str, gateway: str) -> ReachVerdict:
    if said:
        return ReachVerdict(reach, said, "unroutable" if facts.reason != said else "")
    if facts.reason:
        event = "routable_again" if reach == REACHED else ""
    else:
        event = "reached" if reach == REACHED != facts.reach and gateway and not facts.simulated else ""
    return ReachVerdict(reach, "", event)


def _sentence(reasons: Mapping[str, str]) -> str:
    shown = [reasons[gateway] for gateway in sorted(reasons)][:_SHOWN_REASONS]
    more = len(reasons) - len(shown)
    return "; ".join(shown) + (f"; and from {more} more" if more else "")
