"""Hours of a bad network in virtual time, judged by the product's own rules and bookkeeping.

Nothing is sent here: reports and pulses of every node arrive late or never, by a seed, and go through
the views that controllers keep (`NodeView`), the detector (`assess_node`, `fleet_loss`) and the guard
(`rule`), as `controllers.detection` and `controllers.guard` call them four times a second.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from exaserve_ops.controllers.fleet_state import NodeView
from exaserve_ops.health.domain.blast_radius import (
    GuardSettings,
    HeldSuspicion,
    WatchedNode,
    is_silence_beginning,
    rule,
)
from exaserve_ops.health.domain.detector import (
    PULSE_AFTER_MISSED_RATIO,
    DetectorSettings,
    SeenPulse,
    Sighting,
    Verdict,
    assess_node,
    is_late,
)
from exaserve_ops.health.domain.loss import fleet_loss
from exaserve_ops.inventory.domain.liveness import ALIVE, NODE_LIVENESS, SUSPECT

TICK_SECONDS = 0.25
_LOSS_TICKS = 4
_BOOT = "boot"


@dataclass(frozen=True, slots=True)
class Weather:
    """What the network does to each message."""

    loss_ratio: float = 0.1
    jitter_ratio: float = 0.9


@dataclass(slots=True)
class _Signs:
    """Signs of one kind of one node, on their way: the next to arrive, and its number."""

    interval_seconds: float
    phase_seconds: float
    number: int = 0
    arrives_at: float = 0.0
    is_lost: bool = False

    def advance(self, rng: random.Random, weather: Weather) -> None:
        self.number += 1
        late = rng.random() * weather.jitter_ratio * self.interval_seconds
        self.arrives_at = self.phase_seconds + self.number * self.interval_seconds + late
        self.is_lost = rng.random() < weather.loss_ratio


@dataclass(slots=True)
class _Node:
    view: NodeView
    rack: str
    reports: _Signs
    pulses: _Signs
    pulse: tuple[int, float] | None = None


@dataclass
class VirtualFleet:
    """Nodes and their observer, between which time passes only when told."""

    nodes: int
    racks: int = 16
    seed: int = 1
    weather: Weather = Weather()
    verdicts: Counter[str] = field(default_factory=Counter)
    """How often each event was ruled."""
    incidents: int = 0
    now: float = 0.0

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)  # noqa: S311 - a model, not a secret
        self._settings, self._guard = DetectorSettings(), GuardSettings()
        self._held: list[HeldSuspicion] = []
        self._loss_ratio = 0.0
        self._tick = 0
        self._members = [self._make_node(number) for number in range(self.nodes)]

    def pass_time(self, seconds: float, *, silent: Callable[[int], bool] = lambda _: False) -> None:
        """Let time pass; of nodes whose number is `silent` nothing arrives."""
        end = self.now + seconds
        quiet = [silent(number) for number in range(self.nodes)]
        while self.now < end:
            self.now += TICK_SECONDS
            self._tick += 1
            for node, is_quiet in zip(self._members, quiet, strict=True):
                self._deliver(node, is_quiet=is_quiet)
            if self._tick % _LOSS_TICKS == 0:
                self._loss_ratio = fleet_loss(node.view.loss for node in self._members)
            self._judge()

    def _make_node(self, number: int) -> _Node:
        view = NodeView(f"node-{number}", liveness=ALIVE)
        view.hear_heartbeat(_BOOT, 0, 0.0)
        view.hear(0.0, 0.0)
        reports = _Signs(self._settings.interval_seconds, self._rng.random())
        pulses = _Signs(self._settings.pulse_seconds, self._rng.random())
        for signs in (reports, pulses):
            signs.advance(self._rng, self.weather)
        return _Node(view, f"rack-{number % self.racks}", reports, pulses)

    def _deliver(self, node: _Node, *, is_quiet: bool) -> None:
        reports, pulses = node.reports, node.pulses
        while reports.arrives_at <= self.now:
            if not (reports.is_lost or is_quiet):
                node.view.hear_heartbeat(_BOOT, reports.number, reports.arrives_at)
                node.view.hear(reports.arrives_at, reports.arrives_at)
            reports.advance(self._rng, self.weather)
        while pulses.arrives_at <= self.now:
            if not (pulses.is_lost or is_quiet):
                node.pulse = (pulses.number, pulses.arrives_at)
            pulses.advance(self._rng, self.weather)

    def _judge(self) -> None:
        lost: dict[str, Verdict] = {}
        late = PULSE_AFTER_MISSED_RATIO * self._settings.interval_seconds
        for node in self._members:
            view = node.view
            if view.liveness == ALIVE and self.now - (view.last_report_seconds or 0.0) < late:
                continue
            if node.pulse is not None:
                view.hear_pulse(SeenPulse(_BOOT, node.pulse[0], self.now - node.pulse[1]), self.now)
            verdict = assess_node(self._sighting(view), self.now, self._settings)
            if verdict is not None and verdict.event == "lost":
                lost[view.node_id] = verdict
            elif verdict is not None:
                self._apply(view, verdict.event)
        if lost or self._held or any(node.view.liveness == SUSPECT for node in self._members):
            self._rule(frozenset(lost))

    def _rule(self, lost: frozenset[str]) -> None:
        watched = [
            WatchedNode(
                node.view.node_id, node.rack, node.view.liveness == SUSPECT or node.view.node_id in lost
            )
            for node in self._members
            if node.view.liveness in {ALIVE, SUSPECT}
        ]
        ruling = rule(watched, self._held, self.now, self._guard)
        self._held = list(ruling.standing)
        for suspicion in ruling.opened:
            self.incidents += 1
            self._held.append(HeldSuspicion(str(self.incidents), suspicion.scope, suspicion.node_ids))
        views = [node.view for node in self._members if node.view.liveness in {ALIVE, SUSPECT}]
        late = sum(is_late(view.last_report_seconds, view.last_pulse_seconds, self.now) for view in views)
        withheld = lost if is_silence_beginning(late, len(views), self._guard) else ruling.withheld
        for node in self._members:
            view = node.view
            if view.node_id not in lost:
                continue
            if view.node_id not in withheld:
                self._apply(view, "lost")
            elif view.liveness == ALIVE:
                self._apply(view, "missed")

    def _apply(self, view: NodeView, event: str) -> None:
        self.verdicts[event] += 1
        view.liveness = NODE_LIVENESS.next(view.liveness, event)
        if event == "lost":
            view.note_death(self.now)

    def _sighting(self, view: NodeView) -> Sighting:
        return Sighting(
            liveness=view.liveness,
            last_report_seconds=view.last_report_seconds,
            reports_since_dead=view.reports_since_dead,
            watching_since_seconds=0.0,
            last_pulse_seconds=view.last_pulse_seconds,
            loss_ratio=max(view.loss.ratio, self._loss_ratio),
            recent_deaths=len(view.deaths_seconds),
        )


def measure_virtual(*, nodes: int, hours: float, seed: int = 1) -> dict[str, float | int]:
    """Hours of loss and jitter, then a minute of silence of all and half a minute of their return."""
    fleet = VirtualFleet(nodes, racks=min(16, nodes), seed=seed)
    fleet.pass_time(hours * 3600.0)
    in_bad_network = fleet.verdicts["lost"]
    fleet.pass_time(60.0, silent=lambda _: True)
    fleet.pass_time(30.0)
    return {
        "virtual_hours": hours,
        "virtual_nodes": nodes,
        "virtual_false_deaths": fleet.verdicts["lost"],
        "virtual_false_deaths_in_bad_network": in_bad_network,
        "virtual_suspicions": fleet.verdicts["missed"],
        "virtual_incidents": fleet.incidents,
    }
