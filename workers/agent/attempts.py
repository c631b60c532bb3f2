"""Carrying out what the plan says: launches, signals, and the end of an attempt."""

from __future__ import annotations

import logging
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from workers.agent import logs, processes
from workers.agent.config import AgentConfig
from workers.agent.device_env import (
    DeviceError,
    MpsFolders,
    device_environment,
    mps_environment,
    with_devices,
)
from workers.agent.facts import HeldMemory
from workers.agent.holders import DeviceHolders, HolderStartingError, HolderState
from workers.agent.home import Home, Identity
from workers.agent.journal import AttemptRow, Journal
from workers.agent.kv_pools import KvPoolKeeper
from workers.agent.model_files import ModelMismatchError, ModelVerifier
from workers.agent.ports import NoPortError, PortRange, choose_ports
from workers.agent.processes import LaunchError, LaunchLabel
from workers.agent.ranks import place_rank, port_blocks
from workers.agent.sleep_requests import EngineCall, SleepRequests
from workers.agent.supervisor import (
    Action,
    BeginDrain,
    CheckModel,
    Close,
    ForgetCrashes,
    Kill,
    Launch,
    SetSleep,
    Terminate,
    launch_digest,
)
from workers.agent.templates import Template, Templates
from workers.engines import base
from workers.kv.pool import pools_folder
from workers.probes.limits import read_limits, usable_cpu_count
from workers.probes.mps import MpsProbe
from workers.protocol import digests
from workers.protocol.addresses import AddressError, HostPort
from workers.protocol.engines.kinds import EngineOptionError
from workers.protocol.engines.sleeping import AWAKE, FALLING_ASLEEP, WAKING
from workers.protocol.hardware import AcceleratorInfo
from workers.protocol.wish import ReplicaSpec

_KEPT_LOGS = 5
_TAIL_LINES = 20
_TAIL_WIDTH = 240
_REAP_SECONDS = 2.0

logger = logging.getLogger(__name__)


class AttemptRunner:
    """Hands and feet of the reconcile loop; it decides nothing."""

    def __init__(
        self,
        *,
        home: Home,
        identity: Identity,
        config: AgentConfig,
        journal: Journal,
        verifier: ModelVerifier,
        adapters: Mapping[str, base.EngineAdapter],
        held: HeldMemory = lambda _spec: None,
    ) -> None:
        self._held = held
        self.sleeps = SleepRequests()
        self._home = home
        self._identity = identity
        self._config = config
        self._journal = journal
        self._verifier = verifier
        self._adapters = adapters
        self._children: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self._templates = Templates(home.logs / "template.log", enabled=config.template_processes)
        self.kv_pools = KvPoolKeeper(pools_folder(identity.node_id, home.root), home.kv_blocks)
        self.holders = DeviceHolders(self.kv_pools.folder, home.logs, enabled=config.device_holders)
        self._mps = MpsProbe(Path(config.mps_pipe_directory), Path(config.mps_log_directory))
        self.accelerators: tuple[AcceleratorInfo, ...] = ()
        """As discovered; set before the first launch."""

    def api_key(self, replica_id: str, attempt: int) -> str:
        """Bearer token of an attempt's engine: derived, stored nowhere."""
        return digests.engine_api_key(self._identity.key, replica_id, attempt)

    def label(self, replica_id: str, attempt: int) -> LaunchLabel:
        """Launch label of an attempt on this node."""
        return LaunchLabel(self._identity.node_id, replica_id, attempt)

    def apply(
        self, action: Action, spec: ReplicaSpec | None, attempt: AttemptRow | None, *, now: float
    ) -> None:
        """Do one thing. What goes wrong with a launch is recorded with the replica."""
        # A launch that has to wait would say so each round.
        level = logging.DEBUG if isinstance(action, Launch) else logging.INFO
        logger.log(level, "%s: %s", type(action).__name__.lower(), action)
        match action:
            case CheckModel() | Launch():
                self._begin(action, spec, now)
            case BeginDrain():
                self._journal.change_attempt(_key(action), drain_since=now)
            case Terminate():
                self._terminate(action, attempt, now)
            case Kill():
                self._kill(action, attempt, now)
            case Close():
                self._close(action, attempt, now)
            case ForgetCrashes():
                self._journal.forget_crashes(action.replica_id)
            case SetSleep():
                self._set_sleep(action, attempt, now)

    def _begin(self, action: CheckModel | Launch, spec: ReplicaSpec | None, now: float) -> None:
        if spec is None:
            return  # the plan makes these only for what is wished for
        if isinstance(action, Launch):
            self._launch(action, spec, now)
        else:
            self._verifier.start(spec.model, spec.generation)

    # -- launch ----------------------------------------------------------------------------------
    def _launch(self, action: Launch, spec: ReplicaSpec, now: float) -> None:
        adapter = self._adapters.get(spec.engine)
        if adapter is None:
            known = ", ".join(sorted(self._adapters))
            self._refuse(spec, f"engine {spec.engine!r} is not known here; known: {known}")
            return
        if self._held(spec) is not None:
            return  # another launch of this very round took the room
        try:
            row, launch = self._prepare(action, spec, adapter, now)
        except (EngineOptionError, ModelMismatchError, DeviceError, AddressError) as error:
            self._refuse(spec, str(error))
            return
        except (NoPortError, HolderStartingError) as error:
            logger.warning("%s waits: %s", spec.replica_id, error)
            return
        template = self._templates.find(launch, engine=spec.engine, model=spec.model.digest, now=now)
        if template is not None and not template.is_ready:
            return  # its imports take as long as the engine's own would
        try:
            self._journal.open_attempt(row)
        except sqlite3.IntegrityError as error:
            logger.warning("%s: lease lost (%s), next round", spec.replica_id, error)
            return
        logger.info("launch: %s", action)
        self._start(row, launch, template)

    def _prepare(
        self, action: Launch, spec: ReplicaSpec, adapter: base.EngineAdapter, now: float
    ) -> tuple[AttemptRow, base.Launch]:
        adapter.check_options(spec.engine_options)
        replica_id, attempt = spec.replica_id, action.attempt
        holder = self._holder_of(spec, adapter, now)
        host = self._config.address
        blocks = port_blocks(adapter, spec)
        ports = choose_ports(
            [block.count for block in blocks],
            ports=PortRange(self._config.port_min, self._config.port_max),
            seed=f"{self._identity.node_id}:{replica_id}:{attempt}",
            leased=self._journal.leased_ports(),
            host=host,
        )
        member = spec.member
        rank = None if member is None else place_rank(member, host=host, blocks=blocks, ports=ports)
        runtime_dir = self._home.run / f"{replica_id}.{attempt}"
        # Left over from a launch that a crash interrupted: an attempt never reuses anything.
        shutil.rmtree(runtime_dir, ignore_errors=True)
        kinds = {accelerator.uuid: accelerator.kind for accelerator in self.accelerators}
        context = base.LaunchContext(
            replica_id=replica_id,
            attempt=attempt,
            served_model_name=spec.model.name,
            model_dir=self._verifier.folder(spec.model),
            host=host,
            ports=ports,
            api_key=self.api_key(replica_id, attempt),
            runtime_dir=runtime_dir,
            accelerator_uuids=spec.accelerator_uuids,
            accelerator_kind=next((kinds[uuid] for uuid in spec.accelerator_uuids if uuid in kinds), "cpu"),
            memory_bytes=spec.memory_bytes,
            cpu_threads=self._cpu_threads(),
            model_digest=spec.model.digest,
            weights_cache=self._home.weights,
            holder=holder,
            kv_pool_dir=self.kv_pools.folder,
            kv_disk_dir=self.kv_pools.disk_folder,
            kv_pool_bytes=self._config.kv_pool_bytes,
            engine_cache=self._home.engine_cache / spec.engine,
            weights_bytes=sum(file.size_bytes for file in spec.model.files),
            allows_remote_code=self._config.trust_remote_code,
            rank=rank,
            start_seconds=spec.start_seconds,
        )
        launch = adapter.build_launch(spec.engine_options, context)
        launch = replace(launch, env=with_devices(launch.env, self._devices_of(spec)))
        row = AttemptRow(
            replica_id=replica_id,
            attempt=attempt,
            generation=spec.generation,
            launch_digest=launch_digest(spec),
            engine=spec.engine,
            ports=ports,
            host=host,
            runtime_dir=str(runtime_dir),
            log_file=str(self._home.logs / replica_id / f"{attempt}.log"),
            launched_at=now,
        )
        if member is not None and rank is not None:
            row = msgspec.structs.replace(
                row,
                epoch=member.epoch,
                member_number=member.number,
                head_address=member.head_address,
                rendezvous=str(HostPort(rank.master_host, rank.master_port)),
            )
        return row, launch

    def _holder_of(self, spec: ReplicaSpec, adapter: base.EngineAdapter, now: float) -> Path | None:
        """Return where the holder of a replica's accelerator listens; `None`: it shares no memory there.

        Raises `HolderStartingError`: a round later it may be there; `DeviceError`.
        """
        shares = isinstance(adapter, base.SharesDeviceMemory) and adapter.shares_device_memory(
            spec.engine_options
        )
        # An MPS share is a limit on what a replica allocates itself, which shared memory would go round; and
        # what one node's part of a replica holds is nobody else's.
        if not shares or spec.mps is not None or spec.member is not None or len(spec.accelerator_uuids) != 1:
            return None
        (uuid,) = spec.accelerator_uuids
        if not any(here.uuid == uuid and here.kind == "cuda" for here in self.accelerators):
            return None
        devices = device_environment(spec.accelerator_uuids, self.accelerators)
        state = self.holders.find(uuid, devices, now=now)
        if state is HolderState.STARTING:
            raise HolderStartingError(f"the holder of {uuid} starts")
        return self.holders.socket(uuid) if state is HolderState.ANSWERS else None

    def _devices_of(self, spec: ReplicaSpec) -> dict[str, str]:
        """Return what shows a replica its accelerators and its share.

        Raises `DeviceError`, also where a share is wanted and no MPS control daemon answers.
        """
        devices = device_environment(spec.accelerator_uuids, self.accelerators)
        if spec.mps is None:
            return devices
        chosen = [a for a in self.accelerators if a.uuid in spec.accelerator_uuids]
        if not chosen or any(a.kind != "cuda" for a in chosen):
            raise DeviceError("an MPS share is asked for, and MPS is for CUDA cards and their slices only")
        slice_uuid = next((a.uuid for a in chosen if a.parent_uuid), "")
        state = self._mps.look(slice_uuid)
        if not state.ready:
            raise DeviceError(f"an MPS share is asked for: {state.note}")
        folders = MpsFolders(self._mps.folder_of(slice_uuid), self._mps.logs)
        return devices | mps_environment(spec.mps, len(chosen), folders)

    def _start(self, row: AttemptRow, launch: base.Launch, template: Template | None) -> None:
        try:
            pid = self._spawn(row, launch, template)
        except LaunchError as error:
            self._journal.change_attempt(row.key, stop_reason=str(error), stop_blames_engine=True)
            return
        stat = processes.read_stat(pid)
        ticks = stat.id.start_ticks if stat else None
        known = self._journal.change_attempt(row.key, pid=pid, start_ticks=ticks)
        if not known:
            # This loop was thought dead and another one closed the attempt: it must not live on.
            leader = stat.id if stat else None
            processes.kill_group(None, processes.members(leader, self.label(*row.key)))

    def _spawn(self, row: AttemptRow, launch: base.Launch, template: Template | None) -> int:
        """Start the shim and with it the engine; return the shim's pid. Raises `LaunchError`."""
        label, runtime_dir, log_file = self.label(*row.key), Path(row.runtime_dir), Path(row.log_file)
        if template is not None:
            return template.start_attempt(launch, label, runtime_dir=runtime_dir, log_file=log_file)
        child = processes.start_attempt(launch, label, runtime_dir=runtime_dir, log_file=log_file)
        self._children[row.key] = child
        return child.pid

    def _cpu_threads(self) -> int:
        if self._config.cpu_threads:
            return self._config.cpu_threads
        wish = self._journal.wish()
        share = len(wish.specs) if wish else 1
        return max(1, usable_cpu_count(read_limits()) // max(1, share))

    def _refuse(self, spec: ReplicaSpec, reason: str) -> None:
        logger.warning("%s cannot be launched: %s", spec.replica_id, reason)
        self._journal.refuse(spec.replica_id, spec.generation, reason)

    # -- sleep -----------------------------------------------------------------------------------
    def _set_sleep(self, action: SetSleep, attempt: AttemptRow | None, now: float) -> None:
        if attempt is None:
            return
        changes: dict[str, object] = {"sleep_state": action.state}
        if action.restarts_clock:
            changes["sleep_since"] = now
        if action.note:
            changes["sleep_note"] = action.note
        if action.state == AWAKE and attempt.sleep_since is not None:
            changes["woke_in"] = now - attempt.sleep_since
        # Written down first: after a crash in between, the request is sent again.
        self._journal.change_attempt(attempt.key, **changes)
        request = _sleep_request(self._adapters.get(attempt.engine), action.state)
        if request is not None:
            place = (attempt.host, attempt.ports[0], self.api_key(*attempt.key))
            self.sleeps.begin(attempt.key, action.state, EngineCall(*place, request, action.at_most_seconds))

    # -- end -------------------------------------------------------------------------------------
    def _terminate(self, action: Terminate, attempt: AttemptRow | None, now: float) -> None:
        # Written down first: after a crash in between, the grace period runs and SIGKILL follows.
        self._journal.change_attempt(
            _key(action),
            term_sent_at=now,
            stop_reason=action.why,
            stop_blames_engine=action.blames_engine,
            stalled=action.stalled,
        )
        if attempt is not None and attempt.leader is not None:
            processes.send(attempt.leader, signal.SIGTERM)

    def _kill(self, action: Kill, attempt: AttemptRow | None, now: float) -> None:
        self._journal.change_attempt(_key(action), kill_sent_at=now)
        leader = attempt.leader if attempt else None
        group = processes.members(leader, self.label(*_key(action)))
        processes.kill_group(leader, group)

    def _close(self, action: Close, attempt: AttemptRow | None, now: float) -> None:
        self._reap(_key(action))
        if attempt is None:
            return
        runtime_dir, log_file = Path(attempt.runtime_dir), Path(attempt.log_file)
        tail = logs.last_lines(
            log_file,
            count=_TAIL_LINES,
            width=_TAIL_WIDTH,
            secrets=[self.api_key(*attempt.key)],
        )
        self._journal.close_attempt(
            action, exit_record=processes.read_exit(runtime_dir), log_tail=tail, now=now
        )
        shutil.rmtree(runtime_dir, ignore_errors=True)
        logs.prune_attempts(log_file.parent, keep=_KEPT_LOGS)

    def rest(self, needed: Iterable[str], *, now: float) -> None:
        """Let go of what only launches of other engines and models than these would need."""
        self._templates.rest(needed, now=now)

    def close(self) -> None:
        """End what serves launches; replicas go on."""
        self._templates.stop()

    def reap(self) -> None:
        """Collect the shims that have ended; those that still run are nobody's children then."""
        for key in tuple(self._children):
            self._reap(key)

    def _reap(self, key: tuple[str, int]) -> None:
        child = self._children.pop(key, None)
        if child is not None:
            with suppress(subprocess.TimeoutExpired):
                child.wait(_REAP_SECONDS)


def _sleep_request(adapter: base.EngineAdapter | None, state: str) -> base.EngineRequest | None:
    """What an engine is asked for so that it comes into a state; `None`: that takes no asking."""
    if adapter is None or not isinstance(adapter, base.Sleeps):
        return None
    return {FALLING_ASLEEP: adapter.sleep_request(), WAKING: adapter.wake_request()}.get(state)


def _key(action: BeginDrain | Terminate | Kill | Close) -> tuple[str, int]:
    return (action.replica_id, action.attempt)
