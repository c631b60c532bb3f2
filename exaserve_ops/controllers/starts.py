"""Lets replicas that have a place start, in turns: the one place where that is decided.

It is worked on as a key like any other, by one thread of the leader at a time, and decides from the record
alone; so limits hold although several deployments are planned at once, and through a change of leaders.
"""

from __future__ import annotations

from exaserve_ops.controllers.fleet_state import FleetState
from exaserve_ops.controllers.loop import KeyQueue
from exaserve_ops.lib import clock
from exaserve_ops.serving.domain.starts import plan_starts
from exaserve_ops.serving.selectors.starts import has_starts_to_decide, start_facts
from exaserve_ops.serving.services.starts import carry_out_starts

ACTOR = "controller:starts"
LOOK_AGAIN_SECONDS = 1.0
"""While somebody waits: that weights have come, or that time is up, rings no bell."""


class StartTurns:
    """One look at all that start and all that wait to."""

    def __init__(self, state: FleetState, queue: KeyQueue) -> None:
        self._state = state
        self._queue = queue

    def look(self, _key: str) -> None:
        """Decide, record, and have the nodes told whose replicas may start."""
        if not has_starts_to_decide():
            return
        now = clock.now()
        plan = plan_starts(start_facts(self._swarming()), now=now)
        for node_id in carry_out_starts(plan, actor=ACTOR, now=now):
            self._queue.add("node", str(node_id))
        if plan.held_up or plan.starting or plan.go:
            self._queue.add("starts", "all", after_seconds=LOOK_AGAIN_SECONDS)

    def _swarming(self) -> frozenset[str]:
        return frozenset(
            view.node_id
            for view in self._state.nodes()
            if view.heartbeat is not None
            and view.heartbeat.weights is not None
            and view.heartbeat.weights.in_swarms
        )
