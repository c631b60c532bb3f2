"""Judges which nodes are alive, and writes the verdicts down."""

from __future__ import annotations

import time
from collections.abc import Sequence
from uuid import UUID

from django.db import transaction

from exaserve_ops.controllers.fleet_state import FleetState, NodeView
from exaserve_ops.controllers.guard import Guard
from exaserve_ops.controllers.loop import KeyQueue
from exaserve_ops.controllers.outage import Outage
from exaserve_ops.controllers.ports import PulseSource
from exaserve_ops.health.domain.detector import (
    PULSE_AFTER_MISSED_RATIO,
    DetectorSettings,
    Sighting,
    Verdict,
    assess_node,
)
from exaserve_ops.health.domain.loss import fleet_loss
from exaserve_ops.health.services import grant_lease
from exaserve_ops.inventory.domain.liveness import ALIVE, SUSPECT
from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.services import advance_liveness, record_sightings
from exaserve_ops.lib import clock
from exaserve_ops.lib.lifecycle import IllegalTransitionError
from exaserve_ops.serving.services.replicas import record_node_lost

ACTOR = "controller:health"
SIGHTINGS_EVERY_SECONDS = 5.0
LOSS_EVERY_SECONDS = 1.0


class Detection:
    """The failure detector's loop: snapshot, assess, ask the guard, apply."""

    def __init__(
        self,
        state: FleetState,
        queue: KeyQueue,
        settings: DetectorSettings | None = None,
        *,
        pulses: PulseSource,
        guard: Guard | None = None,
    ) -> None:
        self._state = state
        self._queue = queue
        self._settings = settings or DetectorSettings()
        self._pulses = pulses
        self._guard = guard or Guard()
        self._outage = Outage(time.monotonic())
        self._sightings_at = 0.0
        self._loss_at = 0.0
        self._fleet_loss = 0.0

    def begin(self, idle_seconds: float) -> None:
        """Take over from a leader that was last heard of so long ago."""
        self._guard.adopt()
        self._outage.begin(time.monotonic(), idle_seconds, self._state.nodes())

    def step(self, last_read_seconds: float) -> None:
        """Assess every node once; `last_read_seconds` is when reports could last be read."""
        now = time.monotonic()
        views = self._state.nodes()
        self._outage.note(now, last_read_seconds, views)
        self._read_pulses(views, now)
        self._measure_loss(views, now)
        lost: list[tuple[NodeView, Verdict]] = []
        for view in views:
            if self._is_fresh(view, now):
                continue
            verdict = assess_node(self._sighting(view), now, self._settings)
            if verdict is None:
                continue
            if verdict.event == "lost":
                lost.append((view, verdict))
            else:
                self._apply(view, verdict)
        self._judge_lost(views, lost, now)
        self._record_sightings(views, now)

    def _judge_lost(
        self, views: Sequence[NodeView], lost: Sequence[tuple[NodeView, Verdict]], now: float
    ) -> None:
        due = [pair for pair in lost if not self._outage.excuses(pair[0], now)]
        withheld = self._guard.withhold(views, frozenset(view.node_id for view, _ in due), now)
        for view, verdict in lost:
            if view.node_id not in withheld and not self._outage.excuses(view, now):
                self._apply(view, verdict)
            elif view.liveness == ALIVE:
                self._apply(view, Verdict("missed", verdict.evidence))

    def _is_fresh(self, view: NodeView, now: float) -> bool:
        """Whether there is nothing to assess: what holds of nearly all nodes nearly always."""
        age = now - (view.last_report_seconds or 0.0)
        return view.liveness == ALIVE and age < PULSE_AFTER_MISSED_RATIO * self._settings.interval_seconds

    def _read_pulses(self, views: Sequence[NodeView], now: float) -> None:
        late = now - PULSE_AFTER_MISSED_RATIO * self._settings.interval_seconds
        quiet = {
            view.node_id: view
            for view in views
            if view.liveness in {ALIVE, SUSPECT} and (view.last_report_seconds or 0.0) < late
        }
        if not quiet:
            return
        for node_id, seen in self._pulses.read(list(quiet)).items():
            quiet[node_id].hear_pulse(seen, now)

    def _measure_loss(self, views: Sequence[NodeView], now: float) -> None:
        if now - self._loss_at >= LOSS_EVERY_SECONDS:
            self._loss_at = now
            self._fleet_loss = fleet_loss(view.loss for view in views)

    def _sighting(self, view: NodeView) -> Sighting:
        return Sighting(
            liveness=view.liveness,
            last_report_seconds=view.last_report_seconds,
            reports_since_dead=view.reports_since_dead,
            watching_since_seconds=self._outage.watching_since,
            last_pulse_seconds=view.last_pulse_seconds,
            loss_ratio=max(view.loss.ratio, self._fleet_loss),
            recent_deaths=len(view.deaths_seconds),
        )

    def _apply(self, view: NodeView, verdict: Verdict) -> None:
        """Write a verdict down; a death, with all that follows from it, in one transaction."""
        node_id = UUID(view.node_id)
        try:
            with transaction.atomic():
                node, epoch = self._record(node_id, view, verdict)
        except Node.DoesNotExist:
            self._state.drop(view.node_id)
            return
        except IllegalTransitionError:
            # Somebody else moved it, as by retiring the node: what is recorded holds.
            view.liveness = Node.objects.values_list("liveness", flat=True).get(pk=node_id)
            return
        with self._state.lock:
            view.liveness, view.name, view.lease_epoch = node.liveness, node.name, epoch
            if verdict.event == "lost":
                view.note_death(time.monotonic())
                view.recorded.clear()
            if verdict.event == "recovered":
                view.wish_sent_seconds = -1e9  # the whole wish, under the new lease
        self._queue.add("node", view.node_id)
        self._queue.add("routes", "all")
        self._queue.add("deployment", "all")

    def _record(self, node_id: UUID, view: NodeView, verdict: Verdict) -> tuple[Node, int]:
        """Write down what a verdict changes. Returns the node and the epoch of its lease."""
        now = clock.now()
        node = advance_liveness(node_id, verdict.event, reason=verdict.evidence, actor=ACTOR, now=now)
        epoch = view.lease_epoch
        if verdict.event == "lost":
            record_node_lost(node_id, reason=verdict.evidence, actor=ACTOR, now=now)
            # Whatever it says under the old lease counts for life, and for nothing else.
            epoch = grant_lease(node_id, boot_id=view.boot_id, renew=True, now=now).epoch
        return node, epoch

    def _record_sightings(self, views: Sequence[NodeView], now: float) -> None:
        if now - self._sightings_at < SIGHTINGS_EVERY_SECONDS:
            return
        self._sightings_at = now
        seen = {
            UUID(view.node_id): (clock.from_unix(view.last_report_unix_seconds), view.clock_skew_seconds)
            for view in views
            if view.last_report_unix_seconds is not None
        }
        if seen:
            record_sightings(seen)
