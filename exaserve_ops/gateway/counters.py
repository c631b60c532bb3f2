"""What the gateway counts, and its page for Prometheus. No label can grow without bound."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from exaserve_ops.gateway.fleet import ReplicaSlot


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    """Requests that were to be sent to an engine, by how they ended."""
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    """Answers of the gateway's own that were errors, by code."""
    retries: int = 0
    continuations: collections.Counter[str] = field(default_factory=collections.Counter)
    """Streams that were to go on elsewhere (`begun`), and those of which a next piece came (`resumed`)."""
    continuation_gap_seconds: float = 0.0
    """From break to next piece, of those that were resumed."""
    not_continued: collections.Counter[str] = field(default_factory=collections.Counter)
    """Streams that asked for it, by why it could not be: at their beginning (`field`), or at the break."""
    returning_turns: int = 0
    """Turns of sessions that had an owner before."""
    sticky_turns: int = 0
    """Of these, turns that went to that owner."""
    turns_taken_back: int = 0
    """Turns that left for a former owner and were taken to the one that the table named."""

    @property
    def sticky_ratio(self) -> float | None:
        """Share of returning turns that reached their session's replica; `None` without any."""
        return self.sticky_turns / self.returning_turns if self.returning_turns else None


@dataclass(frozen=True, slots=True)
class Gauges:
    """What holds at the moment of a scrape."""

    slots: Iterable[ReplicaSlot]
    open_requests: int
    waiting_requests: int
    waiting_long_prompts: int
    known_beginnings: int
    beginnings_untold: int
    connections: int
    kept_tokens: int
    """Of streams that may have to be continued."""
    table_age_seconds: float | None
    is_table_stale: bool
    turns_dropped: int
    session_table_failures: int
    recent_sticky_ratio: float | None
    """Of the last five minutes; `None` without returning turns."""


class Family(NamedTuple):
    """One metric: its name, its kind, and its samples by their labels."""

    name: str
    kind: str
    samples: list[tuple[dict[str, str], float]]


def render(*processes: Iterable[Family]) -> bytes:
    """Write the page in Prometheus' text format, from the figures of one process or several."""
    merged: dict[str, Family] = {}
    for families in processes:
        for family in families:
            known = merged.setdefault(family.name, Family(family.name, family.kind, []))
            known.samples.extend(family.samples)
    lines: list[str] = []
    for name, kind, samples in merged.values():
        lines.append(f"# TYPE exaops_gateway_{name} {kind}")
        lines += [f"exaops_gateway_{name}{_labels(labels)} {value}" for labels, value in samples]
    return "\n".join([*lines, ""]).encode()


_Sample = tuple[dict[str, str], float]


def families_of(counters: Counters, gauges: Gauges, process: str = "") -> list[Family]:
    """All figures of one process; `process` names it where there are several."""
    own = {"process": process} if process else {}
    return [
        Family(name, kind, [({**own, **labels}, value) for labels, value in samples])
        for name, kind, samples in _families(counters, gauges)
    ]


def _families(counters: Counters, gauges: Gauges) -> Iterable[tuple[str, str, list[_Sample]]]:
    yield "requests_total", "counter", _by_label("outcome", counters.outcomes)
    yield "refusals_total", "counter", _by_label("code", counters.refused)
    yield "retries_total", "counter", [({}, counters.retries)]
    yield "continuations_total", "counter", _by_label("step", counters.continuations)
    yield "continuation_gap_seconds_total", "counter", [({}, counters.continuation_gap_seconds)]
    yield "not_continued_total", "counter", _by_label("reason", counters.not_continued)
    yield "continuation_tokens_kept", "gauge", [({}, gauges.kept_tokens)]
    yield "returning_turns_total", "counter", [({}, counters.returning_turns)]
    yield "sticky_turns_total", "counter", [({}, counters.sticky_turns)]
    yield "turns_taken_back_total", "counter", [({}, counters.turns_taken_back)]
    yield "sticky_ratio", "gauge", _known(counters.sticky_ratio)
    yield "recent_sticky_ratio", "gauge", _known(gauges.recent_sticky_ratio)
    in_flight: list[_Sample] = [
        ({"node": slot.record.node_id, "replica": slot.name}, slot.in_flight) for slot in gauges.slots
    ]
    yield "in_flight", "gauge", in_flight
    yield "open_requests", "gauge", [({}, gauges.open_requests)]
    yield "waiting_requests", "gauge", [({}, gauges.waiting_requests)]
    yield "waiting_long_prompts", "gauge", [({}, gauges.waiting_long_prompts)]
    yield "known_beginnings", "gauge", [({}, gauges.known_beginnings)]
    yield "beginnings_untold_total", "counter", [({}, gauges.beginnings_untold)]
    yield "connections", "gauge", [({}, gauges.connections)]
    yield "route_table_age_seconds", "gauge", _known(gauges.table_age_seconds)
    yield "route_table_stale", "gauge", [({}, int(gauges.is_table_stale))]
    yield "turns_dropped_total", "counter", [({}, gauges.turns_dropped)]
    yield "session_table_failures_total", "counter", [({}, gauges.session_table_failures)]


def _by_label(name: str, counts: collections.Counter[str]) -> list[_Sample]:
    return [({name: value}, count) for value, count in sorted(counts.items())]


def _known(value: float | None) -> list[_Sample]:
    return [] if value is None else [({}, value)]


def _labels(values: dict[str, str]) -> str:
    if not values:
        return ""
    pairs = ",".join(f'{name}="{_escape(value)}"' for name, value in values.items())
    return "{" + pairs + "}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
