"""A replica counts as ready, and takes requests, once a living gateway has connected to it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import redis
import redis.asyncio
from django.test import Client
from django.urls import reverse

from exaserve_ops.adapters.reach_table import ReachReader, ReachWriter, place_token
from exaserve_ops.api.ports import replica_loads
from exaserve_ops.audit.models import Event
from exaserve_ops.controllers.reach import ReachRecorder
from exaserve_ops.dashboard.ports import live_reader
from exaserve_ops.gateway.reach import ReachProbe
from exaserve_ops.inventory.models import FailureDomain, Node
from exaserve_ops.routing.domain.records import RouteRecord
from exaserve_ops.routing.selectors import routes
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.selectors import live_deployments
from exaserve_ops.serving.services.replicas import create_replicas
from tests.dashboard.conftest import MemoryReader
from tests.fakes.fleet import NOW, make_deployment
from tests.fakes.world import client_with_key, make_user

pytestmark = pytest.mark.django_db


@dataclass
class Slot:
    record: RouteRecord
    failed_at_seconds: float = 0.0
    reach: bool | None = None


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
    made.node = Node.objects.create(name="n", failure_domain=domain, liveness="alive")
    made.status, made.reach, made.attempt = "ready", "waiting", 1
    made.save()
    return made


class Gateways:
    """Probes of several gateways over real sockets, and the controller that reads what they say."""

    def __init__(self, client: redis.Redis, replica: Replica) -> None:
        self.replica = replica
        self.client = client
        self.recorder = ReachRecorder(ReachReader(client), place_token)
        self.wakes = 0
        self.slots: dict[str, Slot] = {}
        self._probes: dict[str, ReachProbe] = {}
        self._known: dict[str, frozenset[str] | None] = {}

    def start(self, name: str, port: int) -> None:
        slot = self.slots[name] = Slot(record(self.replica, port))
        self._known[name] = None
        self._probes[name] = ReachProbe(
            lambda: [slot], Nowhere(), self._wake, gateway_name=name, clock=time.monotonic
        )

    def _wake(self) -> None:
        self.wakes += 1

    def stop(self, name: str) -> None:
        """It ends; its words are forgotten, as after their lifetime."""
        del self._probes[name]
        self.client.delete(f"exaops:reach:{name}", f"exaops:reached:{name}")

    def look(self, steps: int = 1) -> str:
        """Let each gateway try so often, and the controller read. Returns the recorded reach."""
        for name in self._probes:
            asyncio.run(self._take(name, steps))
        return self.record()

    def record(self) -> str:
        self.recorder.step()
        self.replica.refresh_from_db()
        return self.replica.reach

    async def _take(self, name: str, steps: int) -> None:
        async with redis.asyncio.Redis.from_url(os.environ["REDIS_URL"]) as client:
            writer = ReachWriter(client, name)
            writer._written = self._known[name]
            self._probes[name]._log = writer
            for _ in range(steps):
                await self._probes[name].step()
            self._known[name] = writer._written


class Nowhere:
    """Where a probe writes before it has a client of the loop that it runs in."""

    async def write(self, *said: object) -> None:
        raise AssertionError(said)


@pytest.fixture
def gateways(replica: Replica, redis_client: redis.Redis) -> Gateways:
    return Gateways(redis_client, replica)


@pytest.fixture
def firewalled() -> Iterator[int]:
    """A port that somebody holds and nobody listens on: connecting is refused, as by a firewall."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
def open_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def put_at(replica: Replica, port: int) -> None:
    Replica.objects.filter(pk=replica.pk).update(address=f"127.0.0.1:{port}")


def ready_count() -> int:
    return int(vars(live_deployments().get())["ready_count"])


def events_of(replica: Replica) -> list[str]:
    rows = Event.objects.filter(subject_id=str(replica.pk)).order_by("pk")
    return list(rows.values_list("event", flat=True))


def test_ready_replica_counts_and_is_routed_to_once_a_gateway_reached_it(
    gateways: Gateways, replica: Replica, open_port: int
) -> None:
    put_at(replica, open_port)
    gateways.start("g", open_port)
    assert ready_count() == 0
    assert not routes()[str(replica.pk)].reached
    assert gateways.look() == "reached"
    assert ready_count() == 1
    assert routes()[str(replica.pk)].reached
    assert events_of(replica) == ["created", "reached"]
    assert gateways.wakes == 1, "requests that waited for it were told"
    assert gateways.slots["g"].reach is True


def test_firewalled_port_keeps_a_ready_replica_from_counting_and_says_why(
    gateways: Gateways, replica: Replica, firewalled: int
) -> None:
    put_at(replica, firewalled)
    gateways.start("g", firewalled)
    assert gateways.look() == "waiting", "one refused connect may be a replica that just ended"
    assert gateways.look() == "unreachable"
    assert replica.unroutable_reason.startswith(f"port {firewalled} unreachable from gateway g:")
    assert ready_count() == 0
    assert not routes()[str(replica.pk)].reached
    assert gateways.look(3) == "unreachable"
    assert events_of(replica) == ["created", "unroutable"], "said once, though tried again and again"
    assert replica.status == "ready", "its engine is well: nothing is restarted for a network"
    assert Replica.objects.count() == 1


def test_replica_is_reached_again_when_its_port_opens(gateways: Gateways, replica: Replica) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    put_at(replica, port)
    gateways.start("g", port)
    assert gateways.look(2) == "unreachable"
    with socket.create_server(("127.0.0.1", port)):
        assert gateways.look() == "reached"
    assert gateways.look(2) == "reached", "reached once, it is not tried until a request fails there"
    gateways.slots["g"].failed_at_seconds = time.monotonic()
    assert gateways.look(2) == "unreachable"
    assert gateways.slots["g"].reach is True, "marked down by its failures; perhaps it is only busy"
    assert events_of(replica) == ["created", "unroutable", "routable_again", "unroutable"]


def test_one_gateway_that_reaches_it_is_enough_and_the_other_is_named(
    gateways: Gateways, replica: Replica, open_port: int, firewalled: int
) -> None:
    put_at(replica, open_port)
    gateways.start("far", firewalled)
    assert gateways.look(2) == "unreachable"
    gateways.start("near", open_port)
    assert gateways.look() == "partly"
    assert "unreachable from gateway far" in replica.unroutable_reason
    assert ready_count() == 1
    gateways.stop("far")
    assert gateways.look() == "reached"
    assert replica.unroutable_reason == ""


def test_without_a_living_gateway_nothing_is_held_up(
    gateways: Gateways, replica: Replica, open_port: int, firewalled: int
) -> None:
    put_at(replica, open_port)
    assert gateways.record() == "unchecked"
    assert (ready_count(), routes()[str(replica.pk)].reached) == (1, True)
    gateways.start("g", firewalled)
    assert gateways.look(2) == "unreachable"
    gateways.stop("g")
    assert gateways.record() == "unchecked", "what a dead gateway said is forgotten"
    assert replica.unroutable_reason == ""
    gateways.start("h", open_port)
    assert gateways.look() == "reached"
    gateways.stop("h")
    assert gateways.record() == "reached", "what was reached stays so when the gateway ends"


def test_another_attempt_at_the_same_port_must_be_reached_anew(
    gateways: Gateways, replica: Replica, open_port: int
) -> None:
    put_at(replica, open_port)
    gateways.start("g", open_port)
    assert gateways.look() == "reached"
    Replica.objects.filter(pk=replica.pk).update(reach="waiting", attempt=2)
    assert gateways.look() == "waiting", "the gateway knows of the first attempt only"
    gateways.slots["g"].record = dataclasses.replace(gateways.slots["g"].record, attempt=2)
    assert gateways.look() == "reached"


def test_gateway_that_stood_still_says_all_of_it_again(
    gateways: Gateways, replica: Replica, open_port: int
) -> None:
    put_at(replica, open_port)
    gateways.start("g", open_port)
    assert gateways.look() == "reached"
    gateways.client.delete("exaops:reached:g", "exaops:reach:g")
    gateways.look()
    token = place_token(str(replica.pk), 1, open_port)
    assert gateways.client.sismember("exaops:reached:g", token)
    assert 0 < int(gateways.client.ttl("exaops:reached:g")) <= 15


def test_what_a_gateway_says_of_replicas_that_are_not_ready_or_not_known_is_passed_over(
    replica: Replica,
) -> None:
    Replica.objects.update(status="loading", reach="unchecked")

    class Said:
        def read(self) -> dict[str, dict[str, str]]:
            unknown = {"no uuid": "x", "00000000-0000-4000-8000-000000000000": "y"}
            return {"g": {str(replica.pk): "refused", **unknown}}

        def reached(self, _gateway: str, tokens: Sequence[str]) -> list[bool]:
            return [False for _ in tokens]

    ReachRecorder(Said(), place_token).step()
    replica.refresh_from_db()
    assert (replica.unroutable_reason, replica.reach) == ("", "unchecked")


def test_page_and_rest_tell_a_network_fault_from_an_engine_fault(
    gateways: Gateways, replica: Replica, firewalled: int
) -> None:
    put_at(replica, firewalled)
    gateways.start("g", firewalled)
    gateways.look(2)
    live_reader.use(MemoryReader())
    replica_loads.use(MemoryReader())
    browser = Client()
    browser.force_login(make_user("paul", "viewer"))
    text = browser.get(reverse("replica", args=[replica.pk])).content.decode()
    assert "Not routable" in text
    assert f"port {firewalled} unreachable from gateway g" in text
    told = client_with_key(make_user("vera", "viewer")).get(f"/api/v1/replicas/{replica.pk}").json()
    assert (told["status"], told["reach"]) == ("ready", "unreachable")
    assert told["unroutable_reason"] == Replica.objects.get().unroutable_reason
