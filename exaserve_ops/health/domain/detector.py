"""Who is alive: judged by when signs of life arrived, on the control plane's own monotonic clock.

There are two signs: the report of each second, and the pulse in between, which takes another thread
of the agent, another connection and no ingest. A network that loses every tenth message loses three
reports in a row several times an hour and node; it does not lose all pulses with them. How many
signs in a row must be missing follows from how many are lost anyway: three in a clean network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from exaserve_ops.inventory.domain.liveness import ALIVE, DEAD, JOINING, SUSPECT

PULSE_AFTER_MISSED_RATIO = 1.25
"""Pulses are read of a node whose report is late by more than a quarter of an interval."""


@dataclass(frozen=True, slots=True)
class DetectorSettings:
    """Intervals of the signs of life, and how sure a verdict must be."""

    interval_seconds: float = 1.0
    pulse_seconds: float = 0.5
    suspect_after_misses: int = 2
    dead_after_misses: int = 3
    grace_ratio: float = 0.5
    """Part of an interval by which a sign may be late before it counts as missed."""
    suspect_chance: float = 1e-6
    """How likely a suspicion may be mere loss, for one report."""
    dead_chance: float = 1e-9
    """How likely a death may be mere loss, for one report."""
    least_loss_ratio: float = 1e-3
    """Loss that is expected even where none was seen; with the chance above: three misses."""
    silent_limit_misses: int = 15
    """So many reports in a row and the node is lost, pulse or not: it tells us nothing any more."""
    recover_after_reports: int = 2
    most_recover_reports: int = 32
    """A node that keeps dying must stay up longer each time, up to this."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """What the detector knows of one node. Times are seconds of our monotonic clock."""

    liveness: str
    last_report_seconds: float | None
    reports_since_dead: int
    """In a row, without a gap."""
    watching_since_seconds: float
    """When this detector began to listen, or could listen again: silence before it proves nothing."""
    last_pulse_seconds: float | None = None
    """`None`: the node never pulsed, so its pulse is not missed."""
    loss_ratio: float = 0.0
    """Share of this node's, or the fleet's, reports that never arrived; whichever is larger."""
    recent_deaths: int = 0


@dataclass(frozen=True, slots=True)
class SeenPulse:
    """The newest pulse of a node, as it was read."""

    boot_id: str
    counter: int
    age_seconds: float


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
    misses = _misses(silence, settings.interval_seconds, settings)
    if sighting.liveness in {JOINING, SUSPECT} and sighting.last_report_seconds and misses == 0:
        return Verdict("reported", "a report arrived")
    if sighting.liveness == DEAD:
        return _assess_recovery(sighting, misses, settings)
    if sighting.liveness not in {ALIVE, SUSPECT}:
        return None
    if _is_lost(sighting, misses, now, settings):
        return Verdict("lost", _evidence(sighting, silence, misses, now))
    if sighting.liveness == ALIVE and _is_suspect(sighting, misses, now, settings):
        return Verdict("missed", _evidence(sighting, silence, misses, now))
    return None


def is_late(
    last_report_seconds: float | None,
    last_pulse_seconds: float | None,
    now: float,
    *,
    interval_seconds: float = 1.0,
) -> bool:
    """Whether neither a report nor a pulse came for more than an interval: too early for a suspicion."""
    newest = max(last_report_seconds or -math.inf, last_pulse_seconds or -math.inf)
    return now - newest >= PULSE_AFTER_MISSED_RATIO * interval_seconds


def needed_signs(loss_ratio: float, chance: float, settings: DetectorSettings) -> int:
    """How many signs in a row must be missing until mere loss is less likely than `chance`."""
    lost = min(0.5, max(settings.least_loss_ratio, loss_ratio))
    return math.ceil(math.log(chance) / math.log(lost) - 1e-9)


def needed_reports(recent_deaths: int, settings: DetectorSettings) -> int:
    """Reports in a row that bring a dead node back: doubled for each further recent death."""
    doubled = settings.recover_after_reports << min(16, max(0, recent_deaths - 1))
    return min(doubled, max(settings.most_recover_reports, settings.recover_after_reports))


def _is_lost(sighting: Sighting, misses: int, now: float, settings: DetectorSettings) -> bool:
    if misses < settings.dead_after_misses:
        return False
    if misses >= settings.silent_limit_misses:
        return True
    return _missing_signs(sighting, misses, now, settings) >= needed_signs(
        sighting.loss_ratio, settings.dead_chance, settings
    )


def _is_suspect(sighting: Sighting, misses: int, now: float, settings: DetectorSettings) -> bool:
    return misses >= settings.suspect_after_misses and _missing_signs(
        sighting, misses, now, settings
    ) >= needed_signs(sighting.loss_ratio, settings.suspect_chance, settings)


def _missing_signs(sighting: Sighting, misses: int, now: float, settings: DetectorSettings) -> int:
    """Reports and pulses missing in a row; none at all while the pulse goes on."""
    if sighting.last_pulse_seconds is None:
        return misses
    age = now - max(sighting.last_pulse_seconds, sighting.watching_since_seconds)
    pulses = _misses(age, settings.pulse_seconds, settings)
    return misses + pulses if pulses >= settings.suspect_after_misses else 0


def _assess_recovery(sighting: Sighting, misses: int, settings: DetectorSettings) -> Verdict | None:
    enough = sighting.reports_since_dead >= needed_reports(sighting.recent_deaths, settings)
    if misses == 0 and enough:
        return Verdict("recovered", f"{sighting.reports_since_dead} reports in a row arrived")
    return None


def _evidence(sighting: Sighting, silence: float, misses: int, now: float) -> str:
    parts = [f"no report for {silence:.1f} s, {misses} in a row missed"]
    if sighting.last_pulse_seconds is not None:
        pulse = now - max(sighting.last_pulse_seconds, sighting.watching_since_seconds)
        parts.append(f"no pulse for {pulse:.1f} s")
    if sighting.loss_ratio >= 0.01:  # noqa: PLR2004 - below it, loss says nothing about this silence
        parts.append(f"{sighting.loss_ratio:.0%} of its reports are lost on the way")
    return "; ".join(parts)


def _misses(silence_seconds: float, interval_seconds: float, settings: DetectorSettings) -> int:
    """Signs that should have come by now; each may be late by the grace."""
    late = settings.grace_ratio * interval_seconds
    return max(0, int((silence_seconds - late) / interval_seconds))
