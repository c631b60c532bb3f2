"""The parts of a leading controller over real stores, stepped by hand so that a test says when."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import UUID

import redis
from celery import Celery
from django.conf import settings

from exaserve_ops.adapters.agentlink import CeleryAgentLink
from exaserve_ops.adapters.live_store import RedisLivePublisher
from exaserve_ops.adapters.manifest_shelf import ManifestShelf
from exaserve_ops.adapters.model_findings import ModelFindings
from exaserve_ops.adapters.pulses import RedisPulseReader
from exaserve_ops.adapters.reach_table import ReachReader, place_token
from exaserve_ops.adapters.reports import RedisReportSource
from exaserve_ops.adapters.route_table import RouteTableWriter
from exaserve_ops.adapters.swarm_board import RedisSwarmBoard
from exaserve_ops.controllers.detection import Detection
from exaserve_ops.controllers.fleet_state import FleetState
from exaserve_ops.controllers.handover import HandoverWatch
from exaserve_ops.controllers.imports import ImportWatch
from exaserve_ops.controllers.ingest import Ingest
from exaserve_ops.controllers.live import LiveBuilder
from exaserve_ops.controllers.loop import KeyQueue
from exaserve_ops.controllers.reach import ReachRecorder
from exaserve_ops.controllers.reconcilers import Reconcilers
from exaserve_ops.controllers.weights import WeightsKeeper
from exaserve_ops.health.domain.detector import DetectorSettings
from exaserve_ops.inventory.domain.liveness import DEAD
from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.services import advance_liveness
from exaserve_ops.lib import clock
from exaserve_ops.serving.services.replicas import record_node_lost
from tests.fakes.fleet import FLEET_SECRET
from workers.protocol import digests

PATIENT = DetectorSettings(interval_seconds=60.0)


@dataclass
class Leader:
    """Nothing runs by itself: `work` is one look at everything."""

    state: FleetState
    queue: KeyQueue
    ingest: Ingest
    detection: Detection
    reach: ReachRecorder
    """Of gateways; unless a test plays one there is none, and nothing waits to be reached."""
    reconcilers: Reconcilers
    live: LiveBuilder
    weights: WeightsKeeper
    handover: HandoverWatch
    imports: ImportWatch

    def work(self, *, steps: int = 200) -> None:
        """Take reports in, then reconcile until nothing is due."""
        self.ingest.step()
        self.detection.step(self.ingest.last_read_seconds)
        self.reach.step()
        self.reconcilers.resync()
        self.drain(steps=steps)
        self.handover.step()
        self.reconcilers.resync()
        self.drain(steps=steps)

    def drain(self, *, steps: int = 200) -> None:
        """Reconcile until nothing is due."""
        for _ in range(steps):
            taken = self.queue.take(0.0)
            if taken is None:
                return
            try:
                self.reconcilers.reconcile(*taken)
            finally:
                self.queue.done(*taken)
        raise AssertionError("the queue never runs dry")

    def lose(self, node_id: str) -> None:
        """Write down that a node is dead, as the detector does; what follows is not reconciled yet."""
        now = clock.now()
        advance_liveness(UUID(node_id), "lost", reason="no report", actor="test", now=now)
        record_node_lost(UUID(node_id), reason="no report", actor="test", now=now)
        view = self.state.node(node_id)
        view.liveness = DEAD
        view.note_death(time.monotonic())


def key_of(node_id: str) -> bytes | None:
    epoch = Node.objects.filter(pk=node_id).values_list("key_epoch", flat=True).first()
    return digests.node_key(FLEET_SECRET, node_id, epoch) if epoch else None


@contextmanager
def leading(client: redis.Redis) -> Iterator[Leader]:
    """A leader of its own on an empty Redis."""
    state, queue = FleetState(), KeyQueue()
    source = RedisReportSource(client, "test", key_of)
    source.read(limit=1, block_seconds=0.001)  # the group begins here
    link = CeleryAgentLink(settings.CELERY_BROKER_URL, key_of, client, settings.ENV.fleet_secret)
    publisher = RedisLivePublisher(client)
    routes = RouteTableWriter(client)
    yield Leader(
        state=state,
        queue=queue,
        ingest=Ingest(source, link, publisher, state, queue, block_seconds=0.001),
        detection=Detection(state, queue, PATIENT, pulses=RedisPulseReader(client, key_of)),
        reach=ReachRecorder(ReachReader(client), place_token),
        reconcilers=Reconcilers(state, queue, link, routes, publisher),
        live=LiveBuilder(state, publisher, routes),
        handover=HandoverWatch(state),
        weights=WeightsKeeper(state, link, ManifestShelf(client), RedisSwarmBoard(client)),
        imports=ImportWatch(state, ModelFindings()),
    )
    celery: Celery = link._celery
    celery.close()
