"""Watches the KV pools of all nodes, and writes down what is news: one event for each real change."""

from __future__ import annotations

import time
from uuid import UUID

from exaserve_ops.audit.selectors import subjects_with_flag
from exaserve_ops.controllers.fleet_state import FleetState, NodeView
from exaserve_ops.inventory.domain.liveness import ALIVE
from exaserve_ops.lib import clock
from exaserve_ops.serving.domain.kv_pools import (
    BLOCKS_AGAIN,
    OUT_OF_BLOCKS,
    THRASH_OVER,
    THRASHING,
    Flag,
    News,
    NodeMemory,
    NodeSight,
    WatchPolicy,
    follow_node,
)
from exaserve_ops.serving.domain.reports import HeartbeatReport
from exaserve_ops.serving.services.kv_pools import record_kv_news

ACTOR = "controller:kv"
LOOK_EVERY_SECONDS = 2.0
STALE_SECONDS = 5.0
"""Older reports say nothing about now."""


class KvWatch:
    """One look at all nodes a step, at what heartbeats have already said: nothing is asked or read.

    What it has in mind can be lost. A new leader takes the flags that are on from the record; a reclaim
    while nobody led shows in the pool's total, and has no event.
    """

    def __init__(self, state: FleetState, policy: WatchPolicy | None = None) -> None:
        self._state = state
        self._policy = policy or WatchPolicy()
        self._memories: dict[str, NodeMemory] = {}
        self._recorded: tuple[frozenset[str], frozenset[str]] | None = None

    def step(self) -> None:
        """Look at every node once."""
        if self._recorded is None:
            self._recorded = (
                subjects_with_flag("replica", OUT_OF_BLOCKS, BLOCKS_AGAIN),
                subjects_with_flag("replica", THRASHING, THRASH_OVER),
            )
        now = time.monotonic()
        news: dict[UUID, tuple[News, ...]] = {}
        memories: dict[str, NodeMemory] = {}
        for view in self._state.nodes():
            sight = _sight(view, now)
            before = self._memories.get(view.node_id)
            if sight is None:
                if before is not None:
                    memories[view.node_id] = before
                continue
            memory = before or self._begin(sight)
            memories[view.node_id], found = follow_node(memory, sight, now=now, policy=self._policy)
            if found:
                news[UUID(view.node_id)] = found
        if news:
            record_kv_news(news, actor=ACTOR, now=clock.now())
        self._memories = memories  # after the record: what could not be written is news again

    def _begin(self, sight: NodeSight) -> NodeMemory:
        """A node that is new to us begins with the flags on record, and the totals that it says."""
        out, thrash = self._recorded or (frozenset(), frozenset())
        here = {member.replica_id for pool in sight.pools for member in pool.members}
        return NodeMemory(
            out_of_blocks={replica_id: Flag(on=True) for replica_id in here & out},
            thrash={replica_id: Flag(on=True) for replica_id in sight.thrash_reasons.keys() & thrash},
            damaged={pool.pool_id: pool.damaged_blocks for pool in sight.pools},
        )


def _sight(view: NodeView, now: float) -> NodeSight | None:
    """What a node says of its pools now; `None` where that says nothing about now."""
    beat, heard_at = view.heartbeat, view.last_report_seconds
    if beat is None or heard_at is None or view.liveness != ALIVE or now - heard_at > STALE_SECONDS:
        return None
    return NodeSight(beat.kv_pools, _thrash_reasons(beat))


def _thrash_reasons(beat: HeartbeatReport) -> dict[str, str]:
    """Reasons of all replicas; one that tells nothing, as while it starts, swaps nothing either."""
    return {seen.replica_id: seen.load.kv_thrash_reason if seen.load else "" for seen in beat.replicas}
