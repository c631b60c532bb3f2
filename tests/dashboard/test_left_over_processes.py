"""A left-over process is seen on the page, ended on demand by those who may, and on record."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import redis
from django.test import Client
from django.urls import reverse

from exaserve_ops.audit.models import Event
from exaserve_ops.dashboard.ports import live_reader
from exaserve_ops.inventory.domain.leftovers import EndWish, parse_end_wish
from exaserve_ops.inventory.models import Node
from tests.dashboard.conftest import MemoryReader
from tests.fakes.fleet import ScriptedNode
from tests.fakes.leader import Leader, leading
from tests.fakes.world import client_with_key, make_user
from workers.protocol import v1
from workers.protocol.observed import UnknownProcess

pytestmark = pytest.mark.django_db

LEFT = UnknownProcess(
    pid=4711, start_ticks=77, memory_bytes=1 << 30, command="engine", user="ops", left_over=True,
    accelerator_uuid="GPU-1", replica_id="r-1", origin="its output goes to that attempt's log",
)  # fmt: skip
STRANGER = UnknownProcess(pid=4712, start_ticks=78, command="game", origin="somebody else started it")


@pytest.fixture
def leader(redis_client: redis.Redis) -> Iterator[Leader]:
    with leading(redis_client) as made:
        yield made


@pytest.fixture
def node(leader: Leader, redis_client: redis.Redis) -> ScriptedNode:
    live_reader.use(MemoryReader())
    made = ScriptedNode(redis_client)
    made.enrol()
    made.say_hello()
    leader.work()
    made.commands()
    made.beat(unknown_processes=(LEFT, STRANGER))
    leader.work()
    return made


def signed_in(role: str) -> Client:
    browser = Client()
    browser.force_login(make_user(f"{role}-1", role))
    return browser


def asked_of(leader: Leader, node: ScriptedNode) -> list[v1.EndProcess]:
    """What the agent is told, once the hint of the last wish has rung."""
    event = Event.objects.filter(event="process_end_asked").last()
    if event is not None:
        leader.queue.add("end_process", EndWish(node.node_id, LEFT.pid, LEFT.start_ticks).text())
        leader.drain()
    return [command for command in node.commands() if isinstance(command, v1.EndProcess)]


def test_page_tells_left_overs_from_strangers_and_says_what_to_do(node: ScriptedNode) -> None:
    text = signed_in("operator").get(reverse("node", args=[node.node_id])).content.decode()
    assert "End process 4711" in text
    assert "End process 4712" not in text
    assert "<code>kill 4712</code>" in text
    assert "somebody else started it" in text
    seen = signed_in("viewer").get(reverse("node", args=[node.node_id])).content.decode()
    assert "End process 4711" not in seen
    assert "inventory.end_process" in seen


def test_operator_has_it_ended_and_the_record_says_who_why_and_how(
    leader: Leader, node: ScriptedNode
) -> None:
    address = reverse("node_end_process", args=[node.node_id])
    wish = {"pid": LEFT.pid, "start_ticks": LEFT.start_ticks}
    operator = signed_in("operator")
    assert signed_in("viewer").post(address, wish | {"reason": "x"}).status_code == 403
    operator.post(address, wish)
    assert not Event.objects.filter(event="process_end_asked").exists(), "without a reason nothing is asked"
    operator.post(address, wish | {"reason": "holds 1 GiB"})
    asked = Event.objects.get(event="process_end_asked")
    assert asked.actor == "user:operator-1"
    assert "4711 (engine): holds 1 GiB" in asked.reason
    [command] = asked_of(leader, node)
    assert (command.pid, command.start_ticks) == (4711, 77)
    result = v1.CommandResult(
        node_id=node.node_id, command_id=command.command_id, outcome="done", reason="ended by SIGTERM"
    )
    node._send(result)
    leader.work()
    assert Event.objects.get(event="process_ended").reason == "ended by SIGTERM"
    node.beat(unknown_processes=(STRANGER,))
    leader.work()
    assert [p["pid"] for p in Node.objects.get().unknown_processes] == [4712]


def test_rest_refuses_what_is_not_provably_left_over(leader: Leader, node: ScriptedNode) -> None:
    operator = client_with_key(make_user("olga", "operator"))
    url = f"/api/v1/nodes/{node.node_id}/end-process"
    stranger = operator.post(url, {"pid": 4712, "start_ticks": 78, "reason": "x"})
    assert (stranger.status_code, "end it by hand" in stranger.content.decode()) == (409, True)
    reused = operator.post(url, {"pid": 4711, "start_ticks": 1, "reason": "x"})
    assert reused.status_code == 409
    assert asked_of(leader, node) == []
    assert operator.post(url, {"pid": 4711, "start_ticks": 77, "reason": "x"}).status_code == 202
    viewer = client_with_key(make_user("vera", "viewer"))
    assert viewer.post(url, {"pid": 4711, "start_ticks": 77, "reason": "x"}).status_code == 403


def test_refusal_of_the_agent_is_on_record_and_other_nodes_cannot_speak_for_it(
    leader: Leader, node: ScriptedNode
) -> None:
    wish = EndWish(node.node_id, 4711, 77)
    assert parse_end_wish(wish.text()) == wish
    result = v1.CommandResult(
        node_id=node.node_id, command_id=wish.text(), outcome="refused", reason="process 4711 is gone"
    )
    node._send(result)
    foreign = dataclasses.replace(wish, node_id="00000000-0000-4000-8000-000000000000").text()
    node._send(v1.CommandResult(node_id=node.node_id, command_id=foreign, outcome="done"))
    leader.work()
    assert Event.objects.get(event="process_not_ended").reason == "process 4711 is gone"
    assert not Event.objects.filter(event="process_ended").exists()
