"""A real agent that stands still is dead within seconds; what it serves meanwhile is fenced off."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from exaserve_ops.adapters.route_table import REPLICAS_KEY
from exaserve_ops.audit.models import Event
from exaserve_ops.health.models import NodeLease
from exaserve_ops.inventory.models import FailureDomain
from exaserve_ops.inventory.models import Node as NodeRow
from exaserve_ops.lib import clock
from exaserve_ops.serving.models import Model, Replica
from exaserve_ops.serving.services.deployments import DeploymentWish, create_deployment
from exaserve_ops.serving.services.replicas import let_go_replica
from tests.fakes.control_plane import ControlPlane, seconds_until
from tests.fakes.fleet import GIB
from tests.fakes.node import Node, make_home, wait_for
from tests.fakes.valkey import Valkey
from workers.protocol import names

pytestmark = [
    pytest.mark.system,
    pytest.mark.outage,
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(200),
]


class OwnStore(Valkey):
    """The store that the tests already run, as the agent's fake wants to see one."""

    def __init__(self, url: str) -> None:
        self._url = url

    @property
    def url(self) -> str:
        return self._url

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self._url)


@pytest.fixture
def node(tmp_path: Path, plane: ControlPlane) -> Iterator[Node]:  # noqa: ARG001 - the store is emptied first
    home = make_home(tmp_path / "home", os.environ["REDIS_URL"])
    node = Node(home, OwnStore(os.environ["REDIS_URL"]))
    domain = FailureDomain.objects.create(kind="host", name="node-a")
    NodeRow.objects.create(pk=uuid.UUID(node.node_id), name="node-a", failure_domain=domain)
    try:
        yield node
    finally:
        if node.process is not None:
            node.process.send_signal(signal.SIGCONT)
        node.close()


def liveness() -> str:
    return NodeRow.objects.get().liveness


def pids_of(replica_id: str) -> list[int]:
    """Processes that carry a replica's launch label."""
    label = f"{names.ENV_REPLICA}={replica_id}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and label in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_an_agent_that_stands_still_is_dead_in_time_and_rejoins_before_it_serves_again(
    plane: ControlPlane, node: Node, redis_client: redis.Redis
) -> None:
    plane.start_leader()
    node.start()
    wait_for(lambda: "tiny" in NodeRow.objects.get().engines, "the introduction", seconds=20)
    model = Model.objects.create(name="tiny", digest="d", source="file:///tmp")
    wish = DeploymentWish(
        name="chat", model_id=model.pk, replicas=2, engine="tiny", replica_memory_bytes=GIB // 4
    )
    deployment = create_deployment(wish, actor="user:test", now=clock.now())
    ready = Replica.objects.filter(deployment=deployment, status="ready")
    wait_for(lambda: ready.count() == 2, "two ready replicas", seconds=60)
    _, replaced = ready.order_by("name")
    wait_for(lambda: redis_client.hlen(REPLICAS_KEY) == 2, "two routes")

    node.signal(signal.SIGSTOP)
    took = seconds_until(lambda: liveness() == "dead", "the death", seconds=20)
    assert took <= 4.0 + 2.0
    wait_for(lambda: redis_client.hlen(REPLICAS_KEY) == 0, "no route", seconds=10)
    assert NodeLease.objects.get().epoch == 2
    lost_at = Event.objects.get(subject_kind="node", event="lost").pk
    # Its place is taken elsewhere meanwhile: by healing, or by whoever presses the button.
    if Replica.objects.get(pk=replaced.pk).wanted == "run":
        let_go_replica(replaced.pk, "stop", why="replaced", actor="test", now=clock.now())
    assert pids_of(str(replaced.pk))

    node.signal(signal.SIGCONT)
    wait_for(lambda: liveness() == "alive", "the return", seconds=20)
    wait_for(lambda: not pids_of(str(replaced.pk)), "the replaced replica to be stopped", seconds=30)
    wait_for(lambda: ready.count() == 2, "two ready replicas again", seconds=60)
    wait_for(lambda: redis_client.hlen(REPLICAS_KEY) == 2, "two routes", seconds=10)
    assert str(replaced.pk).encode() not in redis_client.hkeys(REPLICAS_KEY)
    back = Event.objects.get(subject_kind="node", event="recovered").pk
    first_ready = Event.objects.filter(subject_kind="replica", event="seen_ready", pk__gt=lost_at).first()
    assert first_ready is None or first_ready.pk > back
    events = Event.objects.filter(subject_kind="node", event__in=("lost", "recovered")).order_by("pk")
    assert list(events.values_list("event", flat=True)) == ["lost", "recovered"]
    beat = node.heartbeat()
    assert beat is not None
    assert beat.lease_epoch == 2
