"""A replica that is ready and out of a gateway's reach is shown as such, and again when it is back."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import redis
import redis.asyncio

from exaserve_ops.adapters.reach_table import ReachReader, ReachWriter
from exaserve_ops.audit.models import Event
from exaserve_ops.controllers.reach import ReachRecorder
from exaserve_ops.gateway.reach import ReachProbe
from exaserve_ops.inventory.models import FailureDomain, Node
from exaserve_ops.routing.domain.records import RouteRecord
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.services.replicas import create_replicas
from tests.fakes.fleet import NOW, make_deployment

pytestmark = pytest.mark.django_db


@dataclass
class Slot:
    record: RouteRecord
    failed_at_seconds: float = 0.0


def record(replica: Replica, port: int) -> RouteRecord:
    return RouteRecord(
        replica_id=str(replica.pk),
        node_id="n",
        node_name="n",
        key_epoch=1,
        model="chat",
        deployment="chat",
        host="127.0.0.1",
        port=port,
        attempt=1,
        generation=1,
    )


@pytest.fixture
def replica() -> Replica:
    [made] = create_replicas(make_deployment().pk, 1, why="test", actor="test", now=NOW)
    domain = FailureDomain.objects.create(kind="host", name="n")
    made.node = Node.objects.create(name="n", failure_domain=domain)
    made.status = "ready"
    made.save()
    return made


def test_a_port_out_of_reach_shows_and_clears(replica: Replica, redis_client: redis.Redis) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    recorder = ReachRecorder(ReachReader(redis_client))
    slot = Slot(record(replica, port))
    probe = ReachProbe(lambda: [slot], Nowhere(), gateway_name="g", clock=time.monotonic)

    def probe_and_record(steps: int) -> str:
        asyncio.run(take(probe, steps))
        recorder.step()
        replica.refresh_from_db()
        return replica.unroutable_reason

    assert probe_and_record(1) == "", "one refused connect may be a replica that just ended"
    assert probe_and_record(1).startswith(f"port {port} unreachable from gateway g")
    with socket.create_server(("127.0.0.1", port)):
        assert probe_and_record(1) == ""
    assert probe_and_record(2) == "", "reached once, it is not tried until a request fails there"
    slot.failed_at_seconds = time.monotonic()
    assert probe_and_record(2) != ""
    events = Event.objects.filter(subject_id=str(replica.pk)).order_by("pk").values_list("event", flat=True)
    assert list(events) == ["created", "unroutable", "routable_again", "unroutable"]


class Nowhere:
    """Where a probe writes before it has a client of the loop that it runs in."""

    async def write(self, unreachable: Mapping[str, str]) -> None:
        raise AssertionError(unreachable)


async def take(probe: ReachProbe, steps: int) -> None:
    async with redis.asyncio.Redis.from_url(os.environ["REDIS_URL"]) as client:
        probe._log = ReachWriter(client, "g")
        for _ in range(steps):
            await probe.step()


def test_what_a_gateway_says_of_replicas_that_are_not_ready_or_not_known_is_passed_over(
    replica: Replica,
) -> None:
    Replica.objects.update(status="loading")

    class Said:
        def read(self) -> dict[str, str]:
            return {str(replica.pk): "refused", "no uuid": "x", "00000000-0000-4000-8000-000000000000": "y"}

    ReachRecorder(Said()).step()
    replica.refresh_from_db()
    assert replica.unroutable_reason == ""
