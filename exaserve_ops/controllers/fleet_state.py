"""What the leading controller has in mind of each node: the newest reports, never the only copy.

Everything here can be lost with the process: the truth is in Postgres, and each heartbeat repeats
the whole observed state of its node.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from exaserve_ops.health.domain.detector import SeenPulse
from exaserve_ops.health.domain.loss import LossCount
from exaserve_ops.inventory.domain.facts import NodeFacts
from exaserve_ops.inventory.domain.liveness import JOINING
from exaserve_ops.serving.domain.observed import ObservedReplica
from exaserve_ops.serving.domain.reports import HeartbeatReport

Fingerprint = tuple[object, ...]

ROW_GAP_SECONDS = 2.5
"""A longer silence and the next heartbeat is the first of a new row."""
RECENT_DEATHS_SECONDS = 600.0


@dataclass(slots=True)
class NodeView:
    """One node. Times are seconds of our monotonic clock unless they say otherwise."""

    node_id: str
    name: str = ""
    liveness: str = JOINING
    lease_epoch: int = 0
    boot_id: str = ""
    last_report_seconds: float | None = None
    last_report_unix_seconds: float | None = None
    reports_since_dead: int = 0
    heard: tuple[str, int] = ("", -1)
    """Agent run and sequence of the newest heartbeat that arrived, recorded or not."""
    loss: LossCount = field(default_factory=LossCount)
    last_pulse_seconds: float | None = None
    pulse: tuple[str, int] = ("", -1)
    deaths_seconds: list[float] = field(default_factory=list)
    sequence: int = -1
    clock_skew_seconds: float | None = None
    heartbeat: HeartbeatReport | None = None
    introduced: NodeFacts | None = None
    """What the agent last said about itself, as recorded."""
    hello_asked_seconds: float = -1e9
    wish_sent_seconds: float = -1e9
    degraded: Fingerprint = ("", False, False, ())
    recorded: dict[str, Fingerprint] = field(default_factory=dict)
    """What was last written down of each replica, so that only changes are written."""
    ended: dict[str, float] = field(default_factory=dict)
    """Replicas that it still reports although their end is recorded, with when to have them forgotten."""

    def hear(self, now: float, unix_seconds: float) -> None:
        """Take note that the node said anything at all."""
        self.last_report_seconds, self.last_report_unix_seconds = now, unix_seconds

    def hear_heartbeat(self, boot_id: str, sequence: int, now: float) -> None:
        """Count a heartbeat: those in a row bring a dead node back, those missing tell of loss."""
        if self.last_report_seconds is not None and now - self.last_report_seconds > ROW_GAP_SECONDS:
            self.reports_since_dead = 0
        self.reports_since_dead += 1
        known_boot, known_sequence = self.heard
        if boot_id == known_boot:
            self.loss = self.loss.after(known_sequence, sequence)
            sequence = max(sequence, known_sequence)
        self.heard = (boot_id, sequence)

    def hear_pulse(self, seen: SeenPulse, now: float) -> None:
        """Take a pulse for a sign of life, unless it is one that was seen before."""
        known_boot, known_counter = self.pulse
        if seen.boot_id == known_boot and seen.counter <= known_counter:
            return
        self.pulse = (seen.boot_id, seen.counter)
        self.last_pulse_seconds = now - seen.age_seconds

    def note_death(self, now: float) -> None:
        """Remember a death; a node that keeps dying must stay up longer to be believed."""
        self.reports_since_dead = 0
        self.deaths_seconds = [at for at in self.deaths_seconds if now - at < RECENT_DEATHS_SECONDS]
        self.deaths_seconds.append(now)


class FleetState:
    """Views of all nodes, shared by the controller's threads."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._nodes: dict[str, NodeView] = {}

    def node(self, node_id: str) -> NodeView:
        """The view of a node, made on first sight."""
        with self.lock:
            return self._nodes.setdefault(node_id, NodeView(node_id))

    def drop(self, node_id: str) -> None:
        """Forget a node that is no longer recorded."""
        with self.lock:
            self._nodes.pop(node_id, None)

    def nodes(self) -> list[NodeView]:
        """Views of all nodes, as they are now."""
        with self.lock:
            return list(self._nodes.values())

    def observed(self) -> Iterator[tuple[NodeView, ObservedReplica]]:
        """Every replica of every newest heartbeat; one over several nodes once, as its head shows it."""
        for view in self.nodes():
            if view.heartbeat is not None:
                for replica in view.heartbeat.replicas:
                    if not replica.member_number:
                        yield view, replica


def fingerprint(replica: ObservedReplica) -> Fingerprint:
    """What of a sighting is worth writing down: everything but load and ages."""
    return (
        replica.generation,
        replica.state,
        replica.attempt,
        replica.restarts,
        replica.reason,
        replica.pid,
        replica.address,
        replica.stalled,
        replica.held_by_pids,
        replica.memory_wait is not None,
        replica.last_exit.attempt if replica.last_exit else 0,
        replica.sleep_state,
        replica.sleep_note,
        replica.epoch,
        replica.rendezvous,
    )
