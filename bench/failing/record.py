"""What was seen of each death, and the figures that follow. Pure: no clocks, no sockets.

All times are seconds of this machine's monotonic clock, which all of its processes share.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Death:
    """A node that was taken away at `at`, and given back at `until` if it was."""

    node_id: str
    node: str
    at: float
    until: float | None = None


@dataclass(frozen=True, slots=True)
class TableChange:
    """What a gateway's route table gained and lost with one read: node id by replica id."""

    at: float
    gained: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A node was written down as dead."""

    node_id: str
    at: float


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of the load, as its client saw it."""

    kind: str
    """`new`, `turn`, or `pinned`: a turn of a session that lives on the node that is about to die."""
    started_at: float
    first_byte_at: float | None = None
    ended_at: float | None = None
    status: int = 0
    node_id: str = ""
    """Who answered."""
    error: str = ""
    """Why it did not end well; empty if it did."""
    death: str = ""
    """Node id of the death that a pinned turn belongs to."""

    @property
    def failed(self) -> bool:
        """The client got an error, and not a byte of an answer before it."""
        return bool(self.error) and (self.first_byte_at is None or self.status >= 400)  # noqa: PLR2004 - HTTP

    @property
    def broke_off(self) -> bool:
        """The client got a part of an answer."""
        return bool(self.error) and not self.failed


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds from a death to each of its consequences; `None` for what was not seen."""

    death: Death
    detect_seconds: float | None
    withdrawn_seconds: float | None
    """Until the route table had none of the node's replicas."""
    answered_seconds: float | None
    """Until a turn that belonged on the node had its first byte from another one."""
    standby_seconds: tuple[float, ...] = ()
    """For each replica that was lost, until the table had another one in its stead."""
    lost_replicas: int = 0

    @property
    def reroute_seconds(self) -> float | None:
        """The later of withdrawal and answer; `None` where either was not seen."""
        if self.withdrawn_seconds is None or self.answered_seconds is None:
            return None
        return max(self.withdrawn_seconds, self.answered_seconds)


def quantile(values: Iterable[float | None], share: float) -> float | None:
    """Nearest-rank quantile of what is known, in milliseconds' precision; `None` of nothing."""
    ordered = sorted(value for value in values if value is not None)
    return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 3) if ordered else None


def match_verdicts(
    deaths: Sequence[Death], verdicts: Iterable[Verdict], *, grace_seconds: float = 5.0
) -> tuple[dict[Death, float], list[Verdict]]:
    """Seconds from each death to its first verdict, and the verdicts that no death explains.

    A verdict belongs to the newest death of its node before it, unless the node had been back for
    longer than the grace: by then it has reported.
    """
    by_node: dict[str, list[Death]] = {}
    for death in sorted(deaths, key=lambda one: one.at):
        by_node.setdefault(death.node_id, []).append(death)
    found: dict[Death, float] = {}
    unexplained = []
    for verdict in sorted(verdicts, key=lambda one: one.at):
        before = [death for death in by_node.get(verdict.node_id, ()) if death.at <= verdict.at]
        if not before or verdict.at > (before[-1].until or math.inf) + grace_seconds:
            unexplained.append(verdict)
        else:
            found.setdefault(before[-1], verdict.at - before[-1].at)
    return found, unexplained


@dataclass(slots=True)
class Loss:
    """What the table lost with one node."""

    replicas: set[str] = field(default_factory=set)
    withdrawn_at: float | None = None
    filled_at: list[float] = field(default_factory=list)


def follow_tables(
    first: Mapping[str, str], changes: Sequence[TableChange], deaths: Sequence[Death]
) -> dict[Death, Loss]:
    """Find when each node's replicas left the table, and when others came in their stead.

    Whoever comes takes the place that has been empty longest: replicas of one deployment are alike,
    and so the number that serves is what counts. `first`: the table before the first change.
    """
    table = dict(first)
    losses: dict[Death, Loss] = {}
    gaps: deque[Death | None] = deque()
    pending = deque(sorted(deaths, key=lambda one: one.at))
    open_deaths: dict[str, Death] = {}
    for change in sorted(changes, key=lambda one: one.at):
        while pending and pending[0].at <= change.at:
            death = pending.popleft()
            open_deaths[death.node_id] = death
            losses[death] = Loss({name for name, node in table.items() if node == death.node_id})
        _apply(change, table, losses, gaps, open_deaths)
    return losses


def _apply(
    change: TableChange,
    table: dict[str, str],
    losses: Mapping[Death, Loss],
    gaps: deque[Death | None],
    open_deaths: Mapping[str, Death],
) -> None:
    for replica_id, node_id in change.lost.items():
        table.pop(replica_id, None)
        death = open_deaths.get(node_id)
        loss = losses[death] if death is not None else None
        gone = loss is not None and replica_id in loss.replicas
        gaps.append(death if gone else None)
        # A standby there may have been promoted after the death, before it was seen: it counts too.
        if loss is not None and node_id not in table.values():
            loss.withdrawn_at = loss.withdrawn_at or change.at
    for replica_id, node_id in change.gained.items():
        table[replica_id] = node_id
        if gaps and (filled := gaps.popleft()) is not None:
            losses[filled].filled_at.append(change.at)


def judge(
    deaths: Sequence[Death],
    verdicts: Iterable[Verdict],
    losses: Mapping[Death, Loss],
    asked: Iterable[Asked],
) -> tuple[list[Outcome], list[Verdict]]:
    """Put together what was seen of each death, and return the verdicts that none explains."""
    detected, unexplained = match_verdicts(deaths, verdicts)
    pinned: dict[str, list[Asked]] = {}
    for one in asked:
        if one.death:
            pinned.setdefault(one.death, []).append(one)
    return [
        _outcome(death, detected.get(death), losses.get(death), pinned.get(death.node_id, ()))
        for death in deaths
    ], unexplained


def _outcome(
    death: Death, detect_seconds: float | None, loss: Loss | None, pinned: Iterable[Asked]
) -> Outcome:
    answers = [
        one.first_byte_at - death.at
        for one in pinned
        if one.first_byte_at is not None and not one.failed and one.node_id != death.node_id
        if death.at <= one.started_at < (death.until or math.inf)
    ]
    known = loss or Loss()
    return Outcome(
        death=death,
        detect_seconds=detect_seconds,
        withdrawn_seconds=None if known.withdrawn_at is None else known.withdrawn_at - death.at,
        answered_seconds=min(answers, default=None),
        standby_seconds=tuple(at - death.at for at in known.filled_at),
        lost_replicas=len(known.replicas),
    )


def summarize(
    outcomes: Sequence[Outcome], asked: Sequence[Asked], unexplained: Sequence[Verdict]
) -> dict[str, Any]:
    """Figures by name, and what they are made of."""
    standby = [seconds for one in outcomes for seconds in one.standby_seconds]
    first = min((one.death.at for one in outcomes), default=math.inf)
    since = [one for one in asked if one.started_at >= first]
    waits = [one.first_byte_at - one.started_at for one in since if one.first_byte_at is not None]
    return {
        "detect_p50_seconds": quantile((one.detect_seconds for one in outcomes), 0.50),
        "detect_p99_seconds": quantile((one.detect_seconds for one in outcomes), 0.99),
        "reroute_p99_seconds": quantile((one.reroute_seconds for one in outcomes), 0.99),
        "standby_p99_seconds": quantile(standby, 0.99),
        "failed_new_requests": sum(one.failed for one in since),
        "false_deaths": len(unexplained),
        "deaths": len(outcomes),
        "deaths_not_detected": sum(one.detect_seconds is None for one in outcomes),
        "deaths_without_reroute": sum(one.reroute_seconds is None for one in outcomes),
        "lost_replicas": sum(one.lost_replicas for one in outcomes),
        "standbys_seen": len(standby),
        "withdrawn_p99_seconds": quantile((one.withdrawn_seconds for one in outcomes), 0.99),
        "answered_p99_seconds": quantile((one.answered_seconds for one in outcomes), 0.99),
        "requests": len(since),
        "broken_streams": sum(one.broke_off for one in since),
        "first_byte_p99_seconds": quantile(waits, 0.99),
        "first_byte_max_seconds": quantile(waits, 1.0),
        "errors": _tally(one.error for one in since if one.failed),
    }


def combine(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of the whole: of times the worst part's, of counts the sum; `None` where no part has one."""
    combined: dict[str, Any] = {}
    for name in (
        *("detect_p50_seconds", "detect_p99_seconds", "reroute_p99_seconds", "standby_p99_seconds"),
        *("failed_new_requests", "false_deaths"),
    ):
        known = [part[name] for part in parts.values() if part.get(name) is not None]
        total = max if name.endswith("_seconds") else sum
        combined[name] = total(known) if known else None
    return combined


def _tally(errors: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for error in errors:
        counts[error] = counts.get(error, 0) + 1
    return counts
