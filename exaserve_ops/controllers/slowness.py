"""Watches for replicas that answer much later than their peers, and writes the verdicts down."""

from __future__ import annotations

from collections import defaultdict
from uuid import UUID

from exaserve_ops.controllers.changes import Remembered
from exaserve_ops.controllers.fleet_state import FleetState
from exaserve_ops.inventory.domain.liveness import ALIVE
from exaserve_ops.lib import clock
from exaserve_ops.serving.domain.observed import ReplicaLoad
from exaserve_ops.serving.domain.slowness import PeerSample, SlownessPolicy, Streak, follow
from exaserve_ops.serving.selectors import ready_and_slow
from exaserve_ops.serving.services.healing import record_slowness

ACTOR = "controller:slowness"
LOOK_EVERY_SECONDS = 5.0
STALE_SECONDS = 5.0
"""Older figures say nothing about now."""


class SlowWatch:
    """One look at all deployments a step. What it has in mind can be lost: a flag is then late."""

    def __init__(self, state: FleetState, policy: SlownessPolicy | None = None) -> None:
        self._state = state
        self._policy = policy or SlownessPolicy()
        self._ready = Remembered(ready_and_slow)
        self._streaks: dict[UUID, dict[str, Streak]] = {}

    def step(self) -> None:
        """Compare the replicas of each deployment once."""
        loads = self._loads()
        peers: defaultdict[UUID, list[PeerSample]] = defaultdict(list)
        recorded: dict[str, Streak] = {}
        for replica_id, deployment_id, reason in self._ready.get():
            if reason:
                recorded[replica_id] = Streak(slow=True, reason=reason)
            peers[deployment_id].append(_sample(replica_id, loads.get(replica_id)))
        self._streaks = {
            # One that is new to us begins with the verdict on record.
            deployment_id: follow({**recorded, **self._streaks.get(deployment_id, {})}, samples, self._policy)
            for deployment_id, samples in peers.items()
        }
        for streaks in self._streaks.values():
            for key, streak in streaks.items():
                if streak.slow != (key in recorded):
                    record_slowness(UUID(key), streak.reason, actor=ACTOR, now=clock.now())

    def _loads(self) -> dict[str, ReplicaLoad]:
        return {
            seen.replica_id: seen.load
            for view, seen in self._state.observed()
            if view.liveness == ALIVE and seen.load is not None and seen.load.age_seconds < STALE_SECONDS
        }


def _sample(replica_id: str, load: ReplicaLoad | None) -> PeerSample:
    if load is None:
        return PeerSample(replica_id)
    return PeerSample(replica_id, load.ttft_p50_seconds, load.itl_p50_seconds, load.requests_per_second)
