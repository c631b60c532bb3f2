"""A rollout without spare cards on a real agent: memory comes back late, and no launch is burnt."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from exaserve_ops.audit.models import Event
from exaserve_ops.controllers.rollouts import RolloutDriver
from exaserve_ops.inventory.models import FailureDomain
from exaserve_ops.inventory.models import Node as NodeRow
from exaserve_ops.lib import clock
from exaserve_ops.rollouts.models import Rollout
from exaserve_ops.rollouts.services.rollouts import checked_policy, create_rollout, preview_rollout
from exaserve_ops.serving.models import Deployment, Model, Replica
from exaserve_ops.serving.services.deployments import DeploymentWish, create_deployment
from exaserve_ops.serving.services.releases import ReleaseWish
from tests.fakes.cards import FakeCards
from tests.fakes.leader import Leader, leading
from tests.fakes.node import Node, make_home
from tests.fakes.valkey import Valkey

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(240)]

NEEDED_MIB = 60 * 1024
QUICK = {"canary_soak_seconds": 0, "soak_seconds": 0, "min_requests": 0, "sessions_wait_seconds": 0}


class TestsOwnStore(Valkey):
    """The store that the tests already run, as the agent's fake wants to see one."""

    __test__ = False

    def __init__(self, url: str) -> None:
        self._url = url

    @property
    def url(self) -> str:
        return self._url

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self._url)


@pytest.fixture
def cards(tmp_path: Path) -> FakeCards:
    return FakeCards(tmp_path, 2)


@pytest.fixture
def leader(redis_client: redis.Redis) -> Iterator[Leader]:
    with leading(redis_client) as leader:
        yield leader


@pytest.fixture
def node(tmp_path: Path, cards: FakeCards, leader: Leader) -> Iterator[Node]:  # noqa: ARG001 - reads first
    url = os.environ["REDIS_URL"]
    settings = {"EXAOPS_AGENT_MEMORY_WAIT_SECONDS": "200", "EXAOPS_AGENT_STOP_GRACE_SECONDS": "2"}
    node = Node(make_home(tmp_path / "home", url), TestsOwnStore(url), cards.env | settings)
    domain = FailureDomain.objects.create(kind="host", name="node-a")
    NodeRow.objects.create(pk=uuid.UUID(node.node_id), name="node-a", failure_domain=domain)
    node.start()
    yield node
    node.close()


def settle(
    leader: Leader, driver: RolloutDriver, done: str, condition: Callable[[], object], *, seconds: float
) -> None:
    """Let the leader work until it is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        rows = Replica.objects.exclude(status="stopped").values_list("name", "status", "reason")
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {done}; {list(rows)}"
        driver.step()
        leader.work()
        time.sleep(0.1)


def deploy(cards: FakeCards) -> Deployment:
    model = Model.objects.create(name="tiny", digest="d", source="file:///tmp")
    wish = DeploymentWish(
        name="chat",
        model_id=model.pk,
        replicas=2,
        engine="tiny",
        replica_memory_bytes=NEEDED_MIB << 20,
        engine_options={"cards": str(cards.folder), "vram_mib": NEEDED_MIB},
    )
    return create_deployment(wish, actor="user:test", now=clock.now())


def test_in_place_rollout_waits_for_memory_and_counts_no_attempt_as_failed(
    leader: Leader, node: Node, cards: FakeCards
) -> None:
    driver = RolloutDriver(leader.queue)
    settle(leader, driver, "the node", lambda: NodeRow.objects.get(pk=node.node_id).engines, seconds=40)
    deployment = deploy(cards)
    ready = Replica.objects.filter(deployment=deployment, status="ready")
    settle(leader, driver, "two replicas", lambda: ready.count() == 2, seconds=60)

    wish = ReleaseWish(engine_options=deployment.engine_options | {"chatty": 1})
    policy = checked_policy(QUICK)
    plan = preview_rollout(deployment.pk, wish, policy, actor="user:test", now=clock.now())
    assert (plan.mode, plan.refusals) == ("in_place", ())
    rollout = create_rollout(
        deployment.pk, wish, policy, reason="try", confirmed=plan.digest, actor="user:test", now=clock.now()
    )
    waiting = Replica.objects.filter(deployment=deployment, memory_since__isnull=False)
    for nth in (1, 2):
        settle(leader, driver, f"successor {nth} waits for memory", waiting.exists, seconds=60)
        assert cards.give_back() == 1
        settle(leader, driver, f"successor {nth} goes on", lambda: not waiting.exists(), seconds=60)

    def is_done() -> bool:
        return Rollout.objects.get(pk=rollout.pk).status == "done"

    settle(leader, driver, "the rollout", is_done, seconds=60)
    new = Replica.objects.filter(deployment=deployment, wanted="run").exclude(status="stopped")
    assert [(r.status, r.release.number, r.restarts, r.attempt) for r in new] == [("ready", 2, 0, 1)] * 2
    burnt = Event.objects.filter(subject_kind="replica", event="exited", reason__contains="code 1")
    assert not burnt.exists()
    told = Event.objects.filter(subject_kind="replica", event__in=("memory_awaited", "memory_wait_over"))
    assert told.count() == 4
