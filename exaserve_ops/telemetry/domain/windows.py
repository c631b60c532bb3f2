"""Figures over a sliding window of finished requests, and a short history of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """What the fleet's figures need of one finished request."""

    ended_at_seconds: float
    ttft_seconds: float | None
    tokens: int
    repinned: bool = False
    """Its session went on at another replica than before."""


@dataclass(frozen=True, slots=True)
class RequestFigures:
    """Over one window. A quantile is `None` where nothing in the window had a first token."""

    requests_per_second: float
    tokens_per_second: float
    ttft_p50_seconds: float | None
    ttft_p95_seconds: float | None
    ttft_p99_seconds: float | None
    repinned: int
    """Turns in the window whose session changed its replica."""


class RequestWindow:
    """Finished requests of the last `seconds`, bounded in number."""

    def __init__(self, seconds: float = 60.0, limit: int = 100_000) -> None:
        self.seconds = seconds
        self._requests: deque[FinishedRequest] = deque(maxlen=limit)

    def add(self, request: FinishedRequest) -> None:
        """Count one request in."""
        self._requests.append(request)

    def figures(self, now_seconds: float) -> RequestFigures:
        """Figures of the window that ends now."""
        while self._requests and self._requests[0].ended_at_seconds < now_seconds - self.seconds:
            self._requests.popleft()
        ttfts = sorted(r.ttft_seconds for r in self._requests if r.ttft_seconds is not None)
        return RequestFigures(
            requests_per_second=len(self._requests) / self.seconds,
            tokens_per_second=sum(r.tokens for r in self._requests) / self.seconds,
            ttft_p50_seconds=quantile(ttfts, 0.50),
            ttft_p95_seconds=quantile(ttfts, 0.95),
            ttft_p99_seconds=quantile(ttfts, 0.99),
            repinned=sum(r.repinned for r in self._requests),
        )


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """Nearest-rank quantile of ascending values; `None` of none."""
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(slots=True)
class History:
    """The last points of a few figures, one point every `every_seconds`."""

    every_seconds: float = 5.0
    points: int = 120
    _at: deque[float] = field(default_factory=deque)
    _values: dict[str, deque[float | None]] = field(default_factory=dict)

    def add(self, now_seconds: float, values: Mapping[str, float | None]) -> None:
        """Keep a point if it is time for one."""
        if self._at and now_seconds - self._at[-1] < self.every_seconds:
            return
        self._push(self._at, now_seconds)
        for name, value in values.items():
            self._push(self._values.setdefault(name, deque()), value)

    def as_dict(self) -> dict[str, list[float | None]]:
        """Times and values, oldest first."""
        lines: dict[str, list[float | None]] = {name: list(v) for name, v in self._values.items()}
        return lines | {"at": list(self._at)}

    def _push(self, line: deque[float] | deque[float | None], value: float | None) -> None:
        line.append(value)  # type: ignore[arg-type]  # `at` never gets a None
        while len(line) > self.points:
            line.popleft()
