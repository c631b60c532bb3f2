"""The loop that makes the wish true: snapshot, plan, apply; and the watch over that loop."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from workers.agent import logs
from workers.agent.attempts import AttemptRunner
from workers.agent.facts import RequestState
from workers.agent.journal import AttemptRow
from workers.agent.observed import observe
from workers.agent.scraper import Scraper, Target
from workers.agent.snapshot import Observer, Snapshot
from workers.agent.strays import StrayWatch
from workers.agent.supervisor import Decision, Policy, plan
from workers.engines.base import EngineAdapter, KvEventSource, PublishesKvEvents
from workers.protocol.addresses import parse_host_port
from workers.protocol.engines.sleeping import AWAKE, WAKING
from workers.protocol.observed import ReplicaObserved, UnknownProcess
from workers.protocol.wish import ReplicaSpec, WantedState

_INTERVAL_SECONDS = 0.5
_PASSES = 3
"""Plans in one round while each still has something to do: an end, then the launch after it."""
STALL_SECONDS = 10.0
"""A round that takes longer is taken for hung."""
_LOG_CHECK_SECONDS = 5.0

logger = logging.getLogger(__name__)


class StaleLoopError(Exception):
    """This loop was given up and replaced while it hung; it must not act any more."""


class Reconciler:
    """One node's reconcile loop. `tick` may also be called by hand."""

    def __init__(
        self,
        observer: Observer,
        runner: AttemptRunner,
        scraper: Scraper,
        strays: StrayWatch,
        adapters: Mapping[str, EngineAdapter],
        *,
        policy: Policy,
        log_cap_bytes: int,
    ) -> None:
        self._observer = observer
        self._runner = runner
        self._scraper = scraper
        self._strays = strays
        self._adapters = adapters
        self._policy = policy
        self._log_cap_bytes = log_cap_bytes
        self._logs_checked_at = 0.0
        self.replicas: tuple[ReplicaObserved, ...] = ()
        """As of the last round; replaced whole, so that any thread may read it."""
        self.unknown: tuple[UnknownProcess, ...] = ()
        self.applied_revision = 0
        self.last_error = ""

    def tick(self, gate: Gate | None = None) -> None:
        """Do one round. `gate` refuses to let a loop act that has been replaced."""
        gate = gate or Gate()
        for _ in range(_PASSES):
            if not self._round(gate):
                break

    def _round(self, gate: Gate) -> bool:
        """Snapshot, plan, apply, publish; True if another round may find more to do at once."""
        now = time.monotonic()
        snapshot = self._take(now)
        decisions = plan(snapshot.facts, wish_known=snapshot.wish is not None, now=now, policy=self._policy)
        self.last_error = self._apply(snapshot, decisions, now, gate)
        self._runner.rest(_needs(snapshot), now=now)
        if snapshot.wish is not None:
            self._runner.kv_pools.tend(_wanted(snapshot), now=now)
            self._runner.holders.tend(_accelerators(snapshot), now=now)
        self._scraper.watch(self._targets(snapshot))
        self._runner.sleeps.keep(row.key for row in snapshot.attempts.values())
        self._runner.sleeps.send_due(self._scraper.is_quiet)
        self._publish(snapshot, decisions, now)
        self._cut_logs(snapshot, now)
        return not self.last_error and any(decision.actions for decision in decisions)

    def _take(self, now: float) -> Snapshot:
        hoarding = self._runner.kv_pools.hoarding_seconds
        snapshot = self._observer.take({}, hoarding)
        open_attempts = {row.key for row in snapshot.attempts.values()}
        strays = self._strays.look(open_attempts, may_stop=snapshot.wish is not None, now=now)
        return self._observer.take(strays, hoarding) if strays else snapshot

    def _apply(self, snapshot: Snapshot, decisions: tuple[Decision, ...], now: float, gate: Gate) -> str:
        """Apply what was decided, each replica by itself. Returns the last error, if any."""
        error_text = ""
        for decision in decisions:
            replica_id = decision.replica_id
            for action in decision.actions:
                gate.check()
                try:
                    self._runner.apply(
                        action,
                        snapshot.specs.get(replica_id),
                        snapshot.attempts.get(replica_id),
                        now=now,
                    )
                except (OSError, sqlite3.Error, ValueError, TypeError, LookupError) as error:
                    # One bad replica is reported and skipped; the others go on.
                    error_text = f"{replica_id}: {type(error).__name__}: {error}"[:300]
                    if error_text != self.last_error:  # each round would say the same again
                        logger.exception("%s failed for %s", type(action).__name__, replica_id)
        return error_text

    def _targets(self, snapshot: Snapshot) -> list[Target]:
        targets = []
        for row in snapshot.attempts.values():
            adapter = self._adapters.get(row.engine)
            if adapter is not None and row.leader is not None and row.ports:
                host, port = _where_asked(row)
                targets.append(
                    Target(
                        key=row.key,
                        host=host,
                        port=port,
                        adapter=adapter,
                        leader=row.leader,
                        label=self._runner.label(*row.key),
                        api_key=self._runner.api_key(*row.key),
                        is_own=not row.head_address,
                        kv_sources=_kv_sources(adapter, snapshot.specs.get(row.replica_id), row),
                        log_file=Path(row.log_file),
                        asks_health=self._may_be_asked(row),
                        is_awaited=row.sleep_state == WAKING,
                        was_ready_at_seconds=row.ready_at,
                    )
                )
        return targets

    def _may_be_asked(self, row: AttemptRow) -> bool:
        """Whether an engine's memory is all there, which some need to tell how they are."""
        if row.sleep_state != WAKING:
            return row.sleep_state == AWAKE
        wakes = self._runner.sleeps.of(row.key, WAKING)
        return wakes is not None and wakes.outcome is RequestState.DONE

    def _publish(self, snapshot: Snapshot, decisions: tuple[Decision, ...], now: float) -> None:
        self.replicas = observe(snapshot, decisions, now=now)
        self.unknown = self._strays.report()
        if snapshot.wish is not None:
            self.applied_revision = snapshot.wish.revision

    def _cut_logs(self, snapshot: Snapshot, now: float) -> None:
        if now - self._logs_checked_at < _LOG_CHECK_SECONDS:
            return
        self._logs_checked_at = now
        for row in snapshot.attempts.values():
            logs.cut_if_overgrown(Path(row.log_file), self._log_cap_bytes)


def _where_asked(row: AttemptRow) -> tuple[str, int]:
    """Where an attempt's health is asked for: a member of a replica over several nodes is as its head is."""
    if not row.head_address:
        return row.host, row.ports[0]
    head = parse_host_port(row.head_address)
    return head.host, head.port or 0


def _kv_sources(
    adapter: EngineAdapter, spec: ReplicaSpec | None, row: AttemptRow
) -> tuple[KvEventSource, ...]:
    """Where an attempt publishes its KV events; nowhere known once its replica is not wanted any more."""
    if spec is None or row.head_address or not isinstance(adapter, PublishesKvEvents):
        return ()
    try:
        return adapter.kv_event_sources(spec.engine_options, row.ports)
    except ValueError:  # other options were launched than are wanted now: it is about to be replaced
        return ()


def _needs(snapshot: Snapshot) -> set[str]:
    """Names of engines and digests of models that launches may yet ask for."""
    specs = snapshot.specs.values()
    wanted = {name for spec in specs for name in (spec.engine, spec.model.digest)}
    return wanted | {row.engine for row in snapshot.attempts.values()}


def _wanted(snapshot: Snapshot) -> set[str]:
    return {key for key, spec in snapshot.specs.items() if spec.wanted is not WantedState.STOP}


def _accelerators(snapshot: Snapshot) -> set[str]:
    """Those of the replicas that are to be here."""
    wanted = (spec for spec in snapshot.specs.values() if spec.wanted is not WantedState.STOP)
    return {uuid for spec in wanted for uuid in spec.accelerator_uuids}


class Gate:
    """Held by one loop thread; shut when that thread is given up."""

    def __init__(self) -> None:
        self._shut = threading.Event()

    def shut(self) -> None:
        """Let the holder act no more."""
        self._shut.set()

    def check(self) -> None:
        """Raise `StaleLoopError` if the gate has been shut."""
        if self._shut.is_set():
            raise StaleLoopError


class ReconcileLoop:
    """Runs the reconciler in a thread and replaces the thread when it hangs."""

    def __init__(self, reconciler: Reconciler, stall_seconds: float = STALL_SECONDS) -> None:
        self._reconciler = reconciler
        self._stall_seconds = stall_seconds
        self._wake = threading.Event()
        self._gate = Gate()
        self._thread: threading.Thread | None = None
        self._round_ended_at = time.monotonic()
        self.restarts = 0
        self.error = ""

    def start(self) -> None:
        """Start (another) loop thread."""
        self._gate = Gate()
        self._round_ended_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(self._gate,), name="reconcile", daemon=True)
        self._thread.start()

    def stop(self, timeout_seconds: float = 10.0) -> None:
        """End the loop after the round under way."""
        self._gate.shut()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def wake(self) -> None:
        """Do a round now."""
        self._wake.set()

    @property
    def age_seconds(self) -> float:
        """Since the last round ended."""
        return time.monotonic() - self._round_ended_at

    def check(self) -> bool:
        """Replace the loop thread if it has ended or hangs; True if it was replaced."""
        alive = self._thread is not None and self._thread.is_alive()
        if alive and self.age_seconds < self._stall_seconds:
            return False
        logger.error("reconcile loop %s; starting another", "hangs" if alive else "ended")
        self.error = f"loop hung for {self.age_seconds:.0f} s" if alive else "loop thread ended"
        self._gate.shut()
        self.restarts += 1
        self.start()
        return True

    def _run(self, gate: Gate) -> None:
        while True:
            try:
                gate.check()
                self._reconciler.tick(gate)
                gate.check()
            except StaleLoopError:
                return
            except Exception as error:
                logger.exception("reconcile round failed")
                self.error = f"{type(error).__name__}: {error}"[:300]
            else:
                self.error = self._reconciler.last_error
            self._round_ended_at = time.monotonic()
            self._wake.wait(_INTERVAL_SECONDS)
            self._wake.clear()
