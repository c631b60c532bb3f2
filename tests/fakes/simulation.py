"""A control plane for simulated nodes: seals commands, opens reports, keeps its own time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from workers.protocol import digests, v1
from workers.protocol.observed import ObservedState, ReplicaObserved
from workers.protocol.wish import ModelRef, ReplicaSpec, WantedState
from workers.simulation.faults import Fault
from workers.simulation.fleet import SimulatedFleet
from workers.simulation.identity import NodeIdentity
from workers.simulation.node import NodeShape

SECRET = b"s" * 32
WALL_OFFSET = 1_700_000_000.0


def identity(number: int, *, racks: int = 4) -> NodeIdentity:
    node_id = f"00000000-0000-0000-0000-{number:012d}"
    rack = number % racks + 1
    return NodeIdentity(
        name=f"sim-r{rack:02d}-n{number:03d}",
        node_id=node_id,
        node_key=digests.node_key(SECRET, node_id, 1).hex(),
        rack=f"rack-{rack}",
        supernode="supernode-1",
        address=f"127.101.0.{number + 1}",
    )


def spec(replica_id: str, **changes: Any) -> ReplicaSpec:
    fields: dict[str, Any] = {
        "replica_id": replica_id,
        "deployment": "chat",
        "generation": 1,
        "wanted": WantedState.RUN,
        "model": ModelRef(name="m", digest="d", source="file:///m"),
        "engine": "simulated-node",
    }
    return ReplicaSpec(**(fields | changes))


@dataclass
class Conversation:
    """The fleet, the time, and everything that was heard."""

    nodes: int = 1
    faults: tuple[Fault, ...] = ()
    seed: int = 7
    shape: NodeShape = field(default_factory=NodeShape)
    now: float = 1000.0
    heard: list[tuple[float, v1.Report]] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.identities = [identity(number) for number in range(self.nodes)]
        self._numbers = itertools.count(1)
        self.started_at = self.now
        self.fleet = SimulatedFleet(
            self.identities,
            shape=self.shape,
            seed=self.seed,
            faults=self.faults,
            now=self.now,
            wall_offset_seconds=WALL_OFFSET,
        )

    def pass_time(self, seconds: float, *, step_seconds: float = 0.25) -> None:
        """Let time pass in steps, as the process does."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step_seconds)
            for data in self.fleet.step(self.now):
                envelope = v1.open_envelope(data)
                report = v1.decode_report(envelope, node_key=self.key(envelope.node_id))
                self.raw.append(data)
                self.heard.append((self.now, report))

    def tell(self, command: v1.Command, number: int = 0, *, key: bytes | None = None) -> None:
        """Send a command to a node, sealed."""
        node_id = self.identities[number].node_id
        data = v1.encode_command(command, node_id=node_id, node_key=key or self.key(node_id))
        self.fleet.take(node_id, data, self.now)

    def wish(
        self, *specs: ReplicaSpec, revision: int = 1, epoch: int = 1, number: int = 0
    ) -> v1.ApplyDesired:
        """Tell a node its whole wish."""
        command = v1.ApplyDesired(**self.header(epoch), revision=revision, replicas=tuple(specs))
        self.tell(command, number)
        return command

    def header(self, epoch: int = 1) -> dict[str, Any]:
        """Fields that every command has."""
        return {"command_id": f"c{next(self._numbers)}", "lease_epoch": epoch, "deadline_seconds": 60.0}

    @staticmethod
    def key(node_id: str) -> bytes:
        return digests.node_key(SECRET, node_id, 1)

    def beats(self, number: int = 0, *, since: float = 0.0) -> list[tuple[float, v1.Heartbeat]]:
        """Heartbeats of a node, with when they left."""
        node_id = self.identities[number].node_id
        return [
            (at, report)
            for at, report in self.heard
            if isinstance(report, v1.Heartbeat) and report.node_id == node_id and at >= since
        ]

    def hellos(self, number: int = 0) -> list[v1.Hello]:
        """Introductions of a node."""
        node_id = self.identities[number].node_id
        return [r for _, r in self.heard if isinstance(r, v1.Hello) and r.node_id == node_id]

    def outcomes(self) -> list[tuple[str, str]]:
        """What became of the commands, in words."""
        return [(r.outcome, r.reason) for _, r in self.heard if isinstance(r, v1.CommandResult)]

    def replica(self, replica_id: str, number: int = 0) -> ReplicaObserved:
        """The newest sighting of a replica."""
        _, beat = self.beats(number)[-1]
        return next(seen for seen in beat.replicas if seen.replica_id == replica_id)

    def states(self, replica_id: str, number: int = 0) -> list[ObservedState]:
        """States that a replica was seen in, without repetitions."""
        seen = [r.state for _, b in self.beats(number) for r in b.replicas if r.replica_id == replica_id]
        return [state for state, _ in itertools.groupby(seen)]


def gaps(beats: Iterable[tuple[float, v1.Heartbeat]]) -> list[float]:
    """Seconds between heartbeats."""
    times = [at for at, _ in beats]
    return [later - earlier for earlier, later in itertools.pairwise(times)]
