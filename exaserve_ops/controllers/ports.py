"""What controllers need from outside. The wiring hands adapters in; tests hand in their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from exaserve_ops.health.domain.detector import SeenPulse
from exaserve_ops.routing.domain import records
from exaserve_ops.serving.domain.kv_pools import LimitsWish
from exaserve_ops.serving.domain.observed import WantedReplica
from exaserve_ops.serving.domain.reports import LogLines, Received
from exaserve_ops.serving.services.models import ModelFacts
from exaserve_ops.sessions.domain.moves import MoveOrder, Pin
from exaserve_ops.telemetry.domain.pictures import LivePicture
from exaserve_ops.weights.domain.swarm_notes import SwarmNotes
from exaserve_ops.weights.domain.wanted import WantedImport, WantedWeights


class ReportSource(Protocol):
    """Reports of agents, checked and translated; bad ones are dropped and counted."""

    def read(self, *, limit: int, block_seconds: float) -> list[Received]:
        """Reports not acknowledged yet, oldest first; those left by a dead controller included."""
        ...

    def acknowledge(self, positions: Sequence[str]) -> None:
        """Say that these are recorded."""
        ...


class PulseSource(Protocol):
    """Pulses of agents: a sign of life beside their reports."""

    def read(self, node_ids: Sequence[str], /) -> dict[str, SeenPulse]:
        """Newest pulse by node; nothing of a node that has none."""
        ...


class AgentLink(Protocol):
    """Sends to agents. Nothing here waits for an answer."""

    def send_wish(
        self, node_id: str, *, lease_epoch: int, revision: int, replicas: Sequence[WantedReplica]
    ) -> None:
        """Send the whole wish of a node."""
        ...

    def send_weights(
        self,
        node_id: str,
        *,
        lease_epoch: int,
        revision: int,
        weights: Sequence[WantedWeights],
        imports: Sequence[WantedImport],
    ) -> None:
        """Send all that a node is to have on its disk, and the models that it takes in."""
        ...

    def request_hello(self, node_id: str, *, lease_epoch: int, reason: str) -> None:
        """Ask an agent to introduce itself again."""
        ...

    def tail_log(self, node_id: str, *, lease_epoch: int, replica_id: str, seconds: float) -> None:
        """Ask for a replica's log for a while."""
        ...

    def end_process(
        self, node_id: str, *, lease_epoch: int, command_id: str, pid: int, start_ticks: int
    ) -> None:
        """Ask an agent to end a process that it left behind."""
        ...

    def set_kv_limits(self, wish: LimitsWish, *, lease_epoch: int, command_id: str) -> None:
        """Ask an agent for other limits of a replica in its KV pool."""
        ...

    def move_session(self, order: MoveOrder, *, lease_epoch: int, command_id: str) -> None:
        """Have a replica send a session's KV to another one."""
        ...

    def let_session_go(self, order: MoveOrder, *, lease_epoch: int) -> None:
        """Say to the source that the session lives elsewhere."""
        ...

    def forget(self, node_id: str, *, lease_epoch: int, replica_ids: Sequence[str]) -> None:
        """Say that the end of these replicas is recorded."""
        ...


class ManifestShelf(Protocol):
    """Where nodes read manifests. Raises `ConnectionError` where it is away."""

    def lay_out(self, digests: Collection[str], body_of: Callable[[str], bytes], /) -> int:
        """Have these manifests there for a while; asks for the bytes of those that are not yet."""
        ...


class SwarmBoard(Protocol):
    """Where people read of swarms. Nothing here fails: what is away is told of the next look."""

    def read(self) -> Mapping[str, SwarmNotes]:
        """What was noted last, by revision."""
        ...

    def publish(self, notes: Sequence[SwarmNotes], /) -> None:
        """Replace the notes of these swarms."""
        ...


class FindingsReader(Protocol):
    """Reads what nodes found when they took models in."""

    def read(self, data: bytes, digest: str, /) -> ModelFacts:
        """What was found. Raises `InvalidInputError` naming what is wrong with it."""
        ...


class SessionPins(Protocol):
    """Where conversations live, as gateways see it."""

    def find(self, model: str, session_id: str, replica_ids: Sequence[str], /) -> Pin | None:
        """Which of these replicas has it; `None` without an entry. Raises `ConnectionError`."""
        ...

    def repin(
        self, model: str, session_id: str, replica_id: str, expected_epoch: int, expected_turns: int = 0, /
    ) -> Pin:
        """Move it if its epoch and turns (0: any) are still those; says what holds now.

        Raises `ConnectionError`.
        """
        ...


class RouteWriter(Protocol):
    """Writes what gateways route by."""

    def claim(self, epoch: int, /) -> None:
        """From now on, refuse what leaders of an older epoch write."""
        ...

    def write_replicas(self, records: Mapping[str, records.RouteRecord], /) -> bool:
        """Make the table hold exactly these; says whether anything changed."""
        ...

    def write_keys(self, records: Mapping[str, records.KeyRecord], /) -> bool:
        """Make the key table hold exactly these, by SHA-256 hex."""
        ...

    def write_models(self, names: frozenset[str], /) -> bool:
        """Name the models that deployments serve."""
        ...

    def write_coming(self, names: frozenset[str], /) -> bool:
        """Name the models that a replica is on its way for."""
        ...

    def has_lost(self) -> bool:
        """Whether what gateways begin with is gone from the store."""
        ...

    def write_facts(self, facts: Sequence[records.NodeFacts], /) -> None:
        """Replace the load of these nodes."""
        ...

    def drop_facts(self, node_id: str, /) -> None:
        """Forget one node's load."""
        ...


class TurnSource(Protocol):
    """Finished requests, from gateways."""

    def read(self, block_seconds: float, /) -> list[tuple[str, records.TurnRecord]]:
        """Turns to record; waits for the first."""
        ...

    def ack(self, entry_ids: Sequence[str], /) -> None:
        """Say that these are recorded."""
        ...


class LivePublisher(Protocol):
    """Publishes for live pages."""

    def publish(self, picture: LivePicture) -> None:
        """Replace the picture and hint that it is new."""
        ...

    def announce_events(self, last_id: int) -> None:
        """Hint that there are new events."""
        ...

    def append_log(self, lines: LogLines, member: int) -> None:
        """Keep log lines for their readers, and hint."""
        ...


class Doorbell(Protocol):
    """Hints from services (`lib.hints`)."""

    def wait(self, seconds: float) -> list[tuple[str, str]]:
        """Return the (kind, key) pairs that rang, waiting up to `seconds` for the first."""
        ...
