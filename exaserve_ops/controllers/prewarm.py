"""Carries prewarm policies out: weights go to disks while it is quiet, by what heartbeats have said."""

from __future__ import annotations

from collections import Counter

from exaserve_ops.controllers.fleet_state import FleetState
from exaserve_ops.lib import clock
from exaserve_ops.weights.domain.prewarm import PrewarmPlan, plan_prewarm
from exaserve_ops.weights.selectors import enabled_policies, prewarm_nodes
from exaserve_ops.weights.services import carry_out_prewarm

ACTOR = "controller:prewarm"
LOOK_EVERY_SECONDS = 5.0
_SECONDS_OF_A_MINUTE, _MINUTES_OF_A_DAY = 60, 24 * 60


class PrewarmWatch:
    """One look at all policies a step."""

    def __init__(self, state: FleetState) -> None:
        self._state = state

    def step(self) -> None:
        """Plan each policy anew, and make its claims what the plan says."""
        policies = enabled_policies()
        if not policies:
            return
        busy, able = self._busy(), self._able()
        minute = int(clock.unix_seconds()) // _SECONDS_OF_A_MINUTE % _MINUTES_OF_A_DAY
        for rules in policies:
            nodes = prewarm_nodes(rules.revision, busy=busy, able=able)
            plan = plan_prewarm(rules, nodes, minute=minute)
            carry_out_prewarm(rules, plan, note=_note(plan), actor=ACTOR, now=clock.now())

    def _busy(self) -> dict[str, float]:
        """The fullest replica of each node, by the KV memory that is taken of it."""
        busy: dict[str, float] = {}
        for view, seen in self._state.observed():
            if seen.load is not None and seen.load.kv_used_ratio is not None:
                busy[view.node_id] = max(busy.get(view.node_id, 0.0), seen.load.kv_used_ratio)
        return busy

    def _able(self) -> frozenset[str]:
        """Nodes whose store can take something."""
        return frozenset(
            view.node_id
            for view in self._state.nodes()
            if view.heartbeat is not None
            and view.heartbeat.weights is not None
            and not view.heartbeat.weights.problem
        )


def _note(plan: PrewarmPlan) -> str:
    """What most of the waiting nodes wait for."""
    if not plan.waits:
        return ""
    reason, count = Counter(why for _, why in plan.waits).most_common(1)[0]
    return f"{len(plan.waits)} nodes wait, {count} of them: {reason}"
