"""All simulated nodes and their faults on one time line. Pure: no sockets, no clocks, no sleep."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from workers.protocol import pulse
from workers.simulation import faults as kinds
from workers.simulation.faults import Fault, Place, choose_targets, kind_of
from workers.simulation.identity import NodeIdentity
from workers.simulation.journal import BEGIN, END, FaultNote
from workers.simulation.node import GAP_SECONDS, NodeShape, SimulatedNode
from workers.simulation.piece_network import PieceNetwork
from workers.simulation.replica import SimulatedReplica

BEAT_SECONDS = 1.0
_USUAL_JITTER = 0.03
"""Share of an interval by which a healthy node's report is late."""


@dataclass(slots=True)
class _Member:
    """A node, and what the faults that hold now do to it."""

    node: SimulatedNode
    active: list[Fault] = field(default_factory=list)
    off: int = 0
    mute: int = 0
    """Of the faults that have it off, those that leave its connections open."""
    cut: int = 0
    beats_at: float = 0.0
    pulses_at: float = 0.0
    reported_at: float | None = None


class SimulatedFleet:
    """`step(now)` returns the reports that leave by then, in order; `take` brings a command in."""

    def __init__(
        self,
        identities: Sequence[NodeIdentity],
        *,
        shape: NodeShape,
        seed: int,
        run_id: str = "run",
        faults: Iterable[Fault] = (),
        places: Sequence[Place] = (),
        now: float,
        wall_offset_seconds: float,
    ) -> None:
        """`places`: the whole fleet where this is a part of it, so that all parts agree on targets."""
        self._seed = seed
        self._now = now
        self._rng = random.Random(f"{seed}:fleet")  # noqa: S311 - a model, not a secret
        self._wall_offset = wall_offset_seconds
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = 0
        self._out: list[bytes] = []
        self._notes: list[FaultNote] = []
        self._faults = 0
        self._pulses: dict[str, bytes] = {}
        self._pulse_rng = random.Random(f"{seed}:pulses")  # noqa: S311 - a model, not a secret
        self._by_id: dict[str, _Member] = {}
        self._by_name: dict[str, _Member] = {}
        self._by_address: dict[str, _Member] = {}
        self._pieces = PieceNetwork(shape.store, self._revisions_in_use, now=now)
        for identity in identities:
            store = self._pieces.add(identity.node_id)
            node = SimulatedNode(identity, shape, store, seed=seed, run_id=run_id, now=now)
            member = _Member(node)
            self._by_id[identity.node_id] = self._by_name[identity.name] = member
            self._by_address[identity.address] = member
            member.beats_at = now + self._rng.random() * BEAT_SECONDS
            self._at(member.beats_at, self._beat_of(member))
            member.pulses_at = now + self._pulse_rng.random() * pulse.INTERVAL_SECONDS
            self._at(member.pulses_at, self._pulse_of(member))
        self._places = places or [Place(i.name, i.rack) for i in identities]
        for fault in faults:
            self.add_fault(fault, now)

    def add_fault(self, fault: Fault, now: float) -> None:
        """Have one more fault, its times counted from now. Raises `FaultScriptError`."""
        chooser = random.Random(f"{self._seed}:fault:{self._faults}")  # noqa: S311 - as above
        self._faults += 1
        self._schedule(fault, choose_targets(fault, self._places, chooser), now)

    def node(self, name: str) -> SimulatedNode:
        """A node by its name."""
        return self._by_name[name].node

    def find_replica(self, address: str, port: int) -> tuple[SimulatedNode, SimulatedReplica] | None:
        """Whose port that is; `None` where the machine is off or nothing of ours is there."""
        member = self._by_address.get(address)
        if member is None or member.off:
            return None
        replicas = member.node.replicas.values()
        found = next((replica for replica in replicas if replica.port == port), None)
        return None if found is None else (member.node, found)

    def is_mute(self, address: str) -> bool:
        """Whether connections to this address stay open and nobody answers on them."""
        member = self._by_address.get(address)
        return member is not None and bool(member.off and member.mute)

    @property
    def nodes(self) -> list[SimulatedNode]:
        """All nodes."""
        return [member.node for member in self._by_name.values()]

    def next_due_seconds(self) -> float:
        """When something is due next."""
        return self._heap[0][0] if self._heap else float("inf")

    def step(self, now: float) -> list[bytes]:
        """Carry out what is due by now, and return the sealed reports that leave."""
        self._now = now
        self._pieces.advance(now)
        while self._heap and self._heap[0][0] <= now:
            at, _, action = heapq.heappop(self._heap)
            action(at)
        out, self._out = self._out, []
        return out

    def take_pulses(self) -> dict[str, bytes]:
        """The newest sealed pulse of each node that pulsed since the last call, by node id."""
        out, self._pulses = self._pulses, {}
        return out

    def take_notes(self) -> list[FaultNote]:
        """What faults began and ended since the last call."""
        out, self._notes = self._notes, []
        return out

    def is_reached(self, node_id: str) -> bool:
        """Whether commands arrive at a node; those for others wait on its queue."""
        member = self._by_id.get(node_id)
        return member is not None and not member.off and not member.cut

    def take(self, node_id: str, data: bytes, now: float) -> None:
        """Bring a command in; what it causes to be reported leaves with the next step."""
        if self.is_reached(node_id):
            self._out += self._by_id[node_id].node.take(data, now)

    def lost_contact(self) -> None:
        """The whole process could not report: every node introduces itself again."""
        for member in self._by_id.values():
            member.node.lost_contact()

    def _revisions_in_use(self, node_id: str) -> frozenset[str]:
        return self._by_id[node_id].node.revisions_in_use

    # ------------------------------------------------------------------ beats
    def _beat_of(self, member: _Member) -> Callable[[float], None]:
        return lambda at: self._beat(member, at)

    def _beat(self, member: _Member, at: float) -> None:
        delay, jitter, loss, clock = _weather(member.active)
        member.beats_at = max(member.beats_at + BEAT_SECONDS, at)
        late = delay + self._rng.random() * jitter * BEAT_SECONDS
        self._at(member.beats_at + late, self._beat_of(member))
        if member.off or member.cut:
            return
        if member.reported_at is not None and at - member.reported_at > GAP_SECONDS:
            member.node.lost_contact()
        for report in member.node.reports(at, at + self._wall_offset + clock):
            if loss == 0 or self._rng.random() >= loss:
                self._out.append(report)
        member.reported_at = at

    def _pulse_of(self, member: _Member) -> Callable[[float], None]:
        return lambda at: self._pulse(member, at)

    def _pulse(self, member: _Member, at: float) -> None:
        delay, jitter, loss, _ = _weather(member.active)
        member.pulses_at = max(member.pulses_at + pulse.INTERVAL_SECONDS, at)
        late = delay + self._pulse_rng.random() * jitter * pulse.INTERVAL_SECONDS
        self._at(member.pulses_at + late, self._pulse_of(member))
        if member.off or member.cut or (loss and self._pulse_rng.random() < loss):
            return
        self._pulses[member.node.identity.node_id] = member.node.pulse()

    # ------------------------------------------------------------------ faults
    def _schedule(self, fault: Fault, names: Iterable[str], start: float) -> None:
        begin = start + fault.at_seconds
        end = None if fault.for_seconds is None else begin + fault.for_seconds
        for name in names:
            member = self._by_name.get(name)
            if member is None:
                continue  # another process simulates it
            if isinstance(fault, kinds.Flapping):
                self._flap(member, fault, begin, end)
                continue
            self._at(begin, self._begin_of(member, fault))
            if end is not None:
                self._at(end, self._end_of(member, fault))

    def _begin_of(self, member: _Member, fault: Fault) -> Callable[[float], None]:
        def begin(at: float) -> None:
            _begin(member, fault, at)
            self._note(member, fault, BEGIN)

        return begin

    def _end_of(self, member: _Member, fault: Fault) -> Callable[[float], None]:
        def end(at: float) -> None:
            _end(member, fault, at)
            self._note(member, fault, END)

        return end

    def _note(self, member: _Member, fault: Fault, phase: str) -> None:
        """Write down when a fault took effect, which is a little after it was due."""
        note = FaultNote(
            kind=kind_of(fault),
            phase=phase,
            node=member.node.name,
            node_id=member.node.identity.node_id,
            monotonic_seconds=self._now,
            unix_seconds=self._now + self._wall_offset,
        )
        self._notes.append(note)

    def _flap(self, member: _Member, fault: kinds.Flapping, begin: float, end: float | None) -> None:
        def go_down(at: float) -> None:
            if end is not None and at >= end:
                return
            member.cut += 1
            self._note(member, fault, BEGIN)
            self._at(at + fault.down_seconds, come_up)

        def come_up(at: float) -> None:
            member.cut -= 1
            self._note(member, fault, END)
            self._at(at + fault.up_seconds, go_down)

        self._at(begin, go_down)

    def _at(self, due: float, action: Callable[[float], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (due, self._order, action))


def _weather(active: Iterable[Fault]) -> tuple[float, float, float, float]:
    """Delay in seconds, jitter and loss as ratios, and the clock's offset in seconds."""
    delay, jitter, loss, clock = 0.0, _USUAL_JITTER, 0.0, 0.0
    for fault in active:
        match fault:
            case kinds.SlowNode():
                delay += fault.delay_seconds
            case kinds.Jitter():
                jitter = max(jitter, fault.jitter_ratio)
            case kinds.ReportLoss():
                loss = max(loss, fault.loss_ratio)
            case kinds.ClockJump():
                clock += fault.offset_seconds
            case _:
                pass
    return delay, jitter, loss, clock


def _begin(member: _Member, fault: Fault, at: float) -> None:
    node = member.node
    member.active.append(fault)
    match fault:
        case kinds.NodeDeath() | kinds.RackLoss():
            member.off += 1
            member.mute += fault.manner == "mute"
            node.power_off(at)
        case kinds.Partition() | kinds.MassSilence():
            member.cut += 1
        case kinds.SlowNode():
            node.latency_factor *= fault.latency_factor
        case kinds.ReplicaCrash():
            node.crash_replicas(fault.replicas, at)
        case kinds.AgentRestart():
            node.start_agent()
        case _:
            _begin_of_weights(node, fault)


def _begin_of_weights(node: SimulatedNode, fault: Fault) -> None:
    match fault:
        case kinds.DiskFull():
            node.weights.full = True
        case kinds.CorruptWeights(where="given"):
            node.weights.gives_damaged = True
        case kinds.CorruptWeights():
            node.weights.damage(fault.pieces, node.revisions_in_use)
        case kinds.SlowLink():
            node.weights.link_factor *= fault.factor
        case _:
            pass


def _end(member: _Member, fault: Fault, at: float) -> None:
    node = member.node
    member.active.remove(fault)
    match fault:
        case kinds.NodeDeath() | kinds.RackLoss():
            member.off -= 1
            member.mute -= fault.manner == "mute"
            if not member.off:
                node.power_on(at)
        case kinds.Partition() | kinds.MassSilence():
            member.cut -= 1
        case kinds.SlowNode():
            node.latency_factor /= fault.latency_factor
        case _:
            _end_of_weights(node, fault)


def _end_of_weights(node: SimulatedNode, fault: Fault) -> None:
    match fault:
        case kinds.DiskFull():
            node.weights.full = False
        case kinds.CorruptWeights(where="given"):
            node.weights.gives_damaged = False
        case kinds.SlowLink():
            node.weights.link_factor /= fault.factor
        case _:
            pass
