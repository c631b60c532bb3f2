"""Reports of agents: a Redis stream, read as a consumer group, opened, checked and translated."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec
import redis

from exaserve_ops.inventory.domain.facts import AcceleratorFacts, Endpoint, Link, NodeFacts, Topology
from exaserve_ops.serving.domain import reports
from exaserve_ops.serving.domain.observed import ObservedExit, ObservedReplica, ReplicaLoad
from workers.protocol import names, v1

GROUP = "ingest"
ABANDONED_MILLISECONDS = 10_000
"""A report that a consumer holds unacknowledged for longer was left by a dead controller."""

_log = logging.getLogger(__name__)
_LOAD_FIELDS = tuple(ReplicaLoad.__dataclass_fields__)


class RedisReportSource:
    """Takes a client that returns bytes; not for several threads."""

    def __init__(
        self, client: redis.Redis, consumer: str, node_key_of: Callable[[str], bytes | None]
    ) -> None:
        self._redis = client
        self._consumer = consumer
        self._node_key_of = node_key_of
        self._claimed = False
        self.refused: Counter[str] = Counter()
        """How many reports were dropped, by the kind of error."""

    def read(self, *, limit: int, block_seconds: float) -> list[reports.Received]:
        """Reports not acknowledged yet, oldest first. Raises `redis.RedisError` where it is away."""
        try:
            entries = self._entries(limit, block_seconds)
        except redis.exceptions.ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
            self._create_group()
            entries = self._entries(limit, block_seconds)
        received = []
        unreadable = []
        for position, fields in entries:
            report = self._open(fields.get(b"m", b""))
            if report is None:
                unreadable.append(position.decode())
            else:
                received.append(reports.Received(position.decode(), report))
        self.acknowledge(unreadable)
        return received

    def acknowledge(self, positions: Sequence[str]) -> None:
        """Say that these are recorded."""
        if positions:
            self._redis.xack(names.REPORT_STREAM, GROUP, *positions)

    def _entries(self, limit: int, block_seconds: float) -> list[tuple[bytes, Mapping[bytes, bytes]]]:
        if not self._claimed:
            claimed = cast(
                "Any",
                self._redis.xautoclaim(
                    names.REPORT_STREAM, GROUP, self._consumer, ABANDONED_MILLISECONDS, count=limit
                ),
            )
            # Trimmed entries come back as None.
            left = [entry for entry in claimed[1] if entry is not None and entry[1]]
            if left:
                return left
            self._claimed = True
        answer = self._redis.xreadgroup(
            GROUP,
            self._consumer,
            {names.REPORT_STREAM: ">"},
            count=limit,
            block=max(1, round(block_seconds * 1000)),
        )
        return [entry for _, batch in cast("Any", answer) or () for entry in batch]

    def _create_group(self) -> None:
        try:
            # From the end: what was reported before anybody listened is repeated within a second.
            self._redis.xgroup_create(names.REPORT_STREAM, GROUP, id="$", mkstream=True)
        except redis.exceptions.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    def _open(self, data: bytes) -> reports.Report | None:
        try:
            envelope = v1.open_envelope(data)
            key = self._node_key_of(envelope.node_id)
            if key is None:
                self._refuse("UnknownNode", envelope.node_id)
                return None
            report = v1.decode_report(envelope, node_key=key)
        except v1.ProtocolError as error:
            self._refuse(type(error).__name__, str(error))
            return None
        if report.node_id != envelope.node_id:
            self._refuse("WrongNode", envelope.node_id)
            return None
        return _translate(report)

    def _refuse(self, kind: str, detail: str) -> None:
        self.refused[kind] += 1
        count = self.refused[kind]
        if count & (count - 1) == 0:  # each power of two: a stranger cannot fill the log
            _log.warning("event=report_refused kind=%s count=%d detail=%s", kind, count, detail)


def _translate(report: v1.Report) -> reports.Report:
    match report:
        case v1.Hello():
            return reports.HelloReport(report.node_id, _node_facts(report), report.reconnect)
        case v1.Heartbeat():
            return _heartbeat(report)
        case v1.CommandResult():
            return reports.CommandOutcome(report.node_id, report.command_id, report.outcome, report.reason)
        case v1.LogChunk():
            return reports.LogLines(
                report.node_id, report.replica_id, report.attempt, report.lines, report.dropped_lines
            )


def _node_facts(hello: v1.Hello) -> NodeFacts:
    return NodeFacts(
        hostname=hello.hostname,
        address=hello.address,
        agent_version=hello.agent_version,
        boot_id=hello.boot_id,
        cpu_count=hello.cpu_count,
        memory_bytes=hello.memory_bytes,
        engines=hello.engines,
        labels=hello.labels,
        simulated=hello.simulated,
        accelerators=(
            *(_accelerator(card, split=True) for card in hello.split_cards),
            *(_accelerator(found, split=False) for found in hello.accelerators),
        ),
        topology=_topology(hello.topology),
        probe_notes=hello.probe_notes,
    )


def _accelerator(found: v1.AcceleratorInfo, *, split: bool) -> AcceleratorFacts:
    return AcceleratorFacts(
        uuid=found.uuid,
        kind=found.kind,
        name=found.name,
        memory_bytes=found.memory_bytes,
        ordinal=found.ordinal,
        split=split,
        parent_uuid=found.parent_uuid,
        profile=found.profile,
        pci_bus_id=found.pci_bus_id,
        numa_node=found.numa_node,
        pcie_generation_max=found.pcie_generation,
        pcie_width_max=found.pcie_width,
        pcie_generation_now=found.pcie_generation_now,
        pcie_width_now=found.pcie_width_now,
        unreadable=found.unreadable,
    )


def _topology(told: v1.Topology | None) -> Topology | None:
    if told is None:
        return None
    return Topology(
        tuple(Endpoint(end.name, end.accelerator, end.numa_node, end.cpus) for end in told.endpoints),
        tuple(Link(link.a, link.b, link.kind, link.rank) for link in told.links),
    )


def _heartbeat(beat: v1.Heartbeat) -> reports.HeartbeatReport:
    return reports.HeartbeatReport(
        node_id=beat.node_id,
        boot_id=beat.boot_id,
        lease_epoch=beat.lease_epoch,
        sequence=beat.sequence,
        sent_at_seconds=beat.sent_at_seconds,
        applied_revision=beat.applied_revision,
        intake_age_seconds=beat.liveness.intake_age_seconds,
        reconcile_age_seconds=beat.liveness.reconcile_age_seconds,
        reconcile_error=beat.liveness.reconcile_error,
        replicas=tuple(_replica(replica) for replica in beat.replicas),
        unknown_processes=tuple(msgspec.to_builtins(p) for p in beat.unknown_processes),
        host=msgspec.structs.asdict(beat.host) if beat.host is not None else None,
    )


def _replica(seen: v1.ReplicaObserved) -> ObservedReplica:
    return ObservedReplica(
        replica_id=seen.replica_id,
        generation=seen.generation,
        state=seen.state.value,
        attempt=seen.attempt,
        restarts=seen.restarts,
        reason=seen.reason,
        pid=seen.pid,
        address=seen.address,
        ports=seen.ports,
        uptime_seconds=seen.uptime_seconds,
        start_took_seconds=seen.start_took_seconds,
        retry_in_seconds=seen.retry_in_seconds,
        active_requests=seen.active_requests,
        last_exit=_exit(seen.last_exit),
        load=_load(seen.telemetry),
        stalled=seen.stalled,
        held_by_pids=seen.held_by_pids,
    )


def _exit(ended: v1.ExitInfo | None) -> ObservedExit | None:
    if ended is None:
        return None
    return ObservedExit(
        ended.attempt, ended.code, ended.signal, ended.duration_seconds, ended.log_tail, ended.why
    )


def _load(telemetry: v1.ReplicaTelemetry | None) -> ReplicaLoad | None:
    if telemetry is None:
        return None
    return ReplicaLoad(**{name: getattr(telemetry, name) for name in _LOAD_FIELDS})
