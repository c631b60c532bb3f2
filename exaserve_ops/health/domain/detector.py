"""Who is alive: judged by when reports arrived, on the control plane's own monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass

from exaserve_ops.inventory.domain.liveness import ALIVE, DEAD, JOINING, SUSPECT


@dataclass(frozen=True, slots=True)
class DetectorSettings:
    """Interval of reports and the counts that turn it into a verdict."""

    interval_seconds: float = 1.0
    suspect_after_misses: int = 2
    dead_after_misses: int = 3
    recover_after_reports: int = 2
    grace_ratio: float = 0.5
    """Part of an interval by which a report may be late before it counts as missed."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """What the detector knows of one node. Times are seconds of our monotonic clock."""

    liveness: str
    last_report_seconds: float | None
    reports_since_dead: int
    watching_since_seconds: float
    """When this detector began to listen, or could listen again: silence before it proves nothing."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """An event of the node lifecycle, with the evidence."""

    event: str
    evidence: str


def assess_node(sighting: Sighting, now: float, settings: DetectorSettings) -> Verdict | None:
    """Return the event that the evidence calls for, or `None` where nothing changes."""
    silence = now - max(
        sighting.last_report_seconds or sighting.watching_since_seconds,
        sighting.watching_since_seconds,
    )
    misses = _misses(silence, settings)
    if sighting.liveness in {JOINING, SUSPECT} and sighting.last_report_seconds and misses == 0:
        return Verdict("reported", "a report arrived")
    if sighting.liveness == DEAD:
        return _assess_recovery(sighting, misses, settings)
    if sighting.liveness in {ALIVE, SUSPECT} and misses >= settings.dead_after_misses:
        return Verdict("lost", f"no report for {silence:.1f} s, {misses} in a row missed")
    if sighting.liveness == ALIVE and misses >= settings.suspect_after_misses:
        return Verdict("missed", f"no report for {silence:.1f} s, {misses} in a row missed")
    return None


def _assess_recovery(sighting: Sighting, misses: int, settings: DetectorSettings) -> Verdict | None:
    enough = sighting.reports_since_dead >= settings.recover_after_reports
    if misses == 0 and enough:
        return Verdict("recovered", f"{sighting.reports_since_dead} reports in a row arrived")
    return None


def _misses(silence_seconds: float, settings: DetectorSettings) -> int:
    """Reports that should have come by now; each may be late by the grace."""
    late = settings.grace_ratio * settings.interval_seconds
    return max(0, int((silence_seconds - late) / settings.interval_seconds))
