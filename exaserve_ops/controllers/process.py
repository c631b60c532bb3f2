"""The controllers' process: waits for the lead, then runs every loop until it is told to stop.

A leader that loses its lease ends with an error and is started again as a spare: it is simpler to be
sure of a new process than of a stopped one. While Postgres is away nobody can take the lead, so the
leader stays, does what needs no Postgres, and goes on with the rest afterwards.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from exaserve_ops.controllers import store_users
from exaserve_ops.controllers.detection import Detection
from exaserve_ops.controllers.drains import DrainWatch
from exaserve_ops.controllers.fleet_state import RECENT_DEATHS_SECONDS, FleetState
from exaserve_ops.controllers.handover import LOOK_EVERY_SECONDS as HANDOVER_SECONDS
from exaserve_ops.controllers.handover import HandoverWatch
from exaserve_ops.controllers.imports import LOOK_EVERY_SECONDS as IMPORTS_LOOK_SECONDS
from exaserve_ops.controllers.imports import ImportWatch
from exaserve_ops.controllers.ingest import Ingest
from exaserve_ops.controllers.installations import InstallationPorts, Installations
from exaserve_ops.controllers.kv_watch import LOOK_EVERY_SECONDS as KV_LOOK_SECONDS
from exaserve_ops.controllers.kv_watch import KvWatch
from exaserve_ops.controllers.live import LiveBuilder
from exaserve_ops.controllers.loop import LONGEST_LOOP_BACKOFF_SECONDS, KeyQueue, LoopHealth, run_loop
from exaserve_ops.controllers.moves import MovePolicy, SessionMoves
from exaserve_ops.controllers.node_rollups import NodeRollupRecorder
from exaserve_ops.controllers.ports import (
    AgentLink,
    Doorbell,
    FindingsReader,
    LivePublisher,
    ManifestShelf,
    PulseSource,
    ReportSource,
    RouteWriter,
    SessionPins,
    SwarmBoard,
    TurnSource,
)
from exaserve_ops.controllers.prewarm import LOOK_EVERY_SECONDS as PREWARM_LOOK_SECONDS
from exaserve_ops.controllers.prewarm import PrewarmWatch
from exaserve_ops.controllers.reach import PlaceToken, ReachRecorder, ReachSource
from exaserve_ops.controllers.reconcilers import Reconcilers
from exaserve_ops.controllers.rollouts import LOOK_EVERY_SECONDS as ROLLOUT_LOOK_SECONDS
from exaserve_ops.controllers.rollouts import RolloutDriver
from exaserve_ops.controllers.rollups import RollupRecorder
from exaserve_ops.controllers.slowness import LOOK_EVERY_SECONDS, SlowWatch
from exaserve_ops.controllers.turns import TurnRecorder
from exaserve_ops.controllers.validations import LOOK_EVERY_SECONDS as VALIDATION_LOOK_SECONDS
from exaserve_ops.controllers.validations import EngineProbe, ValidationDriver
from exaserve_ops.controllers.weights import LOOK_EVERY_SECONDS as WEIGHTS_LOOK_SECONDS
from exaserve_ops.controllers.weights import WeightsKeeper
from exaserve_ops.health.models import NodeLease
from exaserve_ops.health.selectors import recent_deaths
from exaserve_ops.health.services.leadership import record_new_leader
from exaserve_ops.inventory.selectors import nodes_in_service
from exaserve_ops.lib import clock
from exaserve_ops.sessions.domain.pace import MoveLimits

RESYNC_SECONDS = 60.0
UNSETTLED_SECONDS = 15.0
TABLE_LOOK_SECONDS = 2.0
"""Between two looks whether the store still has the route table."""
RECONCILE_THREADS = 2
URGENT = frozenset({"takeover", "routes"})
"""Somebody's requests wait for these: they have a thread that no plan of a large deployment holds up."""
LEAD_POLL_SECONDS = 0.25
RENEW_SECONDS = 0.5
GATHER_SECONDS = 0.1
"""Reports of so long are taken in together: the store tells when each of them arrived."""
MOVE_SECONDS = 0.5
"""Between two looks at moves of sessions."""
QUICK_BACKOFF_SECONDS = 1.0
"""Longest pause of what must notice at once that a store is back."""

_log = logging.getLogger(__name__)


class LostLeadError(RuntimeError):
    """Another controller may lead by now: this process must end."""


class Lead(Protocol):
    """The lead: held by one process at a time."""

    epoch: int
    holder: str
    idle_seconds: float

    def acquire(self) -> bool:
        """Try once."""
        ...

    def renew(self) -> bool:
        """Prolong it; `False` where another leads. Raises `ConnectionError` where nobody can say."""
        ...

    def fenced(self) -> AbstractContextManager[None]:
        """Let this thread begin transactions only while the lead is ours."""
        ...

    def release(self) -> None:
        """Give it up."""
        ...


@dataclass(frozen=True, slots=True)
class Adapters:
    """Everything outside, as the wiring built it."""

    lead: Lead
    reports: ReportSource
    pulses: PulseSource
    link: AgentLink
    routes: RouteWriter
    publisher: LivePublisher
    ingest_publisher: LivePublisher
    """One of its own for the ingest thread: clients are not shared between threads."""
    turns: TurnSource
    pins: SessionPins
    shelf: ManifestShelf
    swarm_board: SwarmBoard
    findings: FindingsReader
    doorbell: Doorbell
    reach: ReachSource
    place_token: PlaceToken
    installations: InstallationPorts
    """SSH to machines that agents are put on."""
    store_users: store_users.StoreUserKeeper | None
    """Keeps a user in Redis for each node; `None` where all nodes share one password."""
    move_limits: MoveLimits
    engine_probe: EngineProbe
    """Asks engines directly, for validations."""


class Controllers:
    """All loops of the leading controller."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self._stop = threading.Event()
        self._queue = KeyQueue(urgent=URGENT)
        self._state = FleetState()
        self._ingest = Ingest(
            adapters.reports, adapters.link, adapters.ingest_publisher, self._state, self._queue
        )
        self._detection = Detection(self._state, self._queue, pulses=adapters.pulses)
        self._reconcilers = Reconcilers(
            self._state, self._queue, adapters.link, adapters.routes, adapters.publisher
        )
        self._live = LiveBuilder(self._state, adapters.publisher, adapters.routes)
        self._node_rollups = NodeRollupRecorder(self._state)
        self._turns = TurnRecorder(adapters.turns, self._live, self._node_rollups)
        self._rollups = RollupRecorder(self._state)
        self._slowness = SlowWatch(self._state)
        self._kv = KvWatch(self._state)
        self._moves = SessionMoves(
            self._state, adapters.link, adapters.pins, MovePolicy(limits=adapters.move_limits)
        )
        self._weights = WeightsKeeper(self._state, adapters.link, adapters.shelf, adapters.swarm_board)
        self._imports = ImportWatch(self._state, adapters.findings)
        self._handover = HandoverWatch(self._state)
        self._prewarm = PrewarmWatch(self._state)
        self._reach = ReachRecorder(adapters.reach, adapters.place_token)
        self._drains = DrainWatch(self._queue)
        self._rollouts = RolloutDriver(self._queue)
        self._validations = ValidationDriver(self._state, adapters.engine_probe)
        self._installations = Installations(adapters.installations, self._stop)

    def stop(self) -> None:
        """Ask every loop to end."""
        self._stop.set()

    def run(self) -> None:
        """Wait for the lead, then lead. Raises `LostLeadError` where the lead is lost."""
        if not self._wait_for_lead():
            return
        _log.info("event=leading")
        try:
            self._lead()
        finally:
            self._stop.set()
            self._adapters.lead.release()

    def _wait_for_lead(self) -> bool:
        _log.info("event=waiting_for_lead")
        health = LoopHealth("lead")
        won = threading.Event()

        def ask() -> None:
            if self._adapters.lead.acquire():
                won.set()
                self._stop.set()  # ends the waiting loop only; cleared below

        run_loop(
            health,
            ask,
            self._stop,
            pause_seconds=LEAD_POLL_SECONDS,
            longest_backoff_seconds=QUICK_BACKOFF_SECONDS,
        )
        if won.is_set():
            self._stop.clear()
        return won.is_set()

    def _lead(self) -> None:
        lead = self._adapters.lead
        taken_at = time.monotonic()
        self._adapters.routes.claim(lead.epoch)
        self._load_state()
        self._detection.begin(lead.idle_seconds)
        threads = [
            self._thread("ingest", self._ingest.step, GATHER_SECONDS, QUICK_BACKOFF_SECONDS),
            self._thread("detect", self._detect, 0.25, QUICK_BACKOFF_SECONDS),
            self._thread("doorbell", self._listen, 0.0),
            self._thread("resync", self._reconcilers.resync, RESYNC_SECONDS),
            self._thread("unsettled", self._reconcilers.look_at_unsettled, UNSETTLED_SECONDS),
            self._thread("table", self._reconcilers.look_at_table, TABLE_LOOK_SECONDS, QUICK_BACKOFF_SECONDS),
            self._thread("live", self._live.step, 1.0),
            self._thread("turns", self._turns.step, 0.0),
            self._thread("rollups", self._rollups.step, 5.0),
            self._thread("node-rollups", self._node_rollups.step, 5.0),
            self._thread("slowness", self._slowness.step, LOOK_EVERY_SECONDS),
            self._thread("kv", self._kv.step, KV_LOOK_SECONDS),
            self._thread("moves", self._moves.step, MOVE_SECONDS),
            self._thread("handover", self._handover.step, HANDOVER_SECONDS),
            self._thread("weights", self._weights.step, WEIGHTS_LOOK_SECONDS),
            self._thread("imports", self._imports.step, IMPORTS_LOOK_SECONDS),
            self._thread("prewarm", self._prewarm.step, PREWARM_LOOK_SECONDS),
            self._thread("reach", self._reach.step, 0.5),
            self._thread("drains", self._drains.step, 1.0),
            self._thread("rollouts", self._rollouts.step, ROLLOUT_LOOK_SECONDS),
            self._thread("validations", self._validations.step, VALIDATION_LOOK_SECONDS),
            self._thread("installations", self._installations.step, 1.0),
            *self._user_threads(),
            self._thread("reconcile-urgent", self._work_urgently, 0.0),
            *(self._thread(f"reconcile-{n}", self._work, 0.0) for n in range(RECONCILE_THREADS)),
        ]
        for thread in threads:
            thread.start()
        gap_seconds = lead.idle_seconds + time.monotonic() - taken_at if lead.idle_seconds else 0.0
        _log.info("event=leader_changed epoch=%d gap_seconds=%.2f", lead.epoch, gap_seconds)
        with lead.fenced():
            record_new_leader(holder=lead.holder, epoch=lead.epoch, gap_seconds=gap_seconds, now=clock.now())
        self._keep_lead()
        for thread in threads:
            thread.join(timeout=10)

    def _keep_lead(self) -> None:
        failures = 0
        while not self._stop.wait(RENEW_SECONDS):
            try:
                kept = self._adapters.lead.renew()
            except ConnectionError as error:
                failures += 1
                if failures & (failures - 1) == 0:  # Postgres may be away for long
                    _log.warning("event=lead_not_renewed count=%d error=%s", failures, error)
                continue
            failures = 0
            if not kept:
                raise LostLeadError("another controller leads; starting again as a spare")

    def _load_state(self) -> None:
        """Begin from the record: who was alive, who keeps dying, and under which lease."""
        deaths = recent_deaths(clock.now(), within_seconds=RECENT_DEATHS_SECONDS)
        leases = {lease.node_id: lease for lease in NodeLease.objects.all()}
        for node in nodes_in_service():
            view = self._state.node(str(node.pk))
            view.name, view.liveness = node.name, node.liveness
            view.deaths_seconds = [time.monotonic() - age for age in deaths.get(str(node.pk), ())]
            lease = leases.get(node.pk)
            if lease is not None:
                view.lease_epoch, view.boot_id = lease.epoch, lease.boot_id

    def _thread(
        self,
        name: str,
        step: Callable[[], None],
        pause_seconds: float,
        longest_backoff_seconds: float = LONGEST_LOOP_BACKOFF_SECONDS,
    ) -> threading.Thread:
        def run() -> None:
            with self._adapters.lead.fenced():
                run_loop(
                    LoopHealth(name),
                    step,
                    self._stop,
                    pause_seconds=pause_seconds,
                    longest_backoff_seconds=longest_backoff_seconds,
                )

        return threading.Thread(target=run, name=name, daemon=True)

    def _user_threads(self) -> list[threading.Thread]:
        keeper = self._adapters.store_users
        if keeper is None:
            return []
        # Agents are refused until a Redis that lost its users has them again, so it tries often.
        pause = store_users.LOOK_EVERY_SECONDS
        return [self._thread("store-users", keeper.step, pause, QUICK_BACKOFF_SECONDS)]

    def _detect(self) -> None:
        self._detection.step(self._ingest.last_read_seconds)

    def _listen(self) -> None:
        for kind, key in self._adapters.doorbell.wait(1.0):
            self._reconcilers.ring(kind, key)

    def _work(self) -> None:
        self._reconcile(self._queue.take(0.5))

    def _work_urgently(self) -> None:
        self._reconcile(self._queue.take(0.5, urgent_only=True))

    def _reconcile(self, taken: tuple[str, str] | None) -> None:
        if taken is None:
            return
        started = time.monotonic()
        failed = True
        try:
            self._reconcilers.reconcile(*taken)
            failed = False
        finally:
            self._queue.done(*taken, failed=failed)
        took = time.monotonic() - started
        if took > 1.0:
            _log.warning("event=slow_reconcile kind=%s key=%s seconds=%.1f", *taken, took)
