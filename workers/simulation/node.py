"""One simulated node: takes sealed commands in, and says what a real agent would say. Pure."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from workers.protocol import digests, pulse, v1
from workers.protocol.observed import AgentLiveness, ObservedState, ReplicaObserved
from workers.protocol.wish import ReplicaSpec, WantedState
from workers.simulation.engine import EngineShape, Traffic
from workers.simulation.hardware import NONE_CUT, CutCards, make_accelerators, make_cut_cards, make_topology
from workers.simulation.identity import ENGINE, NodeIdentity
from workers.simulation.kv_pool import describe_pool, take_limits
from workers.simulation.machine import describe_cards, describe_host
from workers.simulation.replica import Durations, SimulatedReplica
from workers.simulation.weights import SimulatedStore, StoreShape

AGENT_VERSION = "simulated"
GAP_SECONDS = 5.0
"""A node that could not report for so long introduces itself again."""
HELLO_SECONDS = 3.0
_REMEMBERED_COMMANDS = 200
_STAMPS = 60_000
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class NodeShape:
    """What every node of a fleet is made of."""

    slots: int = 12
    first_port: int = 41_000
    """Every node has an address of its own, so all use the same ports."""
    accelerator_bytes: int = 64 * _GIB
    cut_cards: CutCards = NONE_CUT
    """Cut into slices, beside the accelerators."""
    engine: EngineShape = field(default_factory=EngineShape)
    traffic: Traffic = field(default_factory=Traffic)
    durations: Durations = field(default_factory=Durations)
    store: StoreShape = field(default_factory=StoreShape)
    """Of weights, on its disk."""
    stamp_queue: bool = False
    """`requests_waiting` tells when the report was made, in hundredths of a second of ten minutes:
    a benchmark reads from it how old a value is on the screen."""


class SimulatedNode:
    """One node from its boot to its end. `now` is monotonic, `wall` the node's own idea of the time."""

    def __init__(
        self,
        identity: NodeIdentity,
        shape: NodeShape,
        weights: SimulatedStore,
        *,
        seed: int,
        run_id: str,
        now: float,
    ) -> None:
        """`run_id`: new for each process, since no boot's name may ever be used twice."""
        self.weights = weights
        self.identity = identity
        self.name = identity.name
        self.lease_epoch = 0
        self.applied_revision = 0
        self.replicas: dict[str, SimulatedReplica] = {}
        self.latency_factor = 1.0
        self._key = bytes.fromhex(identity.node_key)
        self._shape = shape
        self._seed = seed
        self._run_id = run_id
        self._rng = random.Random(f"{seed}:{identity.name}")  # noqa: S311 - a model, not a secret
        self._boot = 0
        self._boot_id = ""
        self._sequence = 0
        self._pulses = 0
        self._specs: dict[str, ReplicaSpec] = {}
        self._tiles = tuple(
            tile.uuid for tile in make_accelerators(identity.node_id, shape.slots, shape.accelerator_bytes)
        )
        self._outcomes: OrderedDict[str, tuple[str, str]] = OrderedDict()
        self._taken_at: float | None = None
        self._hello_wanted = True
        self._hello_at = now - HELLO_SECONDS
        self._first_hello = True
        self.start_agent()

    # ------------------------------------------------------------------ events of its life
    def start_agent(self) -> None:
        """A new run of the agent: what is on disk stays, the run's name is a new one."""
        self._boot += 1
        self._boot_id = f"sim-{self._run_id}-{self._boot}"
        self._sequence = self._pulses = 0
        self._taken_at = None
        self._hello_wanted = self._first_hello = True

    def power_off(self, now: float) -> None:
        """Every process ends at once."""
        self.weights.off = True
        for replica in self.replicas.values():
            replica.power_off(now)

    def power_on(self, now: float) -> None:
        """Boot."""
        self.start_agent()
        self.weights.off = False
        for replica in self.replicas.values():
            replica.power_on(now)

    def crash_replicas(self, count: int, now: float) -> None:
        """Kill the engines of some replicas that have one."""
        serving = sorted(r.replica_id for r in self.replicas.values() if r.is_serving)
        for replica_id in self._rng.sample(serving, min(count, len(serving))):
            self.replicas[replica_id].crash(now)

    @property
    def revisions_in_use(self) -> frozenset[str]:
        """Weights of this node's disk that replicas run from, or are about to."""
        return frozenset(
            spec.model.digest
            for spec in self._specs.values()
            if spec.model.manifest_digest and spec.wanted is not WantedState.STOP
        )

    def lost_contact(self) -> None:
        """Reports did not arrive for a while: introduce the node again."""
        self._hello_wanted = True

    # ------------------------------------------------------------------ reports
    def reports(self, now: float, wall: float) -> list[bytes]:
        """What is said at one beat: a heartbeat, and a Hello before it where one is due."""
        no_lease = self.lease_epoch == 0 and now - self._hello_at >= HELLO_SECONDS
        reports: list[v1.Report] = []
        if self._hello_wanted or no_lease:
            reports.append(self._hello())
            self._hello_wanted = self._first_hello = False
            self._hello_at = now
        self._sequence += 1
        reports.append(self._heartbeat(now, wall))
        return [self.seal(report) for report in reports]

    def engine_token(self, replica: SimulatedReplica) -> str:
        """Bearer token that the engine of the replica's present attempt demands."""
        return digests.engine_api_key(self._key, replica.replica_id, replica.attempt)

    def pulse(self) -> bytes:
        """The next pulse: the second sign of life, beside the reports."""
        self._pulses += 1
        beat = pulse.Pulse(self._boot_id, self._pulses)
        return pulse.encode(beat, node_id=self.identity.node_id, node_key=self._key)

    def seal(self, report: v1.Report) -> bytes:
        """Encode a report with this node's seal."""
        return v1.encode_report(report, node_id=self.identity.node_id, node_key=self._key)

    def _hello(self) -> v1.Hello:
        identity, shape = self.identity, self._shape
        tiles = make_accelerators(identity.node_id, shape.slots, shape.accelerator_bytes)
        cards, slices = make_cut_cards(identity.node_id, shape.cut_cards, first_ordinal=shape.slots)
        return v1.Hello(
            node_id=identity.node_id,
            boot_id=self._boot_id,
            major=v1.MAJOR,
            minor=v1.MINOR,
            agent_version=AGENT_VERSION,
            hostname=identity.name,
            address=identity.address,
            accelerators=(*tiles, *slices),
            engines=(ENGINE,),
            cpu_count=104,
            memory_bytes=512 * _GIB,
            labels={"rack": identity.rack, "supernode": identity.supernode, "simulated": "true"},
            simulated=True,
            reconnect=not self._first_hello,
            topology=make_topology([tile.uuid for tile in tiles]),
            split_cards=cards,
            mps_ready=bool(cards),
        )

    def _heartbeat(self, now: float, wall: float) -> v1.Heartbeat:
        observed = tuple(self._observe(replica, now, wall) for replica in self.replicas.values())
        users = {
            uuid: seen
            for seen in observed
            if (spec := self._specs.get(seen.replica_id)) is not None
            for uuid in spec.accelerator_uuids
        }
        return v1.Heartbeat(
            node_id=self.identity.node_id,
            boot_id=self._boot_id,
            lease_epoch=self.lease_epoch,
            sequence=self._sequence,
            sent_at_seconds=wall,
            applied_revision=self.applied_revision,
            liveness=AgentLiveness(
                intake_age_seconds=None if self._taken_at is None else now - self._taken_at,
                reconcile_age_seconds=0.1,
            ),
            replicas=observed,
            host=describe_host(observed, self.weights.free_bytes),
            accelerator_loads=describe_cards(self._tiles, self._shape.accelerator_bytes, users),
            kv_pools=describe_pool(self.replicas, self._shape.engine, now),
            weights=self.weights.report(now, self.revisions_in_use),
        )

    def _observe(self, replica: SimulatedReplica, now: float, wall: float) -> ReplicaObserved:
        replica.latency_factor = self.latency_factor
        seen = replica.observe(now)
        if not self._shape.stamp_queue or seen.telemetry is None:
            return seen
        stamped = msgspec.structs.replace(seen.telemetry, requests_waiting=int(wall * 100) % _STAMPS)
        return msgspec.structs.replace(seen, telemetry=stamped)

    # ------------------------------------------------------------------ commands
    def take(self, data: bytes, now: float) -> list[bytes]:
        """Take one sealed command in; returns what is reported about it. Never raises for bad bytes."""
        try:
            envelope = v1.open_envelope(data)
            if envelope.node_id != self.identity.node_id:
                return []
            command = v1.decode_command(envelope, node_key=self._key)
        except v1.ProtocolError:
            return []
        self._taken_at = now
        known = self._outcomes.get(command.command_id)
        outcome = known or self._carry_out(command, now)
        if outcome is None:
            return []  # a canary that changed nothing
        self._remember(command.command_id, outcome)
        result = v1.CommandResult(
            node_id=self.identity.node_id,
            command_id=command.command_id,
            outcome=outcome[0],
            reason=outcome[1],
        )
        return [self.seal(result)]

    def _carry_out(self, command: v1.Command, now: float) -> tuple[str, str] | None:
        if isinstance(command, v1.RequestHello):
            self._hello_wanted = True
            return "done", ""
        if command.lease_epoch < self.lease_epoch:
            return "refused", f"lease epoch {command.lease_epoch} is over; now {self.lease_epoch}"
        return self._obey(command, now)

    def _obey(self, command: v1.Command, now: float) -> tuple[str, str] | None:
        match command:
            case v1.ApplyDesired():
                return self._apply(command, now)
            case v1.ForgetReplica():
                return self._forget(command.replica_ids)
            case v1.ApplyWeights():
                return self._apply_weights(command)
            case v1.SetKvLimits():
                refusal = take_limits(self.replicas, self._shape.engine, command)
                return ("refused", refusal) if refusal else ("done", "")
            case _:
                return "refused", "a simulated node has neither processes nor logs, nor KV to send"

    def _apply(self, command: v1.ApplyDesired, now: float) -> tuple[str, str] | None:
        renewed = command.lease_epoch > self.lease_epoch
        self.lease_epoch = command.lease_epoch
        if command.revision < self.applied_revision:
            return "done", f"revision {self.applied_revision} is known already"
        specs = self._merged(command.replicas)
        if specs == self._specs and command.revision == self.applied_revision and not renewed:
            return None
        self._specs, self.applied_revision = specs, command.revision
        for replica_id, spec in specs.items():
            self._replica(replica_id, now).follow(spec, now)
        for replica_id in self.replicas.keys() - specs.keys():
            self.replicas[replica_id].follow(None, now)
        return "done", ""

    def _apply_weights(self, command: v1.ApplyWeights) -> tuple[str, str]:
        self.weights.take(command, self.revisions_in_use)
        return "done", ""

    def _merged(self, wanted: Iterable[ReplicaSpec]) -> dict[str, ReplicaSpec]:
        """The new wish, in which no replica falls back to an older generation than is known."""
        merged = {}
        for spec in wanted:
            before = self._specs.get(spec.replica_id)
            newer = before is not None and before.generation > spec.generation
            merged[spec.replica_id] = before if before is not None and newer else spec
        return merged

    def _replica(self, replica_id: str, now: float) -> SimulatedReplica:
        known = self.replicas.get(replica_id)
        if known is None:
            known = self.replicas[replica_id] = SimulatedReplica(
                replica_id,
                host=self.identity.address,
                port=self._free_port(),
                shape=self._shape.engine,
                traffic=self._shape.traffic,
                durations=self._shape.durations,
                rng_of_attempt=self._rng_of_attempt,
                now=now,
            )
            known.missing_weights = self.weights.missing
        return known

    def _free_port(self) -> int:
        taken = {replica.port for replica in self.replicas.values()}
        first = self._shape.first_port
        return next(port for port in range(first, first + len(taken) + 1) if port not in taken)

    def _rng_of_attempt(self, replica_id: str, attempt: int) -> random.Random:
        return random.Random(f"{self._seed}:{replica_id}:{attempt}")  # noqa: S311 - a model, not a secret

    def _forget(self, replica_ids: Iterable[str]) -> tuple[str, str]:
        kept = [key for key in replica_ids if not self._forget_one(key)]
        return ("failed", f"still wanted or not gone: {', '.join(kept)}") if kept else ("done", "")

    def _forget_one(self, replica_id: str) -> bool:
        replica = self.replicas.get(replica_id)
        if replica is None:
            return True
        if replica_id in self._specs or replica.state is not ObservedState.STOPPED:
            return False
        del self.replicas[replica_id]
        return True

    def _remember(self, command_id: str, outcome: tuple[str, str]) -> None:
        self._outcomes[command_id] = outcome
        if len(self._outcomes) > _REMEMBERED_COMMANDS:
            self._outcomes.popitem(last=False)
