"""A replica over two real agents: ready as one, killed in part and started again whole, drained from both."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from exaserve_ops.adapters.live_store import RedisLiveReader
from exaserve_ops.lib import clock
from exaserve_ops.lib.hints import ring
from exaserve_ops.serving.models import Model, Replica
from exaserve_ops.serving.selectors.logs import LOG_HINT
from exaserve_ops.serving.services.deployments import DeploymentWish, create_deployment, delete_deployment
from tests.fakes.control_plane import ControlPlane
from tests.fakes.fleet import GIB
from tests.fakes.node import wait_for
from tests.fakes.real_agent import RealAgent
from tests.fakes.valkey import Valkey

pytestmark = [
    pytest.mark.system,
    pytest.mark.outage,
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(300),
]


@pytest.fixture
def store() -> Iterator[Valkey]:
    with tempfile.TemporaryDirectory(prefix="gang-") as folder:
        store = Valkey(Path(folder))
        store.start()
        yield store
        store.close()


@pytest.fixture
def plane_store(store: Valkey) -> Path:
    return store.socket


@pytest.fixture
def agents(plane: ControlPlane, store: Valkey, tmp_path: Path) -> Iterator[list[RealAgent]]:
    plane.start_leader()
    made = [RealAgent(tmp_path / name, store, name=name, address="127.0.0.1") for name in ("one", "two")]
    for agent in made:
        agent._env["EXAOPS_AGENT_LABELS"] = "supernode=s1"
        agent.start()
    yield made
    for agent in made:
        agent.close()


def status() -> tuple[str, int, str]:
    replica = Replica.objects.first()
    return ("", 0, "") if replica is None else (replica.status, replica.gang_epoch, replica.reason)


def has_log(reader: RedisLiveReader, replica: Replica, number: int) -> bool:
    """Whether the agent of a member has sent something of its log; asked again until it has."""
    ring(LOG_HINT, f"{replica.pk}/{number}")
    return bool(reader.read_log(str(replica.pk), number, "0", 10))


def test_two_agents_run_one_replica_through_the_death_of_a_member(
    agents: list[RealAgent], store: Valkey
) -> None:
    for agent in agents:
        wait_for(lambda agent=agent: "simulated" in agent.row().engines, "the introduction", seconds=60)
    model = Model.objects.create(name="wide-model", digest="d", source="file:///tmp")
    wish = DeploymentWish(
        name="wide", model_id=model.pk, replicas=1, engine="simulated", replica_memory_bytes=GIB // 8,
        nodes_per_replica=2,
    )  # fmt: skip
    deployment = create_deployment(wish, actor="user:test", now=clock.now())
    wait_for(lambda: status()[:2] == ("ready", 1), f"all members: {status}", seconds=90)
    replica = Replica.objects.get()
    assert all(agent.runs(str(replica.pk)) for agent in agents)
    reader = RedisLiveReader(f"unix://{store.socket}")
    for number in (0, 1):
        wait_for(lambda number=number: has_log(reader, replica, number), f"the log of {number}", seconds=60)
    other = replica.members.get(number=1)
    assert other.pid is not None
    os.kill(other.pid, signal.SIGKILL)
    wait_for(lambda: status()[1] == 2, "the next start", seconds=60)
    wait_for(lambda: status()[:2] == ("ready", 2), "all members again", seconds=90)
    assert {agent.attempts()[str(replica.pk)] for agent in agents} == {2}
    ended = replica.members.get(number=1)
    assert (ended.exit_attempt, ended.exit_signal) == (1, signal.SIGKILL)
    delete_deployment(deployment.pk, actor="user:test", now=clock.now())
    wait_for(lambda: Replica.objects.get().status == "stopped", "the end", seconds=90)
    assert not any(agent.runs(str(replica.pk)) for agent in agents)
    wait_for(lambda: type(deployment).objects.get().status == "deleted", "no deployment", seconds=60)
