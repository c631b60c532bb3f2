"""Whoever waits for `ready` and asks at once is answered: real controllers, gateways and Redis."""

from __future__ import annotations

import time

import httpx
import pytest
import redis

from exaserve_ops.adapters.route_table import PARTS_KEY
from exaserve_ops.lib import clock
from exaserve_ops.serving.models import Deployment, Replica
from exaserve_ops.serving.services.deployments import scale_deployment
from tests.fakes.control_plane import ControlPlane, PaperNodes, deploy
from tests.fakes.front_door import Answer, FrontDoor
from tests.fakes.node import wait_for

pytestmark = [
    pytest.mark.system,
    pytest.mark.outage,
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(300),
]
ROUNDS = 2


def scale(deployment: Deployment, replicas: int) -> None:
    scale_deployment(deployment.pk, replicas=replicas, actor="user:test", now=clock.now())


def answer_after_ready(deployment: Deployment, door: FrontDoor) -> Answer:
    """What a client gets that has seen the first replica become ready this moment."""
    scale(deployment, 1)
    ready = Replica.objects.filter(deployment=deployment, status="ready", wanted="run")
    wait_for(ready.exists, "a ready replica", seconds=60)
    return door.ask(seconds=60)


def first_answer(door: FrontDoor) -> Answer:
    """The first answer of a gateway that begins: until it listens there is none, and no refusal either."""
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        answer = door.ask(seconds=60)
        if httpx.ConnectError.__name__ not in answer.text:
            return answer
        time.sleep(0.02)
    raise AssertionError("the gateway never listened")


def test_client_that_asks_at_once_after_ready_is_answered(
    plane: ControlPlane, nodes: PaperNodes, redis_client: redis.Redis
) -> None:
    """From none to one, again and again; then through gateways that begin, the last without a table."""
    plane.start_leader()
    nodes.start()
    deployment = deploy(1)
    door = plane.open_door("paper")
    wait_for(Replica.objects.filter(status="ready", reach="reached").exists, "it serves", seconds=60)
    answers = [door.ask(seconds=60)]
    for _ in range(ROUNDS):
        scale(deployment, 0)
        gone = Replica.objects.exclude(status="stopped")
        wait_for(lambda: not gone.exists(), "nobody serves", seconds=60)  # noqa: B023 - used in this round
        answers.append(answer_after_ready(deployment, door))
    assert [answer.status for answer in answers] == [200] * (ROUNDS + 1), answers
    assert first_answer(plane.open_door("paper")).status == 200
    redis_client.delete(PARTS_KEY)
    assert first_answer(plane.open_door("paper")).status == 200
