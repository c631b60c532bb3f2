"""Judges which nodes are alive, and writes the verdicts down."""

from __future__ import annotations

import time
from uuid import UUID

from exaserve_ops.controllers.fleet_state import FleetState, NodeView
from exaserve_ops.controllers.loop import KeyQueue
from exaserve_ops.health.domain.detector import (
    DetectorSettings,
    Sighting,
    Verdict,
    assess_node,
)
from exaserve_ops.health.services import grant_lease
from exaserve_ops.inventory.domain.liveness import DEAD
from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.services import advance_liveness, record_sightings
from exaserve_ops.lib import clock
from exaserve_ops.serving.services.replicas import record_node_lost

ACTOR = "controller:health"
DEAF_AFTER_SECONDS = 1.5
"""Reports could not be read for so long: silence of that time is ours, not the nodes'."""
SIGHTINGS_EVERY_SECONDS = 5.0


class Detection:
    """The failure detector's loop: snapshot, assess, apply."""

    def __init__(self, state: FleetState, queue: KeyQueue, settings: DetectorSettings | None = None) -> None:
        self._state = state
        self._queue = queue
        self._settings = settings or DetectorSettings()
        self._watching_since = time.monotonic()
        self._last_step = time.monotonic()
        self._sightings_at = 0.0

    def step(self, last_read_seconds: float) -> None:
        """Assess every node once; `last_read_seconds` is when reports could last be read."""
        now = time.monotonic()
        if now - last_read_seconds > DEAF_AFTER_SECONDS or now - self._last_step > DEAF_AFTER_SECONDS:
            # The observer was away. Everybody gets a full count of misses from here.
            self._watching_since = now
        self._last_step = now
        for view in self._state.nodes():
            verdict = assess_node(self._sighting(view), now, self._settings)
            if verdict is not None:
                self._apply(view, verdict)
        self._record_sightings(now)

    def _sighting(self, view: NodeView) -> Sighting:
        return Sighting(
            liveness=view.liveness,
            last_report_seconds=view.last_report_seconds,
            reports_since_dead=view.reports_since_dead,
            watching_since_seconds=self._watching_since,
        )

    def _apply(self, view: NodeView, verdict: Verdict) -> None:
        now = clock.now()
        node_id = UUID(view.node_id)
        if not Node.objects.filter(pk=node_id).exists():
            self._state.drop(view.node_id)
            return
        node = advance_liveness(node_id, verdict.event, reason=verdict.evidence, actor=ACTOR, now=now)
        with self._state.lock:
            view.liveness, view.name = node.liveness, node.name
            if node.liveness == DEAD:
                view.reports_since_dead = 0
                view.recorded.clear()
        if verdict.event == "lost":
            record_node_lost(node_id, reason=verdict.evidence, actor=ACTOR, now=now)
        if verdict.event == "recovered":
            # What it was told before it was lost no longer holds: a new epoch, and the whole wish.
            lease = grant_lease(node_id, boot_id=view.boot_id, renew=True, now=now)
            with self._state.lock:
                view.lease_epoch = lease.epoch
                view.wish_sent_seconds = -1e9
        self._queue.add("node", view.node_id)
        self._queue.add("routes", "all")
        self._queue.add("deployment", "all")

    def _record_sightings(self, now: float) -> None:
        if now - self._sightings_at < SIGHTINGS_EVERY_SECONDS:
            return
        self._sightings_at = now
        seen = {
            UUID(view.node_id): (clock.from_unix(view.last_report_unix_seconds), view.clock_skew_seconds)
            for view in self._state.nodes()
            if view.last_report_unix_seconds is not None
        }
        if seen:
            record_sightings(seen)
