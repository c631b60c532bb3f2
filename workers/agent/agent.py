"""One running agent: its parts, wired together, and the main thread that watches over them."""

from __future__ import annotations

import datetime
import logging
import platform
import threading
import time
import uuid
from pathlib import Path

import msgspec

from workers.agent import AGENT_VERSION, logs, processes
from workers.agent.accelerator_loads import AcceleratorLoads
from workers.agent.attempts import AttemptRunner
from workers.agent.commands import CommandDesk, Reactions
from workers.agent.config import AgentConfig
from workers.agent.credential import LinkFile
from workers.agent.engine_caches import EngineCaches
from workers.agent.engines import EngineWatch, NodeEngines
from workers.agent.facts import Held
from workers.agent.footprints import Footprints
from workers.agent.foreign import ForeignWatch, Places
from workers.agent.hardware import HardwareWatch
from workers.agent.heartbeat import Reporter
from workers.agent.home import Home, HomeError, HomeLock
from workers.agent.intake import IntakeChild, IntakeServer
from workers.agent.journal import Journal
from workers.agent.leftovers import Leftovers
from workers.agent.memory import find_unseen
from workers.agent.memory_gate import MemoryGate, OnNode
from workers.agent.model_files import ModelVerifier
from workers.agent.pulse import PulseThread
from workers.agent.reconcile import ReconcileLoop, Reconciler
from workers.agent.scraper import Scraper
from workers.agent.session_moves import SessionMoves
from workers.agent.sleep_sight import SleepSight
from workers.agent.snapshot import Observer
from workers.agent.strays import StrayWatch
from workers.agent.supervisor import Policy
from workers.agent.tail import LogTailer
from workers.agent.weights import NodeWeights
from workers.probes.accelerators import AcceleratorProbe, Survey
from workers.probes.host import HostProbe
from workers.probes.limits import read_limits, usable_cpu_count, usable_memory_bytes
from workers.probes.mps import MpsProbe
from workers.protocol import v1
from workers.protocol.observed import AgentLiveness, ReplicaObserved
from workers.protocol.wish import ReplicaSpec, WantedState

DEFAULT_ADDRESS = "127.0.0.1"
_WATCH_SECONDS = 0.5
_STOOD_STILL_SECONDS = 5.0
_KEPT_FORGOTTEN_LOGS = 50

logger = logging.getLogger(__name__)


class Agent:
    """The agent of one node. `run` blocks until `stop` is called from a signal or a thread."""

    def __init__(
        self,
        home: Home,
        config: AgentConfig,
        *,
        engines: NodeEngines,
    ) -> None:
        identity = home.load_identity()
        if not identity.joined:
            raise HomeError(f"{home.root} has not joined a fleet yet: join first")
        home.create()
        self._lock = HomeLock(home)
        self._lock.acquire()
        address = config.address or identity.address or DEFAULT_ADDRESS
        self._home = home
        self._identity = identity
        self._config = msgspec.structs.replace(config, address=address)
        self._engines = EngineWatch(engines, config, self._take_over_engines)
        self._boot_id = str(uuid.uuid4())
        self._stopping = threading.Event()
        self._told_sharing: frozenset[str] = frozenset()
        self._journal = Journal(home.journal_file)
        self._host = HostProbe(home.root)
        self._scraper = Scraper()
        self._hardware = HardwareWatch(self._probe(), self._take_over_hardware)
        self._loads = AcceleratorLoads(lambda: self._hardware.survey, dcgm_url=config.dcgm_url)
        self._weights = NodeWeights(
            home, identity, self._config, self._journal, on_change=self._wake, tell=self._submit
        )
        self._caches = EngineCaches(
            home.engine_cache,
            self._engines.adapters,
            wanted=self._weights.wanted,
            ready_folder=lambda revision: self._weights.verdict(revision).folder,
        )
        self._leftovers = Leftovers(
            identity.node_id,
            home.logs,
            self._open_attempts,
            self._submit,
            grace_seconds=config.stop_grace_seconds,
        )
        self._footprints = Footprints(self._journal.attempts, self._replicas_on_cards)
        self._foreign = ForeignWatch(
            identity.node_id,
            self._probe(),
            self._own_sessions,
            self._places,
            on_misplaced=self._say_hello,
            describe=self._leftovers.describe,
            on_processes=self._footprints.take,
            on_memory=self._wake,
        )
        self._memory = MemoryGate(self._foreign, self._on_node, config.memory_wait_seconds)
        self._runner, self._reconciler = self._build_reconciler()
        self._loop = ReconcileLoop(self._reconciler)
        self._reporter = Reporter(
            identity.redis_url,
            identity.node_id,
            identity.key,
            make_hello=self._hello,
            make_heartbeat=self._heartbeat,
            note_link=LinkFile(home).write,
        )
        self._pulse = PulseThread(identity.redis_url, identity.node_id, identity.key, self._boot_id)
        self._tailer = LogTailer(
            identity.node_id, home.logs, self._journal, self._runner.api_key, self._reporter.submit
        )
        self._moves = SessionMoves(
            identity.node_id, self._journal.attempts, self._runner.api_key, self._reporter.submit
        )
        reactions = Reactions(
            wake=self._loop.wake,
            say_hello=self._reporter.say_hello,
            report=self._reporter.submit,
            take_weights=self._weights.take,
            tail_log=self._tailer.follow,
            end_process=self._leftovers.end,
            set_kv_limits=self._runner.kv_pools.take_limits,
            move_session=self._moves.begin,
            let_session_go=self._moves.let_go,
        )
        self._desk = CommandDesk(identity.node_id, identity.key, self._journal, reactions)
        self._intake = IntakeServer(home, self._desk.take)
        self._child = IntakeChild(home, self._intake, config.canary_seconds)

    def _build_reconciler(self) -> tuple[AttemptRunner, Reconciler]:
        node_id, grace = self._identity.node_id, self._config.stop_grace_seconds
        verifier = ModelVerifier(self._journal, on_verdict=self._wake, stored=self._weights)
        runner = AttemptRunner(
            home=self._home,
            identity=self._identity,
            config=self._config,
            journal=self._journal,
            verifier=verifier,
            adapters=self._engines.adapters,
            held=self._held,
        )
        runner.accelerators = self._hardware.survey.accelerators
        reconciler = Reconciler(
            Observer(
                node_id,
                self._journal,
                self._scraper,
                verifier,
                self._held,
                memory_notes=self._memory.notes,
                sleep=SleepSight(runner.sleeps, self._engines.adapters),
            ),
            runner,
            self._scraper,
            StrayWatch(node_id, grace),
            self._engines.adapters,
            policy=Policy(stop_grace_seconds=grace, starts_at_once=self._config.starts_at_once),
            log_cap_bytes=self._config.log_cap_bytes,
        )
        return runner, reconciler

    def _held(self, spec: ReplicaSpec) -> Held | None:
        here = self._runner.accelerators
        unseen = find_unseen(spec, here, complete=self._hardware.survey.complete)
        return unseen or self._memory.held(spec)

    def _on_node(self) -> OnNode:
        """What runs here by the newest wish; whatever else has an attempt is on its way out."""
        wish = self._journal.wish()
        specs = {spec.replica_id: spec for spec in wish.specs} if wish else {}
        going_on = (
            row for row in self._journal.attempts() if row.drain_since is None and row.term_sent_at is None
        )
        running = tuple(
            (specs[row.replica_id], row.ready_at is not None)
            for row in going_on
            if row.replica_id in specs and specs[row.replica_id].wanted is WantedState.RUN
        )
        return OnNode(self._runner.accelerators, running, self._runner.holders.sharing())

    def _wake(self) -> None:
        self._loop.wake()

    def stop(self) -> None:
        """Let `run` return. Replicas stay up; the next agent adopts them."""
        self._stopping.set()

    def run(self) -> None:
        """Start every part, watch over them, and take them down in order at the end."""
        logger.info("agent %s starts, node %s", AGENT_VERSION, self._identity.node_id)
        if self._journal.note_boot(processes.machine_boot_id(), now=time.monotonic()):
            logger.info("the machine was restarted: no earlier process is left")
        known = [row.replica_id for row in self._journal.replicas()]
        logs.prune_replicas(self._home.logs, known=known, keep=_KEPT_FORGOTTEN_LOGS)
        self._weights.start()
        self._caches.start()
        self._scraper.start()
        self._tailer.start()
        self._intake.start()
        self._loop.start()
        self._hardware.start()
        self._loads.start()
        self._engines.start()
        self._foreign.start()
        self._reporter.start()
        self._pulse.start()
        self._child.start()
        try:
            self._watch()
        finally:
            self._take_down()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._stopping.wait(_WATCH_SECONDS):
            now = time.monotonic()
            # After this whole process stood still, every part looks late; none of them is to blame.
            if now - before < _STOOD_STILL_SECONDS:
                self._check_parts()
            before = now

    def _check_parts(self) -> None:
        sharing = self._runner.holders.sharing()
        if sharing != self._told_sharing:
            # What is planned for a card depends on it.
            self._told_sharing = sharing
            self._say_hello()
        try:
            self._loop.check()
            self._child.check(redis_reached=self._reporter.reached)
        except Exception:  # top of the watch: no process to be had now is no reason to give up
            logger.exception("watching over the agent's parts failed")

    def _take_down(self) -> None:
        self._child.stop()
        self._intake.stop()
        self._moves.stop()
        self._foreign.stop()
        self._loads.stop()
        self._engines.stop()
        self._hardware.stop()
        self._loop.stop()
        self._caches.stop()
        self._weights.stop()
        self._runner.close()
        self._tailer.stop()
        self._scraper.stop()
        self._reporter.stop()
        self._pulse.stop()
        self._journal.close()
        self._lock.release()
        logger.info("agent ended; replicas go on")

    def _own_sessions(self) -> dict[int, str]:
        replicas = {row.pid: row.replica_id for row in self._journal.attempts() if row.pid is not None}
        return dict.fromkeys(self._runner.holders.pids(), "") | replicas

    def _open_attempts(self) -> set[tuple[str, int]]:
        return {row.key for row in self._journal.attempts()}

    def _submit(self, report: v1.Report) -> None:
        self._reporter.submit(report)

    def _probe(self) -> AcceleratorProbe:
        mps = MpsProbe(Path(self._config.mps_pipe_directory), Path(self._config.mps_log_directory))
        return AcceleratorProbe(self._identity.node_id, cpu_memory_bytes=self._config.memory_bytes, mps=mps)

    def _take_over_hardware(self, survey: Survey) -> None:
        self._runner.accelerators = survey.accelerators
        self._say_hello()

    def _take_over_engines(self, changed: frozenset[str]) -> None:
        """Tell of it, and launch what could not be launched without these engines."""
        wish = self._journal.wish()
        engines = {spec.replica_id: spec.engine for spec in (wish.specs if wish else ())}
        for row in self._journal.replicas():
            if row.refusal and engines.get(row.replica_id) in changed:
                self._journal.refuse(row.replica_id, row.generation, "")
        self._say_hello()
        self._wake()

    def _say_hello(self) -> None:
        self._reporter.say_hello()

    def _places(self) -> Places:
        wish = self._journal.wish()
        devices = self._hardware.survey.devices
        return Places(
            {spec.replica_id: spec.accelerator_uuids for spec in (wish.specs if wish else ())},
            {device.uuid: device.parent_uuid for device in devices if device.parent_uuid},
        )

    def _replicas_on_cards(self) -> dict[str, bool]:
        """Whether each replica that is wanted here runs on cards, and not on the machine's processors."""
        cards = {device.uuid for device in self._hardware.survey.accelerators if device.kind != "cpu"}
        wish = self._journal.wish()
        return {s.replica_id: bool(cards & set(s.accelerator_uuids)) for s in (wish.specs if wish else ())}

    def _replicas(self) -> tuple[ReplicaObserved, ...]:
        used = self._footprints.used_bytes
        return tuple(
            msgspec.structs.replace(seen, memory_used_bytes=used.get(seen.replica_id))
            for seen in self._reconciler.replicas
        )

    def _hello(self, reconnect: bool) -> v1.Hello:  # noqa: FBT001 - a callback with one argument
        survey, limits = self._hardware.survey, read_limits()
        return v1.Hello(
            node_id=self._identity.node_id,
            boot_id=self._boot_id,
            major=v1.MAJOR,
            minor=v1.MINOR,
            agent_version=AGENT_VERSION,
            hostname=platform.node(),
            address=self._config.address,
            accelerators=tuple(
                msgspec.structs.replace(found, shares_memory=found.uuid in self._told_sharing)
                for found in survey.accelerators
            ),
            engines=tuple(sorted(self._engines.offered.adapters)),
            engine_versions=dict(self._engines.offered.versions),
            cpu_count=usable_cpu_count(limits),
            memory_bytes=usable_memory_bytes(limits),
            labels=self._config.labels,
            simulated=self._config.simulated,
            reconnect=reconnect,
            topology=survey.topology,
            split_cards=survey.split_cards,
            mps_ready=survey.mps.ready,
            mps_note=survey.mps.note,
            probe_notes=(*survey.notes, *self._engines.offered.notes, *self._foreign.misplaced),
        )

    def _heartbeat(self, sequence: int) -> v1.Heartbeat:
        return v1.Heartbeat(
            node_id=self._identity.node_id,
            boot_id=self._boot_id,
            lease_epoch=self._desk.lease_epoch,
            sequence=sequence,
            sent_at_seconds=_wall_clock_seconds(),
            applied_revision=self._reconciler.applied_revision,
            liveness=AgentLiveness(
                intake_age_seconds=self._intake.age_seconds,
                intake_restarts=self._child.restarts,
                reconcile_age_seconds=self._loop.age_seconds,
                reconcile_restarts=self._loop.restarts,
                reconcile_error=self._loop.error,
            ),
            replicas=self._replicas(),
            unknown_processes=(*self._reconciler.unknown, *self._foreign.found),
            host=self._host.read(),
            kv_pools=self._runner.kv_pools.facts(),
            weights=self._weights.report(),
            accelerator_loads=self._loads.read(),
        )


def _wall_clock_seconds() -> float:
    """The node's wall clock: shown as skew by the control plane, and used for nothing else."""
    return datetime.datetime.now(tz=datetime.UTC).timestamp()  # noqa: TID251 - the one place, see above
