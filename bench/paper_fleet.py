"""A fleet that exists on paper: rows in a database, and heartbeats made up once a second.

Only the figures are made up. Layout, frames and summary are built by the controllers' own builder and
published by its own adapter, so that pages get what a fleet of that size would give them.
"""

from __future__ import annotations

import dataclasses
import math
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import cast
from uuid import UUID, uuid4

import msgspec
import redis

from exaserve_ops.adapters.live_store import RedisLivePublisher
from exaserve_ops.adapters.route_table import RouteTableWriter
from exaserve_ops.audit.models import Event
from exaserve_ops.controllers.fleet_state import FleetState
from exaserve_ops.controllers.live import LiveBuilder
from exaserve_ops.health.models import Incident
from exaserve_ops.inventory.models import Accelerator, FailureDomain, Node
from exaserve_ops.lib import clock
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.observed import ObservedReplica, ReplicaLoad
from exaserve_ops.serving.domain.reports import HeartbeatReport
from exaserve_ops.serving.models import Deployment, Model, Replica
from exaserve_ops.serving.services.releases import first_release
from exaserve_ops.sessions.models import InferenceSession
from workers.protocol import v1
from workers.protocol.observed import AgentLiveness, ObservedState, ReplicaObserved, ReplicaTelemetry

GIB = 1 << 30
ACCELERATORS = 4
RACK_NODES = 16
REAL_NODES = 8
"""The others are marked as simulated."""
EVENTS = 5_000
SESSIONS = 2_000
_BATCH = 2_000
_PERIOD_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class PaperFleet:
    """What was written into the database: node ids with the replicas on each."""

    placed: tuple[tuple[UUID, tuple[UUID, ...]], ...]
    deployment_id: UUID
    incident_id: UUID


def write_fleet(nodes: int, replicas: int, *, seed: int = 1) -> PaperFleet:
    """Fill an empty database with a fleet that is mostly well: a rack is silent, some replicas fail."""
    chance, now = random.Random(seed), clock.now()  # noqa: S311 - made-up figures, no secret
    rows = _write_nodes(nodes, now)
    deployment = _write_deployment(nodes * replicas)
    placed = _write_replicas(rows, replicas, deployment, chance)
    incident = Incident.objects.create(
        kind="mass_silence",
        scope=f"rack {_rack_name(nodes // RACK_NODES)}",
        node_ids=[node.pk for node in rows[-RACK_NODES:]],
        evidence=f"{min(RACK_NODES, nodes)} nodes fell silent within 3 s",
        opened_at=now,
    )
    _write_records(rows, placed, now)
    return PaperFleet(placed, deployment.pk, incident.pk)


def _rack_name(number: int) -> str:
    return f"rack-{number:03d}"


def _write_nodes(count: int, now: datetime) -> list[Node]:
    racks = {
        number: FailureDomain.objects.create(name=_rack_name(number), kind=FailureDomain.Kind.RACK)
        for number in range(1, -(-count // RACK_NODES) + 1)
    }
    hosts = FailureDomain.objects.bulk_create(
        FailureDomain(name=f"host-{i:04d}", kind="host", parent=racks[i // RACK_NODES + 1])
        for i in range(count)
    )
    nodes = Node.objects.bulk_create(
        Node(
            name=f"node-r{i // RACK_NODES + 1:03d}-{i % RACK_NODES + 1:02d}",
            failure_domain=host,
            hostname=f"{host.name}.example",
            address=f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}",
            engines=["simulated-node" if i >= REAL_NODES else "vllm"],
            simulated=i >= REAL_NODES,
            liveness="suspect" if i >= count - RACK_NODES else "alive",
            liveness_reason="two heartbeats in a row are missing" if i >= count - RACK_NODES else "",
            liveness_changed_at=now,
            last_report_at=now,
        )
        for i, host in enumerate(hosts)
    )
    Accelerator.objects.bulk_create(
        (
            Accelerator(uuid=f"GPU-{node.pk}-{i}", node=node, kind="cuda", memory_bytes=140 * GIB, ordinal=i)
            for node in nodes
            for i in range(ACCELERATORS)
        ),
        batch_size=_BATCH,
    )
    return nodes


def _write_deployment(replicas: int) -> Deployment:
    model = Model.objects.create(
        name="paper-8b",
        digest="sha256:" + "0" * 64,
        source="file:///models/paper-8b",
        architecture={"family": "llama", "layers": 32},
        parameter_count=8_030_000_000,
        weights_bytes=16 * GIB,
        kv_bytes_per_token=131_072,
        max_context_tokens=131_072,
    )
    deployment = Deployment.objects.create(
        name="paper",
        model=model,
        served_name="paper-8b",
        replicas=replicas,
        engine="simulated-node",
        replica_memory_bytes=40 * GIB,
    )
    first_release(deployment, actor="bench", now=clock.now())
    return deployment


def _write_replicas(
    nodes: Sequence[Node], each: int, deployment: Deployment, chance: random.Random
) -> tuple[tuple[UUID, tuple[UUID, ...]], ...]:
    statuses = [states.READY] * 96 + [states.FAILED, states.FAILED, states.BACKING_OFF, states.LOADING]
    release = deployment.releases.get()
    rows = [
        Replica(
            release=release,
            name=f"paper-{i * each + slot:05d}",
            deployment=deployment,
            node=node,
            memory_bytes=40 * GIB,
            status=chance.choice(statuses),
            attempt=1,
        )
        for i, node in enumerate(nodes)
        for slot in range(each)
    ]
    Replica.objects.bulk_create(rows, batch_size=_BATCH)
    link = Replica.accelerators.through
    link.objects.bulk_create(
        (
            link(replica_id=row.pk, accelerator_id=f"GPU-{row.node_id}-{i % ACCELERATORS}")
            for i, row in enumerate(rows)
        ),
        batch_size=_BATCH,
    )
    return tuple(
        (node.pk, tuple(row.pk for row in rows[i * each : (i + 1) * each])) for i, node in enumerate(nodes)
    )


def _write_records(
    nodes: Sequence[Node], placed: Sequence[tuple[UUID, tuple[UUID, ...]]], now: datetime
) -> None:
    Event.objects.bulk_create(
        (
            Event(
                at=now - timedelta(seconds=EVENTS - i),
                actor=f"agent:{node.name}",
                subject_kind="replica" if i % 2 else "node",
                subject_id=str(replicas[0] if i % 2 and replicas else node.pk),
                subject_name=f"paper-{i:05d}" if i % 2 else node.name,
                event="seen_ready" if i % 2 else "missed",
                from_status="loading" if i % 2 else "alive",
                to_status="ready" if i % 2 else "suspect",
            )
            for i in range(EVENTS)
            for node, (_, replicas) in [(nodes[i % len(nodes)], placed[i % len(nodes)])]
        ),
        batch_size=_BATCH,
    )
    InferenceSession.objects.bulk_create(
        (
            InferenceSession(
                session_id=str(uuid4()),
                model_name="paper-8b",
                replica_id=replicas[0] if replicas else None,
                turns=i % 9 + 1,
                context_tokens=1000 + i,
                first_turn_at=now,
                last_turn_at=now,
            )
            for i in range(SESSIONS)
            for _, replicas in [placed[i % len(placed)]]
        ),
        batch_size=_BATCH,
    )


class Heartbeats:
    """Makes up the newest heartbeat of each node; the last rack has fallen silent."""

    def __init__(self, fleet: PaperFleet) -> None:
        self.state = FleetState()
        self._fleet = fleet
        self._sequence = 0

    def beat(self) -> None:
        """One second of the fleet."""
        self._sequence += 1
        silent = len(self._fleet.placed) - RACK_NODES
        for index, (node_id, replicas) in enumerate(self._fleet.placed):
            if index >= max(1, silent) and self._sequence > 1:
                continue
            view = self.state.node(str(node_id))
            view.hear(time.monotonic(), clock.unix_seconds())
            view.heartbeat = self._heartbeat(str(node_id), index, replicas)

    def _heartbeat(self, node_id: str, index: int, replicas: Sequence[UUID]) -> HeartbeatReport:
        loads = {str(pk): self._load(index * 64 + slot) for slot, pk in enumerate(replicas)}
        sent = v1.Heartbeat(
            node_id=node_id,
            boot_id="paper",
            lease_epoch=1,
            sequence=self._sequence,
            sent_at_seconds=clock.unix_seconds(),
            applied_revision=1,
            liveness=AgentLiveness(intake_age_seconds=0.1, reconcile_age_seconds=0.1),
            replicas=tuple(
                ReplicaObserved(replica_id=pk, generation=1, state=ObservedState.READY, telemetry=load)
                for pk, load in loads.items()
            ),
        )
        return HeartbeatReport(
            node_id=node_id,
            boot_id=sent.boot_id,
            lease_epoch=sent.lease_epoch,
            sequence=sent.sequence,
            sent_at_seconds=sent.sent_at_seconds,
            applied_revision=sent.applied_revision,
            replicas=tuple(
                # A message that was decoded is a load already; its fields are only read.
                ObservedReplica(pk, 1, states.READY, load=cast("ReplicaLoad", load))
                for pk, load in loads.items()
            ),
            encoded=msgspec.msgpack.encode(sent),
        )

    def _load(self, number: int) -> ReplicaTelemetry:
        """A slow wave over the fleet, other values for each replica each second."""
        wave = 0.5 + 0.5 * math.sin(self._sequence / _PERIOD_SECONDS + number / 97.0)
        ripple = 0.5 + 0.5 * math.sin(self._sequence * 1.7 + number * 2.3)
        used = min(1.0, 0.15 + 0.6 * wave + 0.25 * ripple)
        return ReplicaTelemetry(
            window_seconds=30.0,
            kv_total_blocks=4096,
            kv_used_ratio=used,
            ttft_p95_seconds=0.08 + 1.6 * used**4,
            requests_running=round(12 * used),
            requests_waiting=round(max(0.0, 20 * (used - 0.8))),
            generation_tokens_per_second=180.0 * wave,
            prefix_hit_ratio=0.9 * ripple,
            itl_p95_seconds=0.02 + 0.05 * wave,
        )


@contextmanager
def live_feed(fleet: PaperFleet, client: redis.Redis) -> Iterator[None]:
    """Publish a picture each second, as a leading controller does, for as long as the block lasts."""
    beats, ended = Heartbeats(fleet), threading.Event()
    builder = LiveBuilder(beats.state, RedisLivePublisher(client), RouteTableWriter(client))

    def run() -> None:
        while True:
            began = time.monotonic()
            beats.beat()
            builder.step()
            if ended.wait(max(0.0, 1.0 - (time.monotonic() - began))):
                return

    thread = threading.Thread(target=run, name="live feed", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
