"""Reports of agents, in the control plane's own terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exaserve_ops.inventory.domain.facts import NodeFacts
from exaserve_ops.serving.domain.kv_pools import PoolFacts
from exaserve_ops.serving.domain.observed import ObservedReplica
from exaserve_ops.telemetry.domain.machine_loads import CardLoad, HostLoad
from exaserve_ops.weights.domain.held import StoreSight


@dataclass(frozen=True, slots=True)
class HelloReport:
    """An agent introduces its node."""

    node_id: str
    facts: NodeFacts
    reconnect: bool


@dataclass(frozen=True, slots=True)
class HeartbeatReport:
    """Sign of life and whole observed state of a node."""

    node_id: str
    boot_id: str
    lease_epoch: int
    sequence: int
    sent_at_seconds: float
    applied_revision: int
    intake_age_seconds: float | None = None
    reconcile_age_seconds: float | None = None
    reconcile_error: str = ""
    replicas: tuple[ObservedReplica, ...] = ()
    unknown_processes: tuple[Mapping[str, Any], ...] = ()
    kv_pools: tuple[PoolFacts, ...] = ()
    weights: StoreSight | None = None
    """`None`: its agent keeps none."""
    host: HostLoad | None = None
    accelerator_loads: tuple[CardLoad, ...] = ()
    encoded: bytes = b""
    """All of it as its agent sent it, seal checked and removed: passed on to readers of the live store."""


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """What became of a command."""

    node_id: str
    command_id: str
    outcome: str
    reason: str


@dataclass(frozen=True, slots=True)
class SessionSending:
    """What became of sending a session's KV from one replica to another; an empty code is success."""

    node_id: str
    command_id: str
    code: str
    reason: str
    sent_bytes: int
    target_tokens: int
    seconds: float
    turn_began: bool
    carrier: str


@dataclass(frozen=True, slots=True)
class LogLines:
    """Lines of a replica's log."""

    node_id: str
    replica_id: str
    attempt: int
    lines: tuple[str, ...]
    dropped_lines: int
    is_backlog: bool = False
    """The newest that there are: some may have come before."""


@dataclass(frozen=True, slots=True)
class FindingsPart:
    """A part of what a node found when it took a model in."""

    node_id: str
    import_id: str
    digest: str
    index: int
    count: int
    data: bytes


Report = HelloReport | HeartbeatReport | CommandOutcome | SessionSending | LogLines | FindingsPart


@dataclass(frozen=True, slots=True)
class Received:
    """A report and where it stands in the stream."""

    position: str
    report: Report
    age_seconds: float = 0.0
    """For how long it lay there when it was read, by the store's own clock."""
