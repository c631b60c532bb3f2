"""A node that is cut off, or off: found out, healed elsewhere, and fenced when it comes back."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import pytest
import redis

from exaserve_ops.adapters.route_table import REPLICAS_KEY
from exaserve_ops.audit.models import Event
from exaserve_ops.health.models import Incident, NodeLease
from exaserve_ops.lib import clock
from exaserve_ops.serving.models import Deployment, Model, Replica
from exaserve_ops.serving.services.deployments import DeploymentWish, create_deployment, scale_deployment
from tests.fakes.cable import Cable, NoNamespaceError, cable
from tests.fakes.control_plane import ControlPlane
from tests.fakes.fleet import GIB
from tests.fakes.front_door import Answer, FrontDoor, Visitors, free_port, refused
from tests.fakes.node import wait_for
from tests.fakes.real_agent import RealAgent
from tests.fakes.valkey import Valkey

pytestmark = [
    pytest.mark.system,
    pytest.mark.outage,
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(300),
]

SESSIONS = [f"session-{number}" for number in range(16)]


class World:
    """Two real agents, `far` behind a cable and `near` on this machine, and a gateway before them."""

    def __init__(self, folder: Path, plane: ControlPlane, store: Valkey, far: RealAgent) -> None:
        self.plane = plane
        self.store = store
        self.far = far
        self.near = RealAgent(folder / "near", store, name="near", address="127.0.0.1")
        self.visitors: Visitors | None = None

    def bring_up(self) -> tuple[Deployment, FrontDoor]:
        """A deployment of two, one on each node, and somebody who chats."""
        self.plane.start_leader()
        for agent in (self.far, self.near):
            agent.start()
        for agent in (self.far, self.near):
            wait_for(lambda agent=agent: "simulated" in agent.row().engines, "the introduction", seconds=40)
        model = Model.objects.create(name="chat-model", digest="d", source="file:///tmp")
        wish = DeploymentWish(
            name="chat", model_id=model.pk, replicas=2, engine="simulated", replica_memory_bytes=GIB // 8
        )
        deployment = create_deployment(wish, actor="user:test", now=clock.now())
        wait_for(lambda: self.ready_on(self.far) == self.ready_on(self.near) == 1, "one on each", seconds=60)
        door = self.plane.open_door("chat-model")
        door.wait_until_serving()
        self.visitors = Visitors(door, SESSIONS)
        wait_for(
            lambda: len({answer.replica for _, answer in self.answers()}) == 2,
            "sessions on both nodes",
            seconds=30,
        )
        return deployment, door

    def answers(self) -> list[tuple[str, Answer]]:
        assert self.visitors is not None
        return self.visitors.answers()

    @staticmethod
    def ready_on(agent: RealAgent) -> int:
        return Replica.objects.filter(node=agent.pk, status="ready").count()

    def routed(self) -> set[str]:
        with redis.Redis(unix_socket_path=str(self.store.socket)) as client:
            return {key.decode() for key in client.hkeys(REPLICAS_KEY)}

    def end(self) -> None:
        if self.visitors is not None:
            self.visitors.leave()
        for agent in (self.far, self.near):
            if agent.process is not None:
                agent.process.send_signal(signal.SIGCONT)
            agent.close()


@pytest.fixture
def line() -> Iterator[Cable]:
    try:
        with cable() as laid:
            yield laid
    except NoNamespaceError as error:
        pytest.skip(str(error))


@pytest.fixture
def store(line: Cable, tmp_path: Path) -> Iterator[Valkey]:
    store = Valkey(tmp_path, port=free_port(line.store), host=line.store)
    store.start()
    yield store
    store.close()


@pytest.fixture
def world(plane: ControlPlane, line: Cable, store: Valkey, tmp_path: Path) -> Iterator[World]:
    far = RealAgent(tmp_path / "far", store, name="far", address=line.node)
    far.prefix = line.prefix
    world = World(tmp_path, plane, store, far)
    try:
        yield world
    finally:
        world.end()


@pytest.fixture
def plane_store(store: Valkey) -> Path:
    """The control plane's store is the one at the end of the cable."""
    return store.socket


def assert_dead_and_healed(world: World, victim: str) -> None:
    """The far node is dead, nobody else is, and what it served is served near."""
    wait_for(lambda: world.far.row().liveness == "dead", "the verdict", seconds=30)
    wait_for(lambda: victim not in world.routed(), "its route to be withdrawn", seconds=10)
    wait_for(lambda: world.ready_on(world.near) == 2, "its replica to be healed elsewhere", seconds=60)
    assert world.near.row().liveness == "alive"
    assert not Incident.objects.exists()
    # From the verdict on nobody is sent to it, and nobody is refused.
    before = len(world.answers())
    wait_for(lambda: len(world.answers()) > before + 2 * len(SESSIONS), "more chats", seconds=60)
    since = world.answers()[before:]
    assert refused(since) == []
    assert victim not in {answer.replica for _, answer in since}


def assert_back_and_fenced(world: World, deployment: Deployment, victim: str) -> None:
    """It is alive under a new lease, without what was replaced, and is used again."""
    wait_for(lambda: world.far.row().liveness == "alive", "the return", seconds=40)
    wait_for(lambda: not world.far.runs(victim), "the replaced replica to be stopped", seconds=40)
    wait_for(lambda: Replica.objects.get(pk=victim).status == "stopped", "its end", seconds=40)
    assert NodeLease.objects.get(node=world.far.pk).epoch >= 2
    assert victim not in world.routed()
    events = Event.objects.filter(subject_id=world.far.node_id, event__in=("lost", "recovered"))
    assert list(events.order_by("pk").values_list("event", flat=True)) == ["lost", "recovered"]
    scale_deployment(deployment.pk, replicas=3, actor="user:test", now=clock.now())
    wait_for(lambda: world.ready_on(world.far) == 1, "the node to be used again", seconds=60)


def assert_one_owner(world: World, victim: str, *, may_start_again: frozenset[str] = frozenset()) -> None:
    """No session went back to the replica that it had left, and nothing else was launched twice."""
    assert world.visitors is not None
    answers = [(session, answer) for session, answer in world.visitors.leave() if answer.status == 200]
    for name in SESSIONS:
        moves = [key for key, _ in groupby(answer.replica for session, answer in answers if session == name)]
        assert victim not in moves[1:], f"{name} went {moves}"
    for agent in (world.far, world.near):
        again = {replica for replica, attempts in agent.attempts().items() if attempts > 1}
        assert again <= may_start_again
    made = Event.objects.filter(event="created", subject_kind="replica").count()
    assert made == 4, "two, one in place of the lost one, and one at the end"


@pytest.mark.parametrize("how", ["cable", "store", "inward"])
def test_node_that_is_cut_off_is_healed_elsewhere_and_fenced_when_it_returns(
    world: World, line: Cable, stay_away: Callable[[], None], how: str
) -> None:
    deployment, _ = world.bring_up()
    victim = str(Replica.objects.get(node=world.far.pk).pk)
    line.cut(how)
    assert_dead_and_healed(world, victim)
    stay_away()
    assert world.far.runs(victim), "an agent does not stop what it serves because it cannot reach the store"
    line.mend(how)
    assert_back_and_fenced(world, deployment, victim)
    assert_one_owner(world, victim)


def test_node_that_stands_still_is_healed_elsewhere_and_fenced_when_it_goes_on(
    world: World, stay_away: Callable[[], None]
) -> None:
    deployment, _ = world.bring_up()
    victim = str(Replica.objects.get(node=world.far.pk).pk)
    world.far.signal(signal.SIGSTOP)
    assert_dead_and_healed(world, victim)
    stay_away()
    world.far.signal(signal.SIGCONT)
    assert_back_and_fenced(world, deployment, victim)
    assert_one_owner(world, victim)


def test_agent_and_engines_killed_at_once_are_healed_elsewhere_and_the_node_is_used_again(
    world: World, stay_away: Callable[[], None]
) -> None:
    deployment, _ = world.bring_up()
    victim = str(Replica.objects.get(node=world.far.pk).pk)
    world.far.lose_power()
    assert_dead_and_healed(world, victim)
    stay_away()
    world.far.start()
    assert_back_and_fenced(world, deployment, victim)
    # An agent whose machine is on again starts what its journal wants until it hears what is wanted now.
    assert_one_owner(world, victim, may_start_again=frozenset({victim}))
