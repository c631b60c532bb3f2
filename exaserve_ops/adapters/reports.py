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
from exaserve_ops.serving.domain.kv_pools import PoolFacts
from exaserve_ops.serving.domain.observed import (
    MemoryShortage,
    MemoryUser,
    ObservedExit,
    ObservedReplica,
    ReplicaLoad,
)
from exaserve_ops.telemetry.domain.machine_loads import CardLoad, HostLoad
from exaserve_ops.weights.domain.held import (
    ComplaintSight,
    HeldWeights,
    ImportSight,
    PullSight,
    StoreSight,
    SwarmSight,
)
from workers.protocol import hardware, kv_pools, names, v1
from workers.protocol.hardware import AcceleratorInfo
from workers.protocol.imports import ImportSeen
from workers.protocol.observed import ExitInfo, HostTelemetry, MemoryWait, ReplicaObserved, ReplicaTelemetry
from workers.protocol.weights import SwarmSeen, WeightsHeld, WeightsReport

GROUP = "ingest"
MOST_MINOR = 32_767
"""What the record has room for; no such version will ever be."""
ABANDONED_MILLISECONDS = 10_000
"""A report that a consumer holds unacknowledged for longer was left by a dead controller."""

_heartbeat_decoder = msgspec.msgpack.Decoder(v1.Heartbeat)
_Entry = tuple[bytes, Mapping[bytes, bytes]]

_log = logging.getLogger(__name__)
_MOSTLY = 0.5
"""Share of the time from which on something is what holds a stream back."""


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
            entries, read_at = self._entries(limit, block_seconds)
        except redis.exceptions.ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
            self._create_group()
            entries, read_at = self._entries(limit, block_seconds)
        received = []
        unreadable = []
        for raw_position, fields in entries:
            position = raw_position.decode()
            report = self._open(fields.get(b"m", b""))
            if report is None:
                unreadable.append(position)
            else:
                age_seconds = max(0.0, read_at - int(position.partition("-")[0]) / 1000)
                received.append(reports.Received(position, report, age_seconds))
        self.acknowledge(unreadable)
        return received

    def acknowledge(self, positions: Sequence[str]) -> None:
        """Say that these are recorded."""
        if positions:
            self._redis.xack(names.REPORT_STREAM, GROUP, *positions)

    def _entries(self, limit: int, block_seconds: float) -> tuple[list[_Entry], float]:
        """Entries, and when they were read, by the clock that numbers them: the store's."""
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
                return left, self._store_seconds(self._redis.time())
            self._claimed = True
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.xreadgroup(
            GROUP,
            self._consumer,
            {names.REPORT_STREAM: ">"},
            count=limit,
            block=max(1, round(block_seconds * 1000)),
        )
        pipeline.time()
        answer, moment = pipeline.execute(raise_on_error=False)
        for failed in (answer, moment):
            if isinstance(failed, Exception):
                raise failed
        return [entry for _, batch in answer or () for entry in batch], self._store_seconds(moment)

    @staticmethod
    def _store_seconds(answer: Any) -> float:  # noqa: ANN401 - what the client makes of TIME
        seconds, microseconds = answer
        return float(seconds + microseconds / 1e6)

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
        return _translate(report, envelope.body)

    def _refuse(self, kind: str, detail: str) -> None:
        self.refused[kind] += 1
        count = self.refused[kind]
        if count & (count - 1) == 0:  # each power of two: a stranger cannot fill the log
            _log.warning("event=report_refused kind=%s count=%d detail=%s", kind, count, detail)


def describe_heartbeat(encoded: bytes) -> dict[str, Any]:
    """What a heartbeat says of its host and its replicas, as plain values for pages and REST."""
    beat = _heartbeat_decoder.decode(encoded)
    return {
        "host": {} if beat.host is None else _describe_host(beat.host),
        "accelerators": [msgspec.structs.asdict(load) for load in beat.accelerator_loads],
        "replicas": {seen.replica_id: _describe_replica(seen) for seen in beat.replicas},
        "weights": None if beat.weights is None else msgspec.to_builtins(beat.weights),
    }


def _describe_host(host: HostTelemetry) -> dict[str, Any]:
    links = {
        kind: {name: msgspec.structs.asdict(rate) for name, rate in rates.items()}
        for kind, rates in (("interfaces", host.interfaces), ("rdma", host.rdma))
    }
    return msgspec.structs.asdict(host) | links


def describe_weights(encoded: bytes) -> StoreSight | None:
    """What a heartbeat says of the weights on its node's disk; `None` where it says nothing."""
    told = _heartbeat_decoder.decode(encoded).weights
    return None if told is None else _store_sight(told)


def describe_kv(encoded: bytes) -> dict[str, Any]:
    """What a heartbeat says of its node's KV memory, as plain values for pages and REST.

    `pools` with their maps unpacked, and `replicas` with what their engines say, by id.
    """
    beat = _heartbeat_decoder.decode(encoded)
    return {
        "pools": [_describe_pool(pool) for pool in beat.kv_pools],
        "replicas": {
            seen.replica_id: _describe_kv_load(seen.telemetry)
            for seen in beat.replicas
            if seen.telemetry is not None
        },
    }


def _describe_kv_load(load: ReplicaTelemetry) -> dict[str, Any]:
    return {
        "total_blocks": load.kv_total_blocks,
        "used_ratio": load.kv_used_ratio,
        "block_tokens": load.kv_block_tokens,
        "hit_ratio": load.prefix_hit_ratio,
        "query_tokens_total": load.prefix_query_tokens_total,
        "hit_tokens_total": load.prefix_hit_tokens_total,
        "miss_tokens_total": load.prefix_miss_tokens_total,
        "tiers": _describe_tiers(load),
        "swaps": _describe_swaps(load),
        "thrash_reason": load.kv_thrash_reason,
        "capacity_tokens": load.kv_capacity_tokens,
        "connector_totals": load.connector_totals,
        "external_hit_tokens_total": load.external_hit_tokens_total,
    }


def _describe_tiers(load: ReplicaTelemetry) -> list[dict[str, Any]]:
    return [msgspec.structs.asdict(tier) for tier in load.kv_tiers]


def _describe_swaps(load: ReplicaTelemetry) -> dict[str, Any] | None:
    return None if load.kv_swaps is None else msgspec.structs.asdict(load.kv_swaps)


def _describe_load(load: ReplicaTelemetry) -> dict[str, Any]:
    """All of it; structs inside become plain values, too, as JSON needs them."""
    plain = {"kv_tiers": _describe_tiers(load), "kv_swaps": _describe_swaps(load)}
    return msgspec.structs.asdict(load) | plain


def _describe_pool(pool: kv_pools.KvPool) -> dict[str, Any]:
    try:
        cells = kv_pools.unpack_map(pool.map)
    except ValueError as error:
        _log.warning("event=map_not_read pool=%s error=%s", pool.pool_id, error)
        cells = []
    fields = msgspec.structs.asdict(pool)
    del fields["map"]
    return fields | {
        "members": [
            msgspec.structs.asdict(member)
            | {"borrowed_blocks": member.borrowed_blocks, "lent_blocks": member.lent_blocks}
            for member in pool.members
        ],
        "cells": [
            (cell.owner, round(cell.live_ratio, 2), round(cell.cached_ratio, 2), cell.age) for cell in cells
        ],
    }


def _describe_replica(seen: ReplicaObserved) -> dict[str, Any]:
    return {
        "state": seen.state.value,
        "active_requests": seen.active_requests,
        "uptime_seconds": seen.uptime_seconds,
        "retry_in_seconds": seen.retry_in_seconds,
        "memory_used_bytes": seen.memory_used_bytes,
        "load": None if seen.telemetry is None else _describe_load(seen.telemetry),
    }


def _translate(report: v1.Report, encoded: bytes) -> reports.Report:
    match report:
        case v1.Hello():
            return reports.HelloReport(report.node_id, _node_facts(report), report.reconnect)
        case v1.Heartbeat():
            return _heartbeat(report, encoded)
        case v1.CommandResult():
            return reports.CommandOutcome(report.node_id, report.command_id, report.outcome, report.reason)
        case v1.SessionSent():
            return reports.SessionSending(
                report.node_id,
                report.command_id,
                report.code,
                report.reason,
                report.sent_bytes,
                report.target_tokens,
                report.seconds,
                report.turn_began,
                report.carrier,
            )
        case v1.ImportFindings():
            return reports.FindingsPart(
                report.node_id, report.import_id, report.digest, report.index, report.count, report.data
            )
        case v1.LogChunk():
            return reports.LogLines(
                report.node_id,
                report.replica_id,
                report.attempt,
                report.lines,
                report.dropped_lines,
                report.is_backlog,
            )


def _node_facts(hello: v1.Hello) -> NodeFacts:
    return NodeFacts(
        hostname=hello.hostname,
        address=hello.address,
        agent_version=hello.agent_version,
        protocol_minor=min(max(hello.minor, 0), MOST_MINOR),
        boot_id=hello.boot_id,
        cpu_count=hello.cpu_count,
        memory_bytes=hello.memory_bytes,
        engines=hello.engines,
        engine_versions={name: text[:60] for name, text in hello.engine_versions.items()},
        labels=hello.labels,
        simulated=hello.simulated,
        accelerators=(
            *(_accelerator(card, split=True) for card in hello.split_cards),
            *(_accelerator(found, split=False) for found in hello.accelerators),
        ),
        topology=_topology(hello.topology),
        probe_notes=hello.probe_notes,
        mps_ready=hello.mps_ready,
        mps_note=hello.mps_note[:500],
    )


def _accelerator(found: AcceleratorInfo, *, split: bool) -> AcceleratorFacts:
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
        shares_memory=found.shares_memory,
    )


def _topology(told: hardware.Topology | None) -> Topology | None:
    if told is None:
        return None
    return Topology(
        tuple(Endpoint(end.name, end.accelerator, end.numa_node, end.cpus) for end in told.endpoints),
        tuple(Link(link.a, link.b, link.kind, link.rank) for link in told.links),
    )


def _heartbeat(beat: v1.Heartbeat, encoded: bytes) -> reports.HeartbeatReport:
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
        replicas=tuple([_replica(replica) for replica in beat.replicas]),
        unknown_processes=tuple(msgspec.to_builtins(p) for p in beat.unknown_processes),
        # Pools and what machines say are passed on as they were decoded, as loads are.
        kv_pools=cast("tuple[PoolFacts, ...]", beat.kv_pools),
        weights=None if beat.weights is None else _store_sight(beat.weights),
        host=cast("HostLoad | None", beat.host),
        accelerator_loads=cast("tuple[CardLoad, ...]", beat.accelerator_loads),
        encoded=encoded,
    )


def _store_sight(told: WeightsReport) -> StoreSight:
    return StoreSight(
        revision=told.revision,
        disk_total_bytes=told.disk_total_bytes,
        disk_free_bytes=told.disk_free_bytes,
        used_bytes=told.used_bytes,
        problem=told.problem,
        held=tuple(_held(held) for held in told.held),
        in_swarms=told.in_swarms,
        piece_port=told.piece_port,
        imports=tuple(_import_sight(seen) for seen in told.imports),
    )


def _import_sight(seen: ImportSeen) -> ImportSight:
    return ImportSight(
        import_id=seen.import_id,
        state=seen.state.value,
        attempt=seen.attempt,
        reason=seen.reason[:1000],
        location=seen.location[:1000],
        files=seen.files,
        files_done=seen.files_done,
        total_bytes=seen.total_bytes,
        have_bytes=seen.have_bytes,
        bytes_per_second=seen.bytes_per_second,
        eta_seconds=seen.eta_seconds,
        findings_digest=seen.findings_digest[:64],
    )


def _held(held: WeightsHeld) -> HeldWeights:
    return HeldWeights(
        revision=held.revision,
        state=held.state.value,
        total_bytes=held.total_bytes,
        have_bytes=held.have_bytes,
        bytes_per_second=held.bytes_per_second,
        eta_seconds=held.eta_seconds,
        reason=held.reason,
        wanted=held.wanted,
        in_use=held.in_use,
        sources=tuple((source.kind, source.name, source.bytes) for source in held.sources),
        damaged_pieces=held.damaged_pieces,
        spoilt=held.spoilt,
        swarm=None if held.swarm is None else _swarm_sight(held.swarm),
    )


def _swarm_sight(told: SwarmSeen) -> SwarmSight:
    return SwarmSight(
        pulls=tuple(
            PullSight(
                stripe=pull.stripe,
                parent=pull.parent,
                stage=pull.stage,
                bytes_per_second=pull.bytes_per_second,
                starved_ratio=pull.starved_ratio,
                lasted_seconds=pull.lasted_seconds,
                bottleneck=pull.bottleneck,
                why=pull.why,
            )
            for pull in told.pulls
        ),
        complaints=tuple(
            ComplaintSight(complaint.parent, complaint.bad_pieces, complaint.unreachable)
            for complaint in told.complaints
        ),
        streams=tuple((stream.child, stream.bytes_per_second) for stream in told.streams),
        capped=frozenset(stream.child for stream in told.streams if stream.capped_ratio > _MOSTLY),
        pieces=told.pieces,
        have_pieces=told.have_pieces,
    )


def _replica(seen: ReplicaObserved) -> ObservedReplica:
    # By position: this is most of what translating a heartbeat costs.
    return ObservedReplica(
        seen.replica_id,
        seen.generation,
        seen.state.value,
        seen.attempt,
        seen.restarts,
        seen.reason,
        seen.pid,
        seen.address,
        seen.ports,
        seen.uptime_seconds,
        seen.start_took_seconds,
        seen.retry_in_seconds,
        seen.active_requests,
        None if seen.last_exit is None else _exit(seen.last_exit),
        # A load has the fields of the telemetry that it is; a test holds them together.
        cast("ReplicaLoad | None", seen.telemetry),
        seen.stalled,
        seen.held_by_pids,
        None if seen.memory_wait is None else _memory_wait(seen.memory_wait),
        seen.sleep_state,
        seen.sleep_note,
        seen.woke_in_seconds,
        seen.member_number,
        seen.epoch,
        seen.rendezvous,
    )


def _memory_wait(wait: MemoryWait) -> MemoryShortage:
    return MemoryShortage(
        wait.place,
        wait.needed_bytes,
        wait.free_bytes,
        wait.total_bytes,
        wait.at_most_seconds,
        tuple(MemoryUser(h.kind, h.pid, h.replica_id, h.command, h.memory_bytes) for h in wait.holders),
    )


def _exit(ended: ExitInfo) -> ObservedExit:
    return ObservedExit(
        ended.attempt, ended.code, ended.signal, ended.duration_seconds, ended.log_tail, ended.why
    )
