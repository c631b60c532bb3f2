"""Which nodes fetch a revision ahead of being needed, and which do so now: while it is quiet. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exaserve_ops.weights.domain.held import ABSENT, FAILED, READY

MINUTES_OF_A_DAY = 24 * 60
MOST_AT_ONCE = 4096
"""Nodes; more than any fleet that one control plane has."""
SLOWEST_BYTES_PER_SECOND = 1_000_000
"""A slower cap would hold connections for longer than servers keep them."""
FASTEST_BYTES_PER_SECOND = 10**15
"""More than any network gives, and within what the database keeps."""


@dataclass(frozen=True, slots=True)
class PrewarmRules:
    """What a policy says of one revision."""

    revision: str
    node_names: tuple[str, ...] = ()
    """Empty: every node in service."""
    busiest_ratio: float = 0.5
    from_minute: int = 0
    until_minute: int = MINUTES_OF_A_DAY
    """Before `from_minute`: the window goes past midnight."""
    bytes_per_second: int = 0
    at_once: int = 8


@dataclass(frozen=True, slots=True)
class PrewarmNode:
    """One node as it is now."""

    node_id: str
    name: str
    accepts: bool
    """Alive, and not drained, cordoned or without a store."""
    busy_ratio: float | None
    """Of its replicas' KV memory that is taken, the busiest one's; `None`: it serves nothing."""
    state: str = ABSENT
    """Of this revision there."""
    claimed: bool = False
    """By this policy."""
    paused: bool = False


@dataclass(frozen=True, slots=True)
class PrewarmPlan:
    """Claims to make, to pause and to go on with; ids of nodes. And why each other node waits."""

    claim: tuple[str, ...] = ()
    pause: tuple[str, ...] = ()
    resume: tuple[str, ...] = ()
    release: tuple[str, ...] = ()
    """The policy does not name them any more."""
    waits: tuple[tuple[str, str], ...] = ()
    """(node id, why) of those that are to have it and do not fetch it now."""


def is_open(rules: PrewarmRules, minute: int) -> bool:
    """Whether the window is open at a minute of the day, in UTC."""
    if rules.from_minute <= rules.until_minute:
        return rules.from_minute <= minute < rules.until_minute
    return minute >= rules.from_minute or minute < rules.until_minute


def plan_prewarm(rules: PrewarmRules, nodes: Sequence[PrewarmNode], *, minute: int) -> PrewarmPlan:
    """Decide for one revision. `minute`: of the day, in UTC.

    A node that has it keeps its claim at any hour, so that it is not evicted. One that fetches is paused
    while it is busy or the window is closed. Nodes that fetch already go before others, then names.
    """
    named = set(rules.node_names)
    mine = [node for node in nodes if not named or node.name in named]
    ids = {node.node_id for node in mine}
    room = rules.at_once
    claim: list[str] = []
    pause: list[str] = []
    resume: list[str] = []
    waits: list[tuple[str, str]] = []
    order = sorted(mine, key=lambda node: (node.paused or not node.claimed, node.name))
    for node in order:
        if node.state == READY:
            # Kept wherever it is, also where nothing was fetched by this policy.
            (claim if not node.claimed else resume if node.paused else []).append(node.node_id)
            continue
        why = _why_not_now(rules, node, minute) or (
            "" if room > 0 else f"{rules.at_once} others fetch it now"
        )
        if why:
            waits.append((node.node_id, why))
            if node.claimed and not node.paused:
                pause.append(node.node_id)
            continue
        room -= node.state != FAILED
        if not node.claimed:
            claim.append(node.node_id)
        elif node.paused:
            resume.append(node.node_id)
    gone = tuple(node.node_id for node in nodes if node.claimed and node.node_id not in ids)
    return PrewarmPlan(tuple(claim), tuple(pause), tuple(resume), gone, tuple(waits))


def _why_not_now(rules: PrewarmRules, node: PrewarmNode, minute: int) -> str:
    if not node.accepts:
        return "the node takes nothing new"
    if not is_open(rules, minute):
        return f"waits for {_clock(rules.from_minute)} UTC"
    if node.busy_ratio is not None and node.busy_ratio > rules.busiest_ratio:
        return f"its replicas are {node.busy_ratio:.0%} busy; {rules.busiest_ratio:.0%} is allowed"
    return ""


def _clock(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"
