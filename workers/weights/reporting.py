"""What the agent tells of its weights, in heartbeats. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import msgspec

from workers.protocol.imports import ImportSeen
from workers.protocol.weights import (
    SwarmSeen,
    WeightsFrom,
    WeightsHeld,
    WeightsReport,
    WeightsState,
    WeightsWanted,
)
from workers.weights.fetching import FetchProgress
from workers.weights.inventory import HeldFacts
from workers.weights.job import FetchJob, Phase
from workers.weights.planning import StorePlan
from workers.weights.shelf import Disk

_MOST_HELD = 100
"""Revisions in one report."""
_MOST_SOURCES = 8
_MOST_IMPORTS = 50
_PAUSED = "paused"


@dataclass(frozen=True, slots=True)
class JobFacts:
    """One revision that is being fetched."""

    phase: Phase
    have_bytes: int
    progress: FetchProgress

    @classmethod
    def of(cls, job: FetchJob) -> JobFacts:
        """As it is now."""
        return cls(job.phase, job.have_bytes, job.progress())


@dataclass(frozen=True, slots=True)
class Moment:
    """All that a report is made from."""

    revision: int
    disk: Disk
    used_bytes: int
    wanted: Sequence[WeightsWanted]
    plan: StorePlan
    jobs: Mapping[str, JobFacts]
    failures: Mapping[str, str]
    """Why each was not to be had when it was last tried."""
    spoilt: Set[str]
    """Those of them that were not to be had by their own fault."""
    held: Mapping[str, HeldFacts]
    """Whole ones."""
    staged: Mapping[str, int]
    """Bytes that are verified of each that is staged and not being fetched."""
    in_swarms: bool = False
    piece_port: int = 0
    swarms: Mapping[str, SwarmSeen] = field(default_factory=dict)
    """By the manifest's digest."""
    imports: Sequence[ImportSeen] = ()


def make_report(moment: Moment) -> WeightsReport:
    """Tell of whole revisions, and of every one that is wanted."""
    wanted = {one.revision: one for one in moment.wanted}
    held = [_of_ready(key, facts, wanted=key in wanted) for key, facts in moment.held.items()]
    held += [_of_missing(one, moment) for key, one in wanted.items() if key not in moment.held]
    seen = {one.revision: moment.swarms.get(one.manifest_digest) for one in moment.wanted}
    held = [msgspec.structs.replace(one, swarm=seen.get(one.revision)) for one in held]
    held.sort(key=lambda one: (not one.wanted, one.revision))
    return WeightsReport(
        revision=moment.revision,
        disk_total_bytes=moment.disk.total_bytes,
        disk_free_bytes=moment.disk.free_bytes,
        used_bytes=moment.used_bytes,
        held=tuple(held[:_MOST_HELD]),
        in_swarms=moment.in_swarms,
        piece_port=moment.piece_port,
        imports=tuple(moment.imports[:_MOST_IMPORTS]),
    )


def _of_ready(revision: str, facts: HeldFacts, *, wanted: bool) -> WeightsHeld:
    return WeightsHeld(
        revision=revision,
        state=WeightsState.READY,
        total_bytes=facts.total_bytes,
        have_bytes=facts.total_bytes,
        wanted=wanted,
        in_use=facts.in_use,
        damaged_pieces=facts.damaged_pieces,
        sources=_sources(facts.sources),
    )


def _of_missing(one: WeightsWanted, moment: Moment) -> WeightsHeld:
    job = moment.jobs.get(one.revision)
    if job is not None:
        return _of_job(one, job)
    state, reason = _why_not(one, moment)
    return WeightsHeld(
        revision=one.revision,
        state=state,
        total_bytes=one.total_bytes,
        have_bytes=moment.staged.get(one.revision, 0),
        reason=reason,
        wanted=True,
        spoilt=one.revision in moment.spoilt,
    )


def _why_not(one: WeightsWanted, moment: Moment) -> tuple[WeightsState, str]:
    failure = moment.failures.get(one.revision, "")
    refused = moment.plan.refused.get(one.revision, "")
    waits = moment.plan.waits.get(one.revision, "")
    if refused:
        return WeightsState.FAILED, refused
    if one.paused:
        return WeightsState.PAUSED, _PAUSED
    if failure and waits == failure:
        return WeightsState.FAILED, failure
    return WeightsState.WAITING, waits or "begins in a moment"


def _of_job(one: WeightsWanted, job: JobFacts) -> WeightsHeld:
    progress = job.progress
    left = max(0, one.total_bytes - job.have_bytes)
    speed = progress.bytes_per_second
    return WeightsHeld(
        revision=one.revision,
        state=WeightsState.FETCHING,
        total_bytes=one.total_bytes,
        have_bytes=job.have_bytes,
        bytes_per_second=round(speed, 1),
        eta_seconds=round(left / speed, 1) if speed > 0 else None,
        reason=_doing(one, job),
        wanted=True,
        damaged_pieces=progress.damaged_pieces,
        sources=_sources(progress.sources),
    )


def _doing(one: WeightsWanted, job: JobFacts) -> str:
    if job.phase is Phase.FETCHING:
        ratio = job.have_bytes / one.total_bytes if one.total_bytes else 1.0
        return job.progress.note or f"{ratio:.0%} of {one.total_bytes:,} bytes"
    if job.phase is Phase.STAGING:
        return "going through what is here already"
    return "whole; being put into its place" if job.phase is Phase.ACTIVATING else job.phase.value


def _sources(counts: Mapping[tuple[str, str], int]) -> tuple[WeightsFrom, ...]:
    most = sorted(counts.items(), key=lambda item: -item[1])[:_MOST_SOURCES]
    return tuple(WeightsFrom(kind=key[0], bytes=count, name=key[1][:100]) for key, count in most)
