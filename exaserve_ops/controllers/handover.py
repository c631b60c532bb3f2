"""Waits for the conversations of replicas that are let go, and then has them end."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from uuid import UUID

from exaserve_ops.controllers.fleet_state import FleetState
from exaserve_ops.lib import clock
from exaserve_ops.serving.domain.lifecycle import READY
from exaserve_ops.serving.services.handover import record_handover
from exaserve_ops.sessions.domain.handover import LeavingReplica, decide_handover
from exaserve_ops.sessions.selectors.moves import leaving_replicas

ACTOR = "controller:moves"
LOOK_EVERY_SECONDS = 0.5


class HandoverWatch:
    """The moves themselves are planned elsewhere; here is only seen when they are over."""

    def __init__(self, state: FleetState) -> None:
        self._state = state

    def step(self) -> None:
        """Look at every replica that hands its conversations over."""
        now = clock.now()
        waiting = leaving_replicas(now=now)
        if not waiting:
            return
        reports = self._reports()
        for found in waiting:
            over = decide_handover(_with_report(found, reports.get(found.replica_id)), now)
            if over is None:
                continue
            pk, left = UUID(found.replica_id), over.left_behind
            record_handover(pk, left_behind=left, reason=over.why, actor=ACTOR, now=now)

    def _reports(self) -> dict[str, tuple[str, int | None, float | None]]:
        """State, open requests and when its node said so, by replica."""
        return {
            seen.replica_id: (
                seen.state,
                None
                if seen.load is None or seen.load.requests_running is None
                else seen.load.requests_running + (seen.load.requests_waiting or 0),
                view.last_report_unix_seconds,
            )
            for view, seen in self._state.observed()
        }


def _with_report(
    replica: LeavingReplica, report: tuple[str, int | None, float | None] | None
) -> LeavingReplica:
    if report is None:
        return replica
    state, open_requests, at = report
    reported_at = None if at is None else datetime.fromtimestamp(at, UTC)
    return replace(
        replica, engine_answers=state == READY, open_requests=open_requests, reported_at=reported_at
    )
