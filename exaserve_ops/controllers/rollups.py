"""Keeps a minute of samples of each replica and writes it down when the minute is over."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime
from uuid import UUID

from exaserve_ops.controllers.fleet_state import FleetState
from exaserve_ops.lib import clock
from exaserve_ops.telemetry.domain.rollups import LoadSample, MinuteSamples
from exaserve_ops.telemetry.services import record_minutes


class RollupRecorder:
    """What is in mind of the running minute is lost with the leader: one gap in a chart."""

    def __init__(self, state: FleetState) -> None:
        self._state = state
        self._minute = _minute_of(clock.now())
        self._samples: defaultdict[str, MinuteSamples] = defaultdict(MinuteSamples)

    def step(self) -> None:
        """Take one sample of everything; write the last minute down if it is over."""
        minute = _minute_of(clock.now())
        if minute != self._minute:
            done, self._samples = self._samples, defaultdict(MinuteSamples)
            finished, self._minute = self._minute, minute
            record_minutes(finished, {UUID(key): s.summarise() for key, s in done.items()})
        for _, seen in self._state.observed():
            if seen.load is None:
                continue
            sample = LoadSample(
                kv_used_ratio=seen.load.kv_used_ratio,
                requests_running=seen.load.requests_running,
                requests_waiting=seen.load.requests_waiting,
                generation_tokens_per_second=seen.load.generation_tokens_per_second,
                ttft_p95_seconds=seen.load.ttft_p95_seconds,
                itl_p95_seconds=seen.load.itl_p95_seconds,
                prefix_hit_ratio=seen.load.prefix_hit_ratio,
            )
            self._samples[seen.replica_id].samples.append(sample)


def _minute_of(moment: datetime) -> datetime:
    return moment.replace(second=0, microsecond=0)
