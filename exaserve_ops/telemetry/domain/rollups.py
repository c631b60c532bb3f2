"""Samples of one minute become one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class LoadSample:
    """One sighting of a replica's load. `None`: the engine did not say."""

    kv_used_ratio: float | None = None
    requests_running: int | None = None
    requests_waiting: int | None = None
    generation_tokens_per_second: float | None = None
    ttft_p95_seconds: float | None = None
    itl_p95_seconds: float | None = None
    prefix_hit_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class MinuteLoad:
    """One minute of one replica."""

    kv_used_ratio_max: float | None
    requests_running_mean: float | None
    requests_waiting_max: int | None
    generation_tokens_per_second_mean: float | None
    ttft_p95_seconds_max: float | None
    itl_p95_seconds_max: float | None
    prefix_hit_ratio_mean: float | None


@dataclass(slots=True)
class MinuteSamples:
    """What was seen in one minute so far."""

    samples: list[LoadSample] = field(default_factory=list)

    def summarise(self) -> MinuteLoad:
        """Highest of what hurts when it peaks, mean of what adds up."""
        return MinuteLoad(
            kv_used_ratio_max=_highest([s.kv_used_ratio for s in self.samples]),
            requests_running_mean=_mean([s.requests_running for s in self.samples]),
            requests_waiting_max=_highest([s.requests_waiting for s in self.samples]),
            generation_tokens_per_second_mean=_mean([s.generation_tokens_per_second for s in self.samples]),
            ttft_p95_seconds_max=_highest([s.ttft_p95_seconds for s in self.samples]),
            itl_p95_seconds_max=_highest([s.itl_p95_seconds for s in self.samples]),
            prefix_hit_ratio_mean=_mean([s.prefix_hit_ratio for s in self.samples]),
        )


def _highest(values: Sequence[_Number | None]) -> _Number | None:
    return max((v for v in values if v is not None), default=None)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None
