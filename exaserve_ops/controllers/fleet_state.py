"""What the leading controller has in mind of each node: the newest reports, never the only copy.

Everything here can be lost with the process: the truth is in Postgres, and each heartbeat repeats
the whole observed state of its node.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from exaserve_ops.inventory.domain.liveness import JOINING
from exaserve_ops.serving.domain.observed import ObservedReplica
from exaserve_ops.serving.domain.reports import HeartbeatReport

Fingerprint = tuple[object, ...]


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
    sequence: int = -1
    clock_skew_seconds: float | None = None
    heartbeat: HeartbeatReport | None = None
    hello_asked_seconds: float = -1e9
    wish_sent_seconds: float = -1e9
    degraded: Fingerprint = ("", False, False, ())
    recorded: dict[str, Fingerprint] = field(default_factory=dict)
    """What was last written down of each replica, so that only changes are written."""


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
        """Every replica of every newest heartbeat."""
        for view in self.nodes():
            if view.heartbeat is not None:
                for replica in view.heartbeat.replicas:
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
        replica.last_exit.attempt if replica.last_exit else 0,
    )


def host_facts(view: NodeView) -> dict[str, Any]:
    """What the node's own probe said last."""
    if view.heartbeat is None or view.heartbeat.host is None:
        return {}
    return dict(view.heartbeat.host)
