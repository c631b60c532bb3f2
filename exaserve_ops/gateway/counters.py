"""What the gateway counts, and its page for Prometheus. No label can grow without bound."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from dataclasses import dataclass, field

from exaserve_ops.gateway.fleet import ReplicaSlot


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    """Requests that were to be sent to an engine, by how they ended."""
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    """Answers of the gateway's own that were errors, by code."""
    retries: int = 0
    returning_turns: int = 0
    """Turns of sessions that had an owner before."""
    sticky_turns: int = 0
    """Of these, turns that went to that owner."""

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
    connections: int
    table_age_seconds: float | None
    is_table_stale: bool
    turns_dropped: int
    session_table_failures: int


def render(counters: Counters, gauges: Gauges) -> bytes:
    """Write the page, in Prometheus' text format."""
    lines: list[str] = []
    for name, kind, samples in _families(counters, gauges):
        lines.append(f"# TYPE exaops_gateway_{name} {kind}")
        lines += [f"exaops_gateway_{name}{labels} {value}" for labels, value in samples]
    return "\n".join([*lines, ""]).encode()


_Sample = tuple[str, float | int]


def _families(counters: Counters, gauges: Gauges) -> Iterable[tuple[str, str, list[_Sample]]]:
    yield "requests_total", "counter", _by_label("outcome", counters.outcomes)
    yield "refusals_total", "counter", _by_label("code", counters.refused)
    yield "retries_total", "counter", [("", counters.retries)]
    yield "returning_turns_total", "counter", [("", counters.returning_turns)]
    yield "sticky_turns_total", "counter", [("", counters.sticky_turns)]
    yield "sticky_ratio", "gauge", _known(counters.sticky_ratio)
    in_flight: list[_Sample] = [
        (_labels(node=slot.record.node_id, replica=slot.name), slot.in_flight) for slot in gauges.slots
    ]
    yield "in_flight", "gauge", in_flight
    yield "open_requests", "gauge", [("", gauges.open_requests)]
    yield "waiting_requests", "gauge", [("", gauges.waiting_requests)]
    yield "connections", "gauge", [("", gauges.connections)]
    yield "route_table_age_seconds", "gauge", _known(gauges.table_age_seconds)
    yield "route_table_stale", "gauge", [("", int(gauges.is_table_stale))]
    yield "turns_dropped_total", "counter", [("", gauges.turns_dropped)]
    yield "session_table_failures_total", "counter", [("", gauges.session_table_failures)]


def _by_label(name: str, counts: collections.Counter[str]) -> list[_Sample]:
    return [(_labels(**{name: value}), count) for value, count in sorted(counts.items())]


def _known(value: float | None) -> list[_Sample]:
    return [] if value is None else [("", value)]


def _labels(**values: str) -> str:
    pairs = ",".join(f'{name}="{_escape(value)}"' for name, value in values.items())
    return "{" + pairs + "}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
