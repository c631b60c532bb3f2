"""Grey failures: a replica that answers, but much later than its peers for a while. Pure.

One look compares the replicas of a deployment with each other by median and median absolute
deviation, which one bad replica cannot move. A verdict needs several looks in a row: a burst, a long
prompt or a first compilation is no failure.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_NORMAL_SCALE = 1.4826
"""Makes the median absolute deviation of normal noise its standard deviation."""


@dataclass(frozen=True, slots=True)
class SlownessPolicy:
    """When a replica is an outlier, and for how long it must stay one."""

    least_peers: int = 4
    """Replicas with a figure, the one in question included; fewer cannot be compared."""
    deviations: float = 5.0
    times_median: float = 2.0
    ttft_floor_seconds: float = 0.1
    itl_floor_seconds: float = 0.02
    """Differences below the floors are nobody's concern."""
    least_requests_per_second: float = 0.1
    """Fewer finished requests make no figure."""
    looks_to_flag: int = 6
    looks_to_clear: int = 6


@dataclass(frozen=True, slots=True)
class PeerSample:
    """One replica's figures over the agent's window; `None` where nothing finished in it."""

    replica_id: str
    ttft_p50_seconds: float | None = None
    itl_p50_seconds: float | None = None
    requests_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Streak:
    """How the last looks at one replica went."""

    looks: int = 0
    """In a row that speak against the verdict as it stands."""
    slow: bool = False
    reason: str = ""


_CALM = Streak()
"""What nearly all are nearly always."""


def find_outliers(samples: Sequence[PeerSample], policy: SlownessPolicy) -> dict[str, str]:
    """Return why, by id, for each replica that is an outlier in this one look."""
    busy = [s for s in samples if (s.requests_per_second or 0.0) >= policy.least_requests_per_second]
    ttft = {s.replica_id: s.ttft_p50_seconds for s in busy if s.ttft_p50_seconds is not None}
    itl = {s.replica_id: s.itl_p50_seconds for s in busy if s.itl_p50_seconds is not None}
    return {
        **_outliers("inter-token latency", itl, policy.itl_floor_seconds, policy),
        **_outliers("time to first token", ttft, policy.ttft_floor_seconds, policy),
    }


def follow(
    streaks: Mapping[str, Streak], samples: Sequence[PeerSample], policy: SlownessPolicy
) -> dict[str, Streak]:
    """Take in one look at all replicas of one deployment; those that are gone are forgotten."""
    outliers = find_outliers(samples, policy)
    return {
        s.replica_id: _follow_one(streaks.get(s.replica_id, _CALM), outliers.get(s.replica_id, ""), policy)
        for s in samples
    }


def _follow_one(streak: Streak, outlying: str, policy: SlownessPolicy) -> Streak:
    if bool(outlying) == streak.slow:
        return Streak(0, streak.slow, streak.reason) if streak.looks else streak
    needed = policy.looks_to_clear if streak.slow else policy.looks_to_flag
    if streak.looks + 1 < needed:
        return Streak(streak.looks + 1, streak.slow, streak.reason)
    return Streak(0, not streak.slow, outlying)


def _outliers(
    name: str, figures: Mapping[str, float], floor: float, policy: SlownessPolicy
) -> dict[str, str]:
    if len(figures) < policy.least_peers:
        return {}
    median = statistics.median(figures.values())
    spread = _NORMAL_SCALE * statistics.median(abs(value - median) for value in figures.values())
    limit = max(median + policy.deviations * spread, policy.times_median * median, median + floor)
    return {
        replica_id: f"{name} {value:.3g} s, {median:.3g} s among its {len(figures) - 1} peers"
        for replica_id, value in figures.items()
        if value > limit
    }
